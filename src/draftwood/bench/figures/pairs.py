"""Methods with different labels side by side: two heads, or two methods of one and the same run.

``diff_runs`` compares what has one label in both runs. So the two methods of a pair get one, as ``pld -> goose``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from draftwood.bench.figures.pooling import is_plain, list_methods
from draftwood.bench.records import DRAFTER, BenchRun
from draftwood.errors import OptionError


class MethodPair(NamedTuple):
    """The labels of a method of the run before and of the one in the run after that it is compared with."""

    before: str
    after: str

    @property
    def label(self) -> str:
        return self.before if self.before == self.after else f"{self.before} -> {self.after}"


def find_pairs(before: BenchRun, after: BenchRun, texts: Iterable[Sequence[str]]) -> list[MethodPair]:
    """The pairs that are meant by two texts each, as a person types them."""
    return [MethodPair(_label(before, old, "before"), _label(after, new, "after")) for old, new in texts]


def relabel_pairs(before: BenchRun, after: BenchRun, pairs: Iterable[MethodPair]) -> tuple[BenchRun, BenchRun]:
    """Both runs with the methods of these pairs alone, and with plain decoding."""
    plain = [{str(m["label"]) for m in list_methods(run) if is_plain(m)} for run in (before, after)]
    kept = dict.fromkeys((*(MethodPair(label, label) for label in sorted(plain[0] & plain[1])), *pairs))
    return (
        _relabelled(before, [(pair.before, pair.label) for pair in kept]),
        _relabelled(after, [(pair.after, pair.label) for pair in kept]),
    )


def _label(run: BenchRun, text: str, side: str) -> str:
    """The label that a text stands for: itself, or the only one that begins with it, or that it occurs in."""
    labels = [str(method["label"]) for method in list_methods(run)]
    begun = [label for label in labels if text and label.startswith(text)]
    having = [label for label in labels if text and text in label]
    for found in ([text] if text in labels else [], begun, having):
        if len(found) == 1:
            return found[0]
    raise OptionError(
        f"{'Several methods' if having else 'No method'} of the run {side} ({run.name}) can be meant",
        got=repr(text),
        allowed=[repr(label) for label in having or labels],  # in quotes: labels have commas and blanks
        next_step="Give a label, its beginning, or a part that no other has: first one of the run before, then one of "
        "the run after.",
    )


def _relabelled(run: BenchRun, labels: Iterable[tuple[str, str]]) -> BenchRun:
    """The methods with these labels and what they did, each under its new label."""
    by_label = {str(method["label"]): method for method in list_methods(run)}
    methods: list[dict[str, Any]] = []
    records = []
    for old, new in labels:
        methods.append(by_label[old] if old == new else _unnamed(by_label[old], new))
        records += [replace(record, method=new) for record in run.records if record.method == old]
    return BenchRun(run.name, replace(run.manifest, methods=methods), records)


def _unnamed(method: dict[str, Any], label: str) -> dict[str, Any]:
    """What a label does not tell: that drafter and options of a pair differ is no news, other budgets may be."""
    drafts = method.get("kind") == DRAFTER and not is_plain(method)
    return {"label": label, **{part: method.get(part) for part in ("memory", "budget") if drafts}}
