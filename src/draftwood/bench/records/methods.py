"""Methods as typed by a user: a drafter with options, or a peer.

goose                                   a drafter
goose:bypass=copied,extension=levels    with options
goose:memory=process,budget=16          with its own memory and budget
my_drafter.py:MyDrafter:width=3         a drafter from a file
transformers, llamacpp:lookup           a peer (--peers)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftwood.config import DEFAULT_MEMORY, EngineOptions, parse_value
from draftwood.drafters import check_drafter, parse_memory
from draftwood.errors import OptionError

PLAIN = "plain"
DRAFTER, PEER = "drafter", "peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchMethod:
    """One method of a benchmark: a drafter or a peer."""

    label: str  # unique within a run
    kind: str = DRAFTER
    drafter: str  # for a peer: its name
    options: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    budget: int | str = 1
    note: str = ""  # caveats shown in the report

    @property
    def is_plain(self) -> bool:
        return self.kind == DRAFTER and self.drafter == PLAIN

    @property
    def family(self) -> str:
        """The label without its budget: methods that differ only in budget form one curve."""
        return self.label.split(" @", 1)[0]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "family": self.family}


def parse_methods(texts: Sequence[str], memory: str, budgets: Sequence[int | str]) -> list[BenchMethod]:
    """Parse methods in the given order, each with every budget."""
    methods: list[BenchMethod] = []
    for text in texts:
        name, options = parse_method(text)
        options.pop("budget", None)
        scope = str(options.pop("memory", memory))
        scope = DEFAULT_MEMORY if name == PLAIN else scope  # plain decoding learns nothing
        check_drafter(name, options)
        parse_memory(scope)
        for label, budget in list_labels(text, budgets):
            EngineOptions(budget=budget)  # raises if the budget is invalid
            methods.append(BenchMethod(label=label, drafter=name, options=options, memory=scope, budget=budget))
    labels = [method.label for method in methods]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise OptionError("A method is listed twice", got=", ".join(repeated))
    return methods


def list_labels(text: str, budgets: Sequence[int | str]) -> list[tuple[str, Any]]:
    """List a method's labels with their budgets. Its own budget overrides ``budgets``; plain decoding needs none."""
    name, options = parse_method(text)
    own = [1] if name == PLAIN else [options["budget"]] if "budget" in options else budgets
    return [(text if len(own) == 1 else f"{text} @{budget}", budget) for budget in own]


def check_memories(methods: Sequence[BenchMethod], repeats: int) -> None:
    """Reject memory settings that would distort the measurement."""
    plans = {method.label: parse_memory(method.memory) for method in methods if method.kind == DRAFTER}
    files = Counter(plan.path for plan in plans.values() if plan.path is not None)
    shared = [label for label, plan in plans.items() if plan.path is not None and files[plan.path] > 1]
    if shared:
        raise OptionError(
            "Two methods store their memory in the same file",
            got=shared,
            next_step="Give each its own file, as in goose:memory=FILE.",
        )
    persistent = [label for label, plan in plans.items() if plan.scope == "process"]
    if persistent and repeats > 1:
        raise OptionError(
            "A method that remembers earlier requests would copy its own answers in a repeat",
            got=f"{repeats} repeats, {', '.join(persistent)}",
            next_step="Leave repeats at 1, or memory at request or prompt.",
        )


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``NAME:KEY=VALUE,...`` into the name and its options. A name may be ``FILE.py:CLASS``."""
    name, _, rest = text.partition(":")
    if name.endswith(".py") and rest and "=" not in rest.partition(":")[0]:
        cls, _, rest = rest.partition(":")
        name = f"{name}:{cls}"
    options: dict[str, Any] = {}
    for pair in rest.split(",") if rest else []:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise OptionError(
                "A method must be a drafter name with options", got=text, allowed="NAME or NAME:KEY=VALUE,KEY=VALUE"
            )
        options[key.strip().replace("-", "_")] = parse_value(value)
    if not name:
        raise OptionError("A method has no name", got=repr(text), allowed="NAME or NAME:KEY=VALUE,KEY=VALUE")
    return name, options
