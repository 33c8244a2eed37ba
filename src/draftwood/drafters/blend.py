"""Blend: one tree from the text so far and from recycled logits, best guess first, with learned acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftwood.compiled import TAIL, Learned
from draftwood.drafters.base import DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_int
from draftwood.drafters.transition import HARVESTS, TransitionDrafter
from draftwood.growth import Blend, BlendLimits, new_learned
from draftwood.sources import PlaceHints, SuccessorArrays, SuccessorHints, TransitionTable
from draftwood.targets import TargetInfo
from draftwood.tree import DraftTree

MIN_VALUE = 1e-4  # chance of a path below which a node is never worth its place


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendOptions:
    depth: int = 40  # maximum depth of the tree
    top_k: int = 10  # successors kept per context
    bigrams: bool = True
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs

    def __post_init__(self) -> None:
        check_int(self, 1, "depth", "top_k")
        check_int(self, 1, "table_megabytes", high=1 << 20)
        check_flag(self, "bigrams", "static")
        check_choice(self, "harvest", HARVESTS)


class _Shared(NamedTuple):
    successors: SuccessorArrays | None
    learned: dict[float, Learned]  # by temperature: how often hints are right depends on it


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
        self._places = PlaceHints()
        sources: Sequence[Any] = (self._places, SuccessorHints(self.memory))
        temperature = round(request.params.temperature, 1)
        learned = self.shared.learned.get(temperature)
        if learned is None:
            learned = self.shared.learned[temperature] = new_learned(sources)
        self._blend = Blend(sources, learned)
        self._places.extend(request.known_text)
        self._text_end = list(request.known_text[-TAIL:])

    def propose(self, budget: int) -> DraftTree:
        if budget == 1:
            return DraftTree.root_only(self._text_end[-1])
        return self._blend.tree(self._text_end, BlendLimits(budget, self.options.depth, MIN_VALUE))

    def observe(self, verified: VerifiedTree) -> None:
        emitted = verified.emitted
        self._blend.learn(self._text_end, emitted)
        self._places.extend(emitted)
        self._text_end = [*self._text_end, *emitted][-TAIL:]
        super().observe(verified)
