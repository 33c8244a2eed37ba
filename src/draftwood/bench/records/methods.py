"""Methods by what a user types: a drafter with options, or a peer.

goose                                   a drafter
goose:bypass=copied,extension=levels    with options
goose:memory=process,budget=16          memory and budget may be its own too
transformers, llamacpp:lookup           a peer, where one is meant (--peers)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftwood.config import DEFAULT_MEMORY, EngineOptions, parse_value
from draftwood.drafters import check_drafter, memory_plan
from draftwood.errors import OptionError

PLAIN = "plain"
DRAFTER, PEER = "drafter", "peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchMethod:
    """One column of a benchmark."""

    label: str  # unique within a run
    kind: str = DRAFTER
    drafter: str  # of a peer: its name
    options: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    budget: int | str = 1
    note: str = ""  # what a reader of its figures should know

    @property
    def is_plain(self) -> bool:
        return self.kind == DRAFTER and self.drafter == PLAIN

    @property
    def family(self) -> str:
        """The label without its budget: methods that differ in it alone are points of one curve."""
        return self.label.split(" @", 1)[0]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "family": self.family}


def parse_methods(texts: Sequence[str], memory: str, budgets: Sequence[int | str]) -> list[BenchMethod]:
    """The methods in the order they were named, each with every budget."""
    methods: list[BenchMethod] = []
    for text in texts:
        name, options = parse_method(text)
        options.pop("budget", None)
        kept = str(options.pop("memory", memory))
        kept = DEFAULT_MEMORY if name == PLAIN else kept  # it learns nothing that a file could hold
        check_drafter(name, options)
        memory_plan(kept)
        for label, budget in list_labels(text, budgets):
            EngineOptions(budget=budget)  # refuses what is no budget
            methods.append(BenchMethod(label=label, drafter=name, options=options, memory=kept, budget=budget))
    labels = [method.label for method in methods]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise OptionError("A method is named twice", got=", ".join(twice))
    return methods


def list_labels(text: str, budgets: Sequence[int | str]) -> list[tuple[str, Any]]:
    """The labels of a method, each with its budget. One of its own goes before these; plain decoding needs none."""
    name, options = parse_method(text)
    own = [1] if name == PLAIN else [options["budget"]] if "budget" in options else budgets
    return [(text if len(own) == 1 else f"{text} @{budget}", budget) for budget in own]


def check_memories(methods: Sequence[BenchMethod], repeats: int) -> None:
    """Refuses memories that would falsify what is measured."""
    plans = {method.label: memory_plan(method.memory) for method in methods if method.kind == DRAFTER}
    files = Counter(plan.path for plan in plans.values() if plan.path is not None)
    shared = [label for label, plan in plans.items() if plan.path is not None and files[plan.path] > 1]
    if shared:
        raise OptionError(
            "Two methods keep their memory in one file",
            got=shared,
            next_step="Give each a file of its own, as in goose:memory=FILE.",
        )
    lasting = [label for label, plan in plans.items() if plan.scope == "process"]
    if lasting and repeats > 1:
        raise OptionError(
            "A method that remembers earlier requests finds its own answers when it is asked again",
            got=f"{repeats} repeats, {', '.join(lasting)}",
            next_step="Leave repeats at 1, or memory at request or prompt.",
        )


def split_methods(text: str) -> list[str]:
    """Names between commas. Options have commas too: what is no name (``KEY=VALUE``) belongs to the method before."""
    methods: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if methods and "=" in piece and ":" not in piece.split("=", 1)[0]:
            methods[-1] += f",{piece}"
        else:
            methods.append(piece)
    return methods


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise OptionError(
                "A method is a drafter's name and its options", got=text, allowed="NAME or NAME:KEY=VALUE,KEY=VALUE"
            )
        options[key.strip().replace("-", "_")] = parse_value(value)
    if not name:
        raise OptionError("A method has no name", got=repr(text), allowed="NAME or NAME:KEY=VALUE,KEY=VALUE")
    return name, options
