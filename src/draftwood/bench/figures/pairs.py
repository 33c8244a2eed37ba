"""Pairs of methods with different labels, such as two heads, or two methods of the same run.

``diff_runs`` compares methods with equal labels, so both methods of a pair are relabelled, as ``pld -> goose``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from draftwood.bench.figures.pooling import is_plain, list_methods
from draftwood.bench.records import DRAFTER, BenchRun
from draftwood.errors import OptionError


class MethodPair(NamedTuple):
    """Labels of a method of the first run and of the method of the second run to compare it with."""

    before: str
    after: str

    @property
    def label(self) -> str:
        return self.before if self.before == self.after else f"{self.before} -> {self.after}"


def find_pairs(before: BenchRun, after: BenchRun, texts: Iterable[Sequence[str]]) -> list[MethodPair]:
    """Find the methods that a user means by pairs of texts."""
    return [MethodPair(_find_label(before, old, "first"), _find_label(after, new, "second")) for old, new in texts]


def relabel_pairs(before: BenchRun, after: BenchRun, pairs: Iterable[MethodPair]) -> tuple[BenchRun, BenchRun]:
    """Reduce both runs to these pairs and plain decoding, with common labels."""
    plain = [{str(m["label"]) for m in list_methods(run) if is_plain(m)} for run in (before, after)]
    kept = dict.fromkeys((*(MethodPair(label, label) for label in sorted(plain[0] & plain[1])), *pairs))
    return (
        _relabel(before, [(pair.before, pair.label) for pair in kept]),
        _relabel(after, [(pair.after, pair.label) for pair in kept]),
    )


def _find_label(run: BenchRun, text: str, side: str) -> str:
    """Find the label that equals the text, or the only one that starts with it or contains it."""
    labels = [str(method["label"]) for method in list_methods(run)]
    starting = [label for label in labels if text and label.startswith(text)]
    containing = [label for label in labels if text and text in label]
    for found in ([text] if text in labels else [], starting, containing):
        if len(found) == 1:
            return found[0]
    raise OptionError(
        f"{'Several methods match' if containing else 'No method matches'} in the {side} run ({run.name})",
        got=repr(text),
        allowed=[repr(label) for label in containing or labels],  # quoted: labels contain commas and spaces
        next_step="Give a label, its beginning, or a part that is unique: first of the first run, then of the second.",
    )


def _relabel(run: BenchRun, labels: Iterable[tuple[str, str]]) -> BenchRun:
    """Keep the methods with these labels and their records, under new labels."""
    by_label = {str(method["label"]): method for method in list_methods(run)}
    methods: list[dict[str, Any]] = []
    records = []
    for old, new in labels:
        methods.append(by_label[old] if old == new else _strip_definition(by_label[old], new))
        records += [replace(record, method=new) for record in run.records if record.method == old]
    return BenchRun(run.name, replace(run.manifest, methods=methods), records)


def _strip_definition(method: dict[str, Any], label: str) -> dict[str, Any]:
    """Drop drafter and options, which differ by design. Memory and budget stay, so that differences show."""
    drafts = method.get("kind") == DRAFTER and not is_plain(method)
    return {"label": label, **{part: method.get(part) for part in ("memory", "budget") if drafts}}
