"""Blend: one tree from every source, best guess first, with learned acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftwood.compiled import TAIL, Harvest, HintSource, Learned, Outcomes, observe_blends, propose_blends
from draftwood.drafters.base import DraftRequest, PromptRows, VerifiedBatch, VerifiedTree
from draftwood.drafters.blend_options import AUTO, HEAD, MODEL, BlendOptions
from draftwood.drafters.transition import TransitionDrafter
from draftwood.growth import (
    NO_PRIORS,
    Anchor,
    Blend,
    BlendLimits,
    DraftRecords,
    Outcome,
    Priors,
    load_priors,
    new_learned,
)
from draftwood.sources import (
    Datastore,
    DatastoreHints,
    DraftedHints,
    PlaceHints,
    PositionHints,
    SuccessorArrays,
    SuccessorHints,
    TransitionTable,
)
from draftwood.targets import DeviceAnswer, Target, TargetInfo
from draftwood.text import TextCodec
from draftwood.tree import DraftTree

if TYPE_CHECKING:
    from draftwood.drafters.blend_head import Expander
    from draftwood.drafters.neural import SharedDraftModel

MIN_VALUE = 1e-4  # chance of a path below which a node is never worth its place
MAX_POSITION_COST = 0.2  # of a further position, over a pass of one: guesses of a head are seldom worth more
FUSED_BACKEND = "fused-cpu"
NO_ROWS = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)


class LearnedState(NamedTuple):
    """What requests of one temperature have taught, on which acceptance depends."""

    learned: Learned
    drafts: DraftRecords  # of a head or small model


class _Shared(NamedTuple):
    sources: str
    successors: SuccessorArrays | None
    states: dict[float, LearnedState]  # by temperature
    priors: Priors
    store: Datastore | None = None
    head: SharedDraftModel | None = None  # or small model


# Sources by name, made from the table that the drafter maintains and from what requests share.
SOURCES: Mapping[str, Callable[[TransitionTable, _Shared], HintSource]] = {
    PlaceHints.name: lambda *_: PlaceHints(),
    SuccessorHints.name: lambda table, _: SuccessorHints(table),
    PositionHints.name: lambda *_: PositionHints(),
    DatastoreHints.name: lambda _, shared: DatastoreHints(_known(shared.store)),
    MODEL: lambda *_: DraftedHints(MODEL),
    HEAD: lambda *_: DraftedHints(HEAD),
}


class BlendDrafter(TransitionDrafter):
    name = "blend"
    summary = "One tree from every source: the guess with the highest learned chance of acceptance comes next"
    guesses_from = "the text so far, logits of earlier passes, and optionally own texts, a draft head or a small model"
    tree_shape = "best-first over all sources"
    copies_text = True
    is_calibrated = True
    drafts_in_batch = True
    can_rest = True
    Options = BlendOptions
    options: BlendOptions
    shared: _Shared

    @classmethod
    def check(cls, options: BlendOptions) -> None:
        if options.drafted:
            runner, own = _runner(options)
            runner.check(own)

    @classmethod
    def share(cls, options: BlendOptions, target: TargetInfo) -> _Shared:  # type: ignore[override]
        if options.drafted:
            runner, own = _runner(options)
            runner.share(own, target)  # raises: it needs the target itself
        successors, beliefs = super().share(options, target), _first_beliefs(options, target)
        return _Shared(options.list_sources(), successors, {}, beliefs, _open_store(options, target))

    @classmethod
    def attach(cls, options: BlendOptions, target: Target, codec: TextCodec) -> _Shared:
        head = _attach_head(options, target, codec)
        if head is None:
            return cls.share(options, target.info)
        successors, beliefs = super().share(options, target.info), _first_beliefs(options, target.info)
        sources, store = options.list_sources(options.drafted or HEAD), _open_store(options, target.info)
        return _Shared(sources, successors, {}, beliefs, store, head)

    @classmethod
    def new_memory(cls, options: BlendOptions, target: TargetInfo, shared: _Shared) -> TransitionTable:
        return super().new_memory(options, target, shared.successors)

    def __init__(self, options: BlendOptions, shared: _Shared, memory: TransitionTable | None = None) -> None:
        super().__init__(options, shared, memory)
        self._head: Expander | None = None
        if shared.head is not None:
            runner, own = _runner(options)
            self._head = runner(own, shared.head)
            self.wants_taps = self._head.wants_taps
            self.allows_gaps = self._head.allows_gaps
            self.drafts_ahead = self._head.drafts_ahead
            self.runs_model = True

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        sources = [SOURCES[name](self.memory, self.shared) for name in self.shared.sources.split("+")]
        temperature = round(request.params.temperature, 1)
        state = self.shared.states.get(temperature)
        if state is None:
            state = self.shared.states[temperature] = LearnedState(
                new_learned(sources, self.shared.priors, learns=self.options.learn), DraftRecords()
            )
        self.sources = sources
        self._blend = Blend(sources, state.learned)
        compiled = self._blend.compiled
        is_native = compiled is not None and compiled.follows and self.memory.compiled is not None
        self._learns_in_c = is_native and self.options.harvest == "all"
        self.learns_in_batch = self._learns_in_c and self._head is None
        is_default = self._head is not None and not self.options.drafted  # then it must pay
        searches = self._head is not None and self._head.searches
        self._passes = state.drafts.passes if is_default else None
        self._worth = state.drafts.worth if searches and request.is_timed else None
        self._since = 0.0  # when the last cycle ended, while it drafts alone
        if (is_default and (request.position_cost > MAX_POSITION_COST or state.drafts.passes.is_left_out())) or (
            self._worth is not None and not self._worth.begins_with_model()
        ):
            self._leave_head()
        self._own_end: list[int] = []  # the last tokens, where the blend does not keep them
        self._proposed = 0.0  # when the last tree was ready
        if self._head is not None:
            rows = next(source for source in sources if isinstance(source, DraftedHints))
            is_timed = request.is_timed or not self.options.drafted  # the default's head must pay at any budget
            self._head.follow(self._blend, rows, state.drafts, is_timed=is_timed)
            self._head.begin(request)
        self._read(request.known_text)

    def read_prompt(self, rows: PromptRows) -> None:
        super().read_prompt(rows)
        if self._head is not None:
            self._head.read_prompt(rows)

    def propose(self, budget: int) -> DraftTree:
        return self.propose_batch([self], [budget])[0]

    @classmethod
    def propose_batch(cls, drafters: Sequence[BlendDrafter], budgets: Sequence[int]) -> list[DraftTree]:
        for drafter in drafters:
            if drafter._worth is not None:
                drafter._since = (drafter._since or time.perf_counter()) if len(drafters) == 1 else 0.0
        own_heads = [drafter._head is not None for drafter in drafters]
        if not any(own_heads):
            return cls._propose_together(drafters, budgets, len(drafters))
        trees = dict[int, DraftTree]()
        for has_head in set(own_heads):
            part = [index for index, own in enumerate(own_heads) if own == has_head]
            some, sizes = [drafters[index] for index in part], [budgets[index] for index in part]
            trees.update(zip(part, cls._propose_together(some, sizes, len(drafters)), strict=True))
        now = time.perf_counter()
        for drafter in drafters:
            drafter._proposed = now
        return [trees[index] for index in range(len(drafters))]

    @staticmethod
    def _propose_together(
        drafters: Sequence[BlendDrafter], budgets: Sequence[int], num_requests: int
    ) -> list[DraftTree]:
        """For requests of a batch of ``num_requests`` that all have a head, or all none."""
        heads = [drafter._head for drafter in drafters if drafter._head is not None]
        compiled = [blend for drafter in drafters if (blend := drafter._blend.compiled) is not None]
        depth, least = drafters[0].options.depth, max(min([drafter.min_chance for drafter in drafters]), MIN_VALUE)
        if not heads and len(compiled) == len(drafters):
            return propose_blends(compiled, budgets, depth, least)
        limits = [BlendLimits(budget, depth, least) for budget in budgets]
        if not heads:
            return [drafter._blend.tree(drafter._text_end, own) for drafter, own in zip(drafters, limits, strict=True)]
        for drafter, head, own in zip(drafters, heads, limits, strict=True):
            head.aim(drafter._text_end, own, num_requests)
        trees = type(heads[0]).propose_batch(heads, budgets)
        for drafter, head in zip(drafters, heads, strict=True):
            drafter.was_ready = head.was_ready
        return trees

    def draft_ahead(self, answer: DeviceAnswer, budget: int) -> None:
        if self._head is not None:
            self._head.draft_ahead(answer, budget)

    def outcomes(self, emitted: Sequence[int]) -> list[list[Outcome]]:
        """What came of all guesses about each of the tokens that are about to be observed; for measurements."""
        return self._blend.outcomes(self._text_end, emitted)

    def observe(self, verified: VerifiedTree) -> None:
        if self._head is not None and self._proposed:
            self._head.note_cycle(time.perf_counter() - self._proposed, len(verified.tree), verified.emitted)
        if self._learns_in_c:
            outcomes = Outcomes([verified.tree], [verified.path], [verified.emitted])
            self.observe_batch([self], VerifiedBatch(outcomes, [0], verified.best(self.options.top_k)))
        else:
            self._observe_in_python(verified)
        if self._head is None:
            return
        is_slower = self._since > 0.0 and not self._head.pays
        if is_slower or (self._passes is not None and self._passes.is_too_slow):
            self._head.end()
            self._leave_head()
        else:
            self._head.observe(verified)

    def _time_cycle(self) -> None:
        """Notes what the cycle took, if no other request drafted in it."""
        if self._worth is None or not self._since:
            return
        now = time.perf_counter()
        if self.was_ready:
            self._worth.note_cycle(now - self._since, has_model=self._head is not None)
        self._since = now

    def _leave_head(self) -> None:
        """Goes on with the other sources."""
        self._head, self.wants_taps, self.runs_model, self.was_ready = None, (), False, True
        self.drafts_ahead = False
        self.learns_in_batch = self._learns_in_c
        for source in self.sources:
            if isinstance(source, DraftedHints):
                source.clear()

    def _observe_in_python(self, verified: VerifiedTree) -> None:
        self._blend.learn(self._text_end, verified.emitted)
        rows = self._harvest(verified)
        if rows is not None:
            seen = Harvest(verified.tree, verified.path, len(verified.emitted), *rows)
            for source in self.sources:
                source.learn(seen)
        self._read(verified.emitted)
        self._time_cycle()

    @classmethod
    def observe_batch(cls, drafters: Sequence[BlendDrafter], verified: VerifiedBatch) -> None:
        outcomes, first_rows, top = verified
        assert top is not None
        best = top.first(drafters[0].options.top_k)
        observe_blends(
            [blend for drafter in drafters if (blend := drafter._blend.compiled) is not None],
            [table for drafter in drafters if (table := drafter.memory.compiled) is not None],
            outcomes,
            first_rows,
            best.ids,
            best.probs(),
        )
        if len(drafters) == 1:
            drafters[0]._time_cycle()

    def skip(self, token_ids: Sequence[int]) -> None:
        nothing = Harvest(DraftTree.root_only(self.anchor.root), (0,), len(token_ids), *NO_ROWS)
        for source in self.sources:
            source.learn(nothing)  # predictions for positions move along
        super().skip(token_ids)
        if self._head is not None:
            self._head.skip(token_ids)
            self._head.num_text += len(token_ids)
            self._proposed = 0.0
        self._since = 0.0
        self._read(token_ids)

    def end(self) -> None:
        if self._head is not None:
            self._head.end()

    def _read(self, tokens: Sequence[int]) -> None:
        for source in self.sources:
            source.extend(tokens)
        self._move_end(tokens)

    @property
    def anchor(self) -> Anchor:
        end = self._text_end
        return Anchor(end[max(len(end) - 2, 0)], end[-1])

    def _advance(self, emitted: Sequence[int]) -> None:
        """``_read`` does it."""

    @property
    def _text_end(self) -> list[int]:
        """The last tokens of the text."""
        compiled = self._blend.compiled
        return self._own_end if compiled is None else compiled.text_end

    def _move_end(self, tokens: Sequence[int]) -> None:
        compiled = self._blend.compiled
        if compiled is None:
            self._own_end = [*self._own_end, *tokens[-TAIL:]][-TAIL:]
        else:
            compiled.move_end(tokens)


def _attach_head(options: BlendOptions, target: Target, codec: TextCodec) -> SharedDraftModel | None:
    """What was asked for, or the shipped head where its passes were measured to pay: on a CPU."""
    if options.drafted:
        runner, own = _runner(options)
        shared: SharedDraftModel = runner.attach(own, target, codec)
        return shared
    if options.sources != AUTO or target.info.backend != FUSED_BACKEND:
        return None
    from draftwood.drafters.blend_head import BlendHead

    return BlendHead.attach_shipped(target)


def _runner(options: BlendOptions) -> tuple[type[Expander], Any]:
    """What runs the head or small model, with its options."""
    from draftwood.drafters.blend_head import BlendHead, BlendModel

    if options.drafted == MODEL:
        return BlendModel, BlendModel.Options(model=options.model)
    return BlendHead, BlendHead.Options(head=options.head)


def _open_store(options: BlendOptions, target: TargetInfo) -> Datastore | None:
    if DatastoreHints.name not in options.list_sources().split("+"):
        return None
    return Datastore.open(options.datastore, vocab_size=target.vocab_size)


def _known(store: Datastore | None) -> Datastore:
    assert store is not None  # the options ask for a file
    return store


def _first_beliefs(options: BlendOptions, target: TargetInfo) -> Priors:
    return load_priors(target) if options.priors else NO_PRIORS
