"""Drafters that run a model of their own: a draft head on the target's hidden states, or a small model.

All of them share one loop. A *draft model* (sources/neural) predicts what follows the nodes that it is run over. A
*growth* (growth/neural) selects these nodes and picks the final tree from all guesses. The trees of all running
requests grow together: each draft pass serves the next nodes of every tree.

    begin -> read_prompt -> [propose_batch: _start, then _next_segment / _grow per pass, then _finish -> observe] -> end

On a GPU the draft of a single request is launched before the host knows the text that it continues (``draft_ahead``).

The cache of a draft model lags behind the text. The first pass of a cycle commits the tokens that were emitted since
the last one, the new root last, and the tree grows below them. For a small model, drafted nodes that are accepted stay
in its cache. A head computes them again from the target's own features.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood.drafters.base import Drafter, DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.neural_options import MAX_NODES, NeuralOptions, sharpen_probs
from draftwood.drafters.stand import warp_top
from draftwood.errors import CapabilityError
from draftwood.growth import make_draw
from draftwood.growth.neural import (
    BEAM_DEPTH,
    CHAIN_DEPTH,
    Frontier,
    GrowingTree,
    GrowthOptions,
    LeveledDraft,
    LevelRecord,
    Search,
    make_growth,
)
from draftwood.sources.neural import DraftModel, DraftSegment, SearchAhead, gather_rows
from draftwood.targets import DeviceAnswer, Found, SearchLimits, SearchPlan, Segment, TargetInfo, TopRows, chain_parents
from draftwood.tree import DraftTree

CHUNK = 512  # text tokens per draft pass
MAX_SHARED_BYTES = 1 << 20  # of the hidden states of a pass that are kept for the few that a request needs
LEVELS = {"beam": BEAM_DEPTH, "chain": CHAIN_DEPTH}  # of growths that run a number of levels, at most by default


class SharedDraftModel(NamedTuple):
    """Shared by all requests of one LLM."""

    model: DraftModel
    growth: GrowthOptions
    tag: str  # source name of the drafted nodes
    max_positions: int  # capacity limit of a sequence, tree nodes included
    levels: LevelRecord | None = None  # chooses how many are run, with budget="auto"; None: always the same
    keeps_taps: bool = False  # as in TargetInfo


class Ahead(NamedTuple):
    """A draft that was launched before its text was known."""

    search: SearchAhead
    options: GrowthOptions
    draft: LeveledDraft | None
    num_prepared: int  # of the draft model, before it was launched


class NeuralDrafter(Drafter):
    """Base class; subclasses load the draft model in ``attach``."""

    Options: ClassVar[type[Any]] = NeuralOptions
    drafts_in_batch = True
    runs_model = True
    chooses_levels = True
    options: NeuralOptions
    shared: SharedDraftModel
    _growth: GrowingTree  # of the last tree

    def __init__(self, options: NeuralOptions, shared: SharedDraftModel, memory: None = None) -> None:
        super().__init__(options, shared, memory)
        self.draws = options.draw
        self.wants_taps = shared.model.taps
        self.drafts_ahead = shared.model.searches_ahead
        self._model = shared.model
        self._sequence: int | None = None  # in the draft model's cache; None: no room, so nothing is drafted
        self._draft: LeveledDraft | None = None  # that its last tree is from, if levels are chosen

    @classmethod
    def share(cls, options: NeuralOptions, target: TargetInfo) -> SharedDraftModel:
        raise CapabilityError(
            f"The drafter {cls.name!r} needs the target model",
            got=f"only the description of {target.name}",
            next_step="Use it with an LLM, not with a recording of one.",
        )

    @classmethod
    def make_shared(cls, model: DraftModel, options: NeuralOptions, target: TargetInfo) -> SharedDraftModel:
        """Combine a draft model with the growth options, limited to what the model supports."""
        # No text outgrows the target's context, whatever ``max_tokens`` is, so no more is reserved.
        max_positions = min(model.max_positions, target.context_length + MAX_NODES)
        growth = options.growth_options()
        if model.max_depth is not None:
            shape = None if growth.shape is None else growth.shape.limit_depth(model.max_depth)
            growth = replace(growth, depth=min(growth.depth or model.max_depth, model.max_depth), shape=shape)
        levels = None
        if cls.chooses_levels and options.growth in LEVELS and not options.depth:
            most = LEVELS[options.growth]
            levels = LevelRecord(most if model.max_depth is None else min(most, model.max_depth))
        return SharedDraftModel(model, growth, cls.name, max_positions, levels, target.keeps_taps)

    def begin(self, request: DraftRequest) -> None:
        self._ahead: Ahead | None = None
        self._observed = 0.0  # when the last cycle ended
        self._params = request.params
        self._prompt_ids = request.prompt_ids
        self._draws = self.draws_for(request.params, is_timed=request.is_timed)
        # Draws must not depend on the clock.
        self._levels = None if self._draws or not request.is_timed else self.shared.levels
        self._growth_options = self.shared.growth
        self._draw = make_draw("gumbel" if self._draws else "chosen", request.rng)
        # Text that the draft model has not read yet, the root last. Heads also need the taps before each token.
        self._unread: list[int] = [] if self.wants_taps else list(request.prompt_ids)
        self._features: list[tuple[torch.Tensor, Sequence[int] | None]] = []  # taps, and their rows; None: all
        self._is_borrowing = False  # whether some of them lie in memory that the target's next pass may overwrite
        self._length = 0  # tokens that the draft model has read
        self._root = request.prompt_ids[-1]
        self._room = min(len(request.prompt_ids) + request.params.max_tokens + MAX_NODES, self.shared.max_positions)
        self._sequence = self._model.open(self._room)

    def read_prompt(self, rows: PromptRows) -> None:
        if rows.taps is not None and self._sequence is not None:
            end = rows.start + len(rows.taps) + 1
            self._unread += self._prompt_ids[rows.start + 1 : end]
            self._features.append((rows.taps.clone(), None))  # the target reuses this memory
            if not self._reads_late:
                self._read_text(1)  # the last token may be the root, which the first pass of a cycle reads

    @property
    def _reads_late(self) -> bool:
        """Whether it reads a prompt only when it drafts, which it may never do."""
        return self.allows_gaps and self._model.searches

    def propose(self, budget: int) -> DraftTree:
        return self.propose_batch([self], [budget])[0]

    @classmethod
    def propose_batch(cls, drafters: Sequence[NeuralDrafter], budgets: Sequence[int]) -> list[DraftTree]:
        known = drafters[0]._propose_ahead(budgets[0]) if len(drafters) == 1 else None
        if known is not None:
            return [known]
        model = drafters[0]._model
        draft, num_prepared = _begin_draft(drafters), model.num_prepared
        for drafter, budget in zip(drafters, budgets, strict=True):
            drafter._ahead = None
            drafter._start(budget)
        growing = [drafter for drafter in drafters if drafter._frontier is not None]
        grown = growing
        searches = [None if drafter._sharpens else drafter._growth.search for drafter in growing]
        plan = _common_plan(searches, min([drafter._max_run for drafter in growing], default=0))
        while growing:
            segments = [drafter._next_segment() for drafter in growing]
            results = None if plan is None else model.grow(segments, plan)
            if results is not None:
                for drafter, (segment, *_), found in zip(growing, segments, results, strict=True):
                    drafter._take_search(len(segment.token_ids), found)
                break
            plan = None
            top = model.forward(segments, max(drafter._growth.width for drafter in growing))
            first = 0
            for drafter, (segment, *_) in zip(growing, segments, strict=True):
                drafter._grow(len(segment.token_ids), top.at(slice(first, first + segment.num_logits)))
                first += segment.num_logits
            growing = [drafter for drafter in growing if drafter._frontier is not None]
        trees = [drafter._finish() for drafter in drafters]
        was_ready = model.num_prepared == num_prepared
        for drafter in drafters:
            drafter._copy_features()
            drafter.was_ready = was_ready
        if draft is not None and grown:
            draft.end(counts=was_ready)
            for drafter in grown:
                drafter._draft = draft
        return trees

    def draft_ahead(self, answer: DeviceAnswer, budget: int) -> None:
        if self._sequence is None or self._unread or self._draws or self._sharpens:
            return
        draft, num_prepared = _begin_draft([self]), self._model.num_prepared
        found = self._search_ahead(min(budget, MAX_NODES))
        plan = _common_plan([found], min(MAX_NODES, self._room - self._length - self._model.root_chunk))
        search = None if plan is None else self._model.start_ahead(answer, self._sequence, plan)
        if search is not None:
            self._ahead = Ahead(search, self._growth_options, draft, num_prepared)
        elif draft is not None:
            self.drafts_ahead = False  # it would fail again, and levels must be chosen only once per draft

    def _search_ahead(self, size: int) -> Search | None:
        """The search by which a next tree of ``size`` nodes may grow; None if none does."""
        return self._new_growth(size).search

    def _propose_ahead(self, budget: int) -> DraftTree | None:
        """The tree of a draft that was launched ahead; None if there is none for the text that there is now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.draft is not None:
            ahead.draft.start(self._observed)
        self._growth_options = ahead.options
        self._growth = self._new_growth(min(budget, MAX_NODES))  # before the wait
        found = ahead.search(self._unread)
        if found is None:
            return None
        self._length += len(self._unread)
        self._unread, self._features, self._is_borrowing = [], [], False
        if budget > 1:
            self._growth.take(found)
        self.was_ready = self._model.num_prepared == ahead.num_prepared
        tree = self._finish()
        if ahead.draft is not None and budget > 1:
            ahead.draft.end(counts=self.was_ready)
            self._draft = ahead.draft
        return tree

    def observe(self, verified: VerifiedTree) -> None:
        self._observed = time.perf_counter()
        emitted = verified.emitted
        self._root = emitted[-1]
        if self._draft is not None:
            self._draft.note(len(emitted) - 1)
            self._draft = None
        if self._sequence is None:
            return
        expanded = self._expanded_along(emitted) if self._model.keeps_drafts else []
        self._keep([number - 1 for number in expanded])  # expansion 0 is the root, which is text
        if verified.taps is None:
            self._unread += emitted[len(expanded) :]
        else:
            self._unread += emitted
            self._features.append((verified.taps, verified.path[: len(emitted)]))
            self._is_borrowing = True

    def skip(self, token_ids: Sequence[int]) -> None:
        assert not self.wants_taps  # a head does not rest, it leaves
        self._root = token_ids[-1]
        if self._sequence is not None:
            self._unread += token_ids

    def end(self) -> None:
        self._ahead = None
        if self._sequence is not None:
            self._model.close(self._sequence)
            self._sequence = None

    # -- growing a tree ----------------------------------------------------------------------------------------------

    def _start(self, budget: int) -> None:
        # With a prompt of one token, a head has no features to read yet.
        can_draft = self._sequence is not None and self._unread
        size = min(budget, MAX_NODES) if can_draft else 1
        self._growth = self._new_growth(size)
        self._reads_root = True  # the next pass reads the root, later ones the frontier
        self._num_run = 0  # nodes below the root that the draft model has run
        self._max_run = min(MAX_NODES, self._room - self._length - len(self._unread))
        self._frontier = self._next_frontier()
        is_run = self._frontier is not None or not self.allows_gaps  # what allows gaps forgets what it need not read
        if can_draft and is_run and self._max_run >= 0 and len(self._unread) > self._model.root_chunk:
            self._read_text(1)

    def _new_growth(self, size: int) -> GrowingTree:
        """The growth of one tree of at most ``size`` nodes."""
        options, tag = self._growth_options, self.shared.tag
        return make_growth(self.options.growth, self._root, size, options, self._draw, tag)

    def _next_frontier(self) -> Frontier | None:
        """The nodes of the next draft pass; None if the tree is complete or the cache has no room for them."""
        frontier = self._growth.frontier()
        return frontier if frontier is not None and self._num_run + len(frontier.tokens) <= self._max_run else None

    def _next_segment(self) -> DraftSegment:
        """First the unread text up to the root, then the frontier."""
        frontier = self._frontier
        assert frontier is not None
        assert self._sequence is not None
        if self._reads_root:
            tokens, features, rows = self._take_text()
            return DraftSegment(Segment(self._sequence, tokens, chain_parents(len(tokens)), 1), features, rows)
        above = [parent - 1 for parent in frontier.parents]  # by expansion; expansion 0, the root, is text
        return DraftSegment(Segment(self._sequence, frontier.tokens, above, len(above), self._num_run))

    def _grow(self, size: int, rows: TopRows) -> None:
        """Add the draft model's predictions for the last segment, which had ``size`` nodes."""
        if self._reads_root:
            self._keep(range(size))
            self._reads_root = False
        else:
            self._num_run += size
        rows = rows.first(min(self._growth.width, rows.ids.shape[1]))
        self._growth.grow(rows.ids, self._estimate(rows))
        self._frontier = self._next_frontier()

    def _take_search(self, size: int, found: Found) -> None:
        """The draft model has read and kept the last segment, ``size`` tokens of text, and run the tree below it."""
        self._length += size
        self._growth.take(found)

    def _estimate(self, rows: TopRows) -> npt.NDArray[np.float32]:
        """Return the probabilities [n, k] that tokens are drawn with, or that the target accepts them."""
        if self._draws:
            return warp_top(rows, self._params)
        return sharpen_probs(rows.probs(), self.options.sharpen) if self._sharpens else rows.probs()

    @property
    def _sharpens(self) -> bool:
        return self.options.sharpen != 1.0 and self._params.is_greedy

    def _finish(self) -> DraftTree:
        self._tree = self._growth.tree()
        self._expansion_of = self._growth.expansion_of if self._model.keeps_drafts else ()
        return self._tree

    def _expanded_along(self, emitted: Sequence[int]) -> list[int]:
        """Expansion numbers of the accepted path, up to its first node that was not expanded."""
        numbers = [self._expansion_of[node] for node in self._tree.follow(emitted[:-1])]  # the last one is the bonus
        return list(takewhile(lambda number: number >= 0, numbers))

    # -- reading text -------------------------------------------------------------------------------------------------

    def _take_text(self, size: int | None = None) -> tuple[list[int], torch.Tensor | None, Sequence[int] | None]:
        """Remove the first ``size`` unread tokens (default: all); return them with the features before each: taps, and
        the rows of these."""
        tokens = self._unread[:size]
        self._unread = self._unread[len(tokens) :]
        if not self.wants_taps:
            return tokens, None, None
        if len(self._features) > 1:
            self._features = [(torch.cat([gather_rows(*part) for part in self._features]), None)]
        ((features, rows),) = self._features
        rows = range(len(features)) if rows is None else rows
        self._features = [(features, rows[len(tokens) :])] if self._unread else []
        return tokens, features, rows[: len(tokens)]

    def _copy_features(self) -> None:
        """Before the next pass of the target: what the draft model has not read by now must outlast it. Those of a
        large pass are copied in any case, since all of its memory would be kept."""
        if self._is_borrowing:
            self._is_borrowing = False
            if self._features:
                taps, rows = self._features[-1]  # of the last pass
                if not self.shared.keeps_taps or taps.untyped_storage().nbytes() > MAX_SHARED_BYTES:
                    self._features[-1] = gather_rows(taps, rows).clone(), None

    def _read_text(self, max_left: int) -> None:
        """Run the draft model over unread text until at most ``max_left`` tokens are left."""
        assert self._sequence is not None
        while len(self._unread) > max_left:
            tokens, features, rows = self._take_text(min(CHUNK, len(self._unread) - max_left))
            segment = Segment(self._sequence, tokens, chain_parents(len(tokens)), 0)
            self._model.forward([DraftSegment(segment, features, rows)], 1)
            self._keep(range(len(tokens)))

    def _keep(self, nodes: Sequence[int]) -> None:
        """Commit pending nodes that are now text; drop the other pending nodes."""
        assert self._sequence is not None
        self._model.keep(self._sequence, nodes)
        self._length += len(nodes)


def _begin_draft(drafters: Sequence[NeuralDrafter]) -> LeveledDraft | None:
    """Limits the trees that the drafters are about to grow to the levels that pay; None if time does not matter."""
    record = drafters[0]._levels
    if record is None or any(drafter._levels is None for drafter in drafters):
        return None
    draft = LeveledDraft(record, len(drafters))
    options = replace(drafters[0].shared.growth, depth=draft.levels)
    for drafter in drafters:
        drafter._growth_options = options
    return draft


def _common_plan(searches: Sequence[Search | None], most_run: int) -> SearchPlan | None:
    """The search that serves all trees, each of at most ``most_run`` nodes that are run; None if they do not grow
    alike."""
    kinds = {None if search is None else search.kind for search in searches}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return None
    limits = [
        SearchLimits(search.spec.budget - 1, search.depth, () if search.shape is None else search.shape.picks)
        for search in searches
        if search is not None
    ]
    if most_run < kind.width:
        return None
    passes = min(max([search.passes for search in searches if search is not None]), most_run // kind.width)
    return SearchPlan(kind.width, kind.top_k, passes, limits, kind.anywhere, kind.threshold, kind.is_fixed)
