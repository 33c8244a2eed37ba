"""Blend: one tree from every source, best guess first, with learned acceptance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftwood.compiled import TAIL, HintSource, Learned
from draftwood.drafters.base import DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_int
from draftwood.drafters.transition import HARVESTS, TransitionDrafter
from draftwood.errors import OptionError
from draftwood.growth import Blend, BlendLimits, new_learned
from draftwood.sources import PlaceHints, SuccessorArrays, SuccessorHints, TransitionTable
from draftwood.targets import TargetInfo
from draftwood.tree import DraftTree

MIN_VALUE = 1e-4  # chance of a path below which a node is never worth its place
# Sources by name, made from the table that the drafter maintains.
SOURCES: Mapping[str, Callable[[TransitionTable], HintSource]] = {
    PlaceHints.name: lambda _: PlaceHints(),
    SuccessorHints.name: SuccessorHints,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendOptions:
    sources: str = "context+transition"  # where guesses come from, joined by "+"
    depth: int = 40  # maximum depth of the tree
    top_k: int = 10  # successors kept per context
    bigrams: bool = True  # also keep successors of token pairs
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs

    def __post_init__(self) -> None:
        names = self.sources.split("+") if isinstance(self.sources, str) else []
        if not names or len(set(names)) < len(names) or not set(names) <= set(SOURCES):
            raise OptionError(
                "sources must be different sources joined by '+'",
                got=repr(self.sources),
                allowed=[*SOURCES, "+".join(SOURCES)],
            )
        check_int(self, 1, "depth", "top_k")
        check_int(self, 1, "table_megabytes", high=1 << 20)
        check_flag(self, "bigrams", "static")
        check_choice(self, "harvest", HARVESTS)


class _Shared(NamedTuple):
    successors: SuccessorArrays | None
    learned: dict[float, Learned]  # by temperature, on which acceptance depends


class BlendDrafter(TransitionDrafter):
    name = "blend"
    summary = "One tree from every source: the guess with the highest learned chance of acceptance comes next"
    guesses_from = "the text so far, and logits of earlier passes"
    tree_shape = "best-first over all sources"
    copies_text = True
    Options = BlendOptions
    shared: _Shared

    @classmethod
    def share(cls, options: BlendOptions, target: TargetInfo) -> _Shared:  # type: ignore[override]
        return _Shared(super().share(options, target), {})

    @classmethod
    def new_memory(cls, options: BlendOptions, target: TargetInfo, shared: _Shared) -> TransitionTable:
        return super().new_memory(options, target, shared.successors)

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        sources = [SOURCES[name](self.memory) for name in self.options.sources.split("+")]
        temperature = round(request.params.temperature, 1)
        learned = self.shared.learned.get(temperature)
        if learned is None:
            learned = self.shared.learned[temperature] = new_learned(sources)
        self._blend = Blend(sources, learned)
        self._sources = sources
        self._text_end: list[int] = []  # the last tokens
        self._read(request.known_text)

    def propose(self, budget: int) -> DraftTree:
        if budget == 1:
            return DraftTree.root_only(self._text_end[-1])
        return self._blend.tree(self._text_end, BlendLimits(budget, self.options.depth, MIN_VALUE))

    def observe(self, verified: VerifiedTree) -> None:
        self._blend.learn(self._text_end, verified.emitted)
        super().observe(verified)
        self._read(verified.emitted)

    def _read(self, tokens: Sequence[int]) -> None:
        for source in self._sources:
            source.extend(tokens)
        self._text_end = [*self._text_end, *tokens[-TAIL:]][-TAIL:]
