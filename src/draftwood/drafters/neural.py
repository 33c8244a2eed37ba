"""Drafters that run a model of their own: a head on the target's hidden states, or a small model beside it.

All of them are one machine. A *draft model* (sources/neural.py) says what follows the nodes it is run over, a *growth*
(growth/neural.py) says which nodes those are and which of all guesses make the tree. The trees of all running requests
grow side by side: every draft pass takes what each of them wants to know next.

What a draft model has committed lags behind the text. The first pass of a cycle brings it up to date: tokens that were
emitted meanwhile and are not in its cache, the new root last. These are committed, and the tree grows below them. Nodes
that were drafted and then accepted stay in the cache where they are as good as text (a small model); a head computes
them again, from the target's true features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from draftwood.drafters.base import Drafter, DraftRequest, PromptRows, Verified
from draftwood.drafters.checks import check_choice, check_flag, check_share, check_whole
from draftwood.drafters.shapes import static_tree
from draftwood.drafters.stand import warped
from draftwood.errors import CapabilityError
from draftwood.growth import make_draw
from draftwood.growth.neural import GROWTHS, Frontier, GrowthOptions, make_growth
from draftwood.sources.neural import DraftModel, DraftSegment
from draftwood.targets import MAX_TOP_K, Segment, TargetInfo, TopRows, chain_parents
from draftwood.tree import DraftTree

CHUNK = 512  # tokens of a text that one pass reads
MOST_NODES = 128  # of a tree, and of those that a draft model is run over for it


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuralOptions:
    growth: str = "beam"  # "optimal", "salf": it stops in time; "chain"; "static": the shape of `tree`
    depth: int = 0  # levels below the root; 0: 7 for chain and beam, no limit for the others
    top_k: int = 10  # children known of a node; in `beam` the nodes of a level too
    batch: int = 10  # `optimal`, `salf`: nodes that one draft pass takes
    threshold: float = 0.6  # `salf`: the chance that another draft pass is of any use, below which it stops
    tree: str = "heuristic"  # `static`: the shape
    draw: bool = False  # where tokens are sampled: children are drawn, not chosen
    support: int = 64  # tokens that children are drawn from, the best ones

    def __post_init__(self) -> None:
        check_choice(self, "growth", GROWTHS)
        check_whole(self, 0, "depth", high=MOST_NODES)
        check_whole(self, 1, "top_k", "batch", "support", high=MAX_TOP_K)
        check_share(self, "threshold")
        check_flag(self, "draw")
        static_tree(self.tree)

    def for_growth(self) -> GrowthOptions:
        shape = static_tree(self.tree) if self.growth == "static" else None
        return GrowthOptions(
            depth=self.depth or None,
            top_k=self.top_k,
            batch=self.batch,
            threshold=self.threshold,
            shape=shape.down_to(self.depth) if shape is not None and self.depth else shape,
            support=self.support,
        )


class Shared(NamedTuple):
    """What the requests of one LLM have in common."""

    model: DraftModel
    growth: GrowthOptions
    tag: str  # the source that nodes are said to come from
    longest: int  # positions that a text can have, tree nodes included


class NeuralDrafter(Drafter):
    """One request. Subclasses say where the draft model comes from."""

    Options: ClassVar[type[Any]] = NeuralOptions
    drafts_together = True
    options: NeuralOptions
    shared: Shared

    def __init__(self, options: NeuralOptions, shared: Shared, memory: None = None) -> None:
        super().__init__(options, shared, memory)
        self.wants_taps = shared.model.taps
        self._model = shared.model
        self._sequence: int | None = None  # None: there was no room, and nothing is drafted

    @classmethod
    def share(cls, options: NeuralOptions, target: TargetInfo) -> Shared:
        raise CapabilityError(
            f"The drafter {cls.name!r} needs the model itself",
            got=f"facts about {target.name}",
            next_step="Use it with an LLM, not with a recording of one.",
        )

    @classmethod
    def sharing(cls, model: DraftModel, options: NeuralOptions, target: TargetInfo) -> Shared:
        """No text outgrows the target's context, whatever ``max_tokens`` says: no more is kept free for it."""
        longest = min(model.longest, target.context_length + MOST_NODES)
        growth = options.for_growth()
        if model.deepest is not None:
            shape = None if growth.shape is None else growth.shape.down_to(model.deepest)
            growth = replace(growth, depth=min(growth.depth or model.deepest, model.deepest), shape=shape)
        return Shared(model, growth, cls.name, longest)

    def begin(self, request: DraftRequest) -> None:
        self._params = request.params
        self._prompt_ids = request.prompt_ids
        self._draws = self.options.draw and not request.params.is_greedy
        self._draw = make_draw("gumbel" if self._draws else "chosen", request.rng)
        # Text that the draft model has not read, the root last; for a head what stands before each of its tokens.
        self._unread: list[int] = [] if self.wants_taps else list(request.prompt_ids)
        self._features: list[torch.Tensor] = []
        self._length = 0  # tokens that it has read
        self._root = request.prompt_ids[-1]
        self._room = min(len(request.prompt_ids) + request.params.max_tokens + MOST_NODES, self.shared.longest)
        self._sequence = self._model.open(self._room)

    def read_prompt(self, rows: PromptRows) -> None:
        if rows.taps is not None and self._sequence is not None:
            end = rows.start + len(rows.taps) + 1
            self._add_text(self._prompt_ids[rows.start + 1 : end], rows.taps.clone())  # it is the target's own memory
            self._read_text(1)  # the last may be the root, which is wanted later

    def propose(self, budget: int) -> DraftTree:
        return self.propose_together([self], [budget])[0]

    @classmethod
    def propose_together(cls, drafters: Sequence[NeuralDrafter], budgets: Sequence[int]) -> list[DraftTree]:
        for drafter, budget in zip(drafters, budgets, strict=True):
            drafter._start(budget)
        while growing := [drafter for drafter in drafters if drafter._frontier is not None]:
            segments = [drafter._next_segment() for drafter in growing]
            top = growing[0]._model.forward(segments, max(drafter._growth.width for drafter in growing))
            first = 0
            for drafter, (segment, _) in zip(growing, segments, strict=True):
                drafter._grow(len(segment.token_ids), top.at(slice(first, first + segment.num_logits)))
                first += segment.num_logits
        return [drafter._finish() for drafter in drafters]

    def observe(self, verified: Verified) -> None:
        emitted = verified.emitted
        self._root = emitted[-1]
        if self._sequence is None:
            return
        expanded = self._expanded_along(emitted) if self._model.keeps_drafts else []
        self._keep([number - 1 for number in expanded])  # the root, expansion 0, is text
        if verified.taps is None:
            self._unread += emitted[len(expanded) :]
        else:
            rows = torch.tensor(list(verified.path[: len(emitted)]), device=verified.taps.device)
            self._add_text(emitted, verified.taps[rows])

    def end(self) -> None:
        if self._sequence is not None:
            self._model.close(self._sequence)
            self._sequence = None

    # -- growing a tree ----------------------------------------------------------------------------------------------

    def _start(self, budget: int) -> None:
        # A text of one token has nothing before it that a head could read.
        can = self._sequence is not None and self._unread
        size = min(budget, MOST_NODES) if can else 1
        options, tag = self.shared.growth, self.shared.tag
        self._growth = make_growth(self.options.growth, self._root, size, options, self._draw, tag)
        self._reads_root = True  # in its next pass
        self._num_run = 0  # nodes below the root that the model was run over
        self._most_run = min(MOST_NODES, self._room - self._length - len(self._unread))
        self._frontier = self._next_frontier()
        if self._frontier is not None:
            self._read_text(CHUNK)

    def _next_frontier(self) -> Frontier | None:
        """What is to be run next; None where the tree is done, or all that may be run was."""
        frontier = self._growth.frontier()
        return frontier if frontier is not None and self._num_run + len(frontier.tokens) <= self._most_run else None

    def _next_segment(self) -> DraftSegment:
        """The root, with the text before it that the model has not read; later the frontier."""
        frontier = self._frontier
        assert frontier is not None
        assert self._sequence is not None
        if self._reads_root:
            tokens, features = self._take_text()
            return DraftSegment(Segment(self._sequence, tokens, chain_parents(len(tokens)), 1), features)
        above = [parent - 1 for parent in frontier.parents]  # by number of expansion; the root, 0, is text
        return DraftSegment(Segment(self._sequence, frontier.tokens, above, len(above), self._num_run))

    def _grow(self, size: int, rows: TopRows) -> None:
        """Takes what the model says after the last segment, which had ``size`` nodes."""
        if self._reads_root:
            self._keep(range(size))
            self._reads_root = False
        else:
            self._num_run += size
        rows = rows.first(min(self._growth.width, rows.ids.shape[1]))
        self._growth.grow(rows.ids, warped(rows, self._params) if self._draws else rows.probs())
        self._frontier = self._next_frontier()

    def _finish(self) -> DraftTree:
        self._tree = self._growth.tree()
        return self._tree

    def _expanded_along(self, emitted: Sequence[int]) -> list[int]:
        """The numbers of expansion of the accepted nodes, as far as these were expanded one below the other."""
        tree, expansion_of = self._tree, self._growth.expansion_of
        numbers: list[int] = []
        node = 0
        for token in emitted[:-1]:  # the last one is the target's own
            node = next((child for child in tree.children_of(node) if tree.tokens[child] == token), -1)
            if node < 0 or expansion_of[node] < 0:
                break
            numbers.append(expansion_of[node])
        return numbers

    # -- the text ----------------------------------------------------------------------------------------------------

    def _add_text(self, tokens: Sequence[int], taps: torch.Tensor) -> None:
        self._unread += tokens
        self._features.append(taps)

    def _take_text(self, size: int | None = None) -> tuple[list[int], torch.Tensor | None]:
        """The first tokens that the model has not read, or all, with what stands before them."""
        tokens = self._unread[:size]
        self._unread = self._unread[len(tokens) :]
        if not self.wants_taps:
            return tokens, None
        features = torch.cat(self._features) if len(self._features) != 1 else self._features[0]
        self._features = [features[len(tokens) :]] if self._unread else []
        return tokens, features[: len(tokens)]

    def _read_text(self, most: int) -> None:
        """Lets the model read text until at most so many tokens are left."""
        assert self._sequence is not None
        while len(self._unread) > most:
            tokens, features = self._take_text(min(CHUNK, len(self._unread) - most))
            segment = Segment(self._sequence, tokens, chain_parents(len(tokens)), 0)
            self._model.forward([DraftSegment(segment, features)], 1)
            self._keep(range(len(tokens)))

    def _keep(self, nodes: Sequence[int]) -> None:
        """Commits nodes that are text now; the other pending ones are forgotten."""
        assert self._sequence is not None
        self._model.keep(self._sequence, nodes)
        self._length += len(nodes)
