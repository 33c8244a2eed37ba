"""STAND: sample children from the target's stored next-token distributions after the same n-grams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftwood.config import SamplingParams
from draftwood.drafters.base import Drafter, DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_int, check_top_k
from draftwood.drafters.shapes import static_tree
from draftwood.growth import DRAWS, fill_drawn, make_draw
from draftwood.sampling import MIN_TEMPERATURE, Warper
from draftwood.sources import IdRows, NgramTables, ScoreRows
from draftwood.targets import TargetInfo, TopRows
from draftwood.tree import DraftTree, TreeShape

SOURCE = "ngram"
AUTO = "auto"  # draw at a fixed budget; with budget="auto" choose, so that sizes and pauses may follow measured times
HARVESTS = ("all", "emitted")  # every verified node, or only the nodes before emitted tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StandOptions:
    max_ngram: int = 4  # longest n-gram to look up
    top_k: int = 10  # tokens kept per distribution
    tree: str = "stand"  # measured for STAND; "heuristic": as in token recycling; or a file of `draftwood tune`
    draw: str = "auto"  # children: "gumbel" or "multinomial" draw, "chosen" does not; "auto": gumbel at a fixed budget
    harvest: str = "all"  # every verified node, rejected ones included; "emitted": as in the paper
    renormalise: bool = True  # scale stored probabilities of a token to a sum of 1; false: as in the paper
    harvest_prompt: bool = True  # whether to learn from the prompt too
    megabytes: int = 128  # memory for the tables

    def __post_init__(self) -> None:
        check_int(self, 1, "max_ngram", high=6)
        check_int(self, 1, "top_k", high=64)
        check_int(self, 1, "megabytes", high=1 << 20)
        check_choice(self, "draw", (AUTO, *DRAWS))
        check_choice(self, "harvest", HARVESTS)
        check_flag(self, "renormalise", "harvest_prompt")
        static_tree(self.tree)


class StandDrafter(Drafter):
    name = "stand"
    summary = "STAND: a static tree with children from stored n-gram distributions"
    guesses_from = "the target's distributions after the same n-grams"
    tree_shape = "static; children drawn at a fixed budget, else chosen"
    draws = True
    can_rest = True
    Options = StandOptions
    wants_prompt_logits = True
    memory: NgramTables
    _warper: Warper | None = None  # of whole rows, to store probabilities as they are

    def __init__(self, options: StandOptions, shared: TreeShape, memory: NgramTables) -> None:
        super().__init__(options, shared, memory)
        self.draws = options.draw != "chosen"
        self.wants_prompt_logits = options.harvest_prompt
        self.wants_top = options.top_k

    def draws_for(self, params: SamplingParams, *, is_timed: bool) -> bool:
        return super().draws_for(params, is_timed=is_timed) and not (self.options.draw == AUTO and is_timed)

    @classmethod
    def share(cls, options: StandOptions, target: TargetInfo) -> TreeShape:
        check_top_k(options.top_k, target.vocab_size)
        return static_tree(options.tree)

    @classmethod
    def new_memory(cls, options: StandOptions, target: TargetInfo, shared: Any) -> NgramTables:
        return NgramTables(target.vocab_size, options.max_ngram, options.top_k, megabytes=options.megabytes)

    def begin(self, request: DraftRequest) -> None:
        self._params = request.params
        self._prompt_ids = request.prompt_ids
        self._root = request.prompt_ids[-1]
        self._context = self.memory.context(request.prompt_ids)
        if not (self.options.renormalise or request.params.is_greedy):
            self._warper = Warper(_without_penalties(request.params), ())
        draws = self.draws_for(request.params, is_timed=request.is_timed)
        drawn = "gumbel" if self.options.draw == AUTO else self.options.draw
        self._draw = make_draw(drawn if draws else "chosen", request.rng)

    def read_prompt(self, rows: PromptRows) -> None:
        start, prompt_ids = rows.start, self._prompt_ids
        end = start + len(rows.logits)
        if self.memory.is_new_prompt(prompt_ids[:end], start):
            contexts = self.memory.contexts_along(prompt_ids[:start], prompt_ids[start:end])
            self.memory.learn(contexts, *self._warp(rows))

    def propose(self, budget: int) -> DraftTree:
        return fill_drawn(self.shared, budget, self._root, self._context, self.memory, self._draw, SOURCE)

    def observe(self, verified: VerifiedTree) -> None:
        self._learn(verified)
        self._advance(verified.emitted)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._advance(token_ids)

    def _advance(self, emitted: Sequence[int]) -> None:
        for token in emitted:
            self._context = self.memory.extend_context(self._context, token)
        self._root = emitted[-1]

    def _learn(self, verified: VerifiedTree) -> None:
        """Add the target's distributions to the tables, each under the n-grams of its path."""
        tree, memory = verified.tree, self.memory
        if self.options.harvest == "all":
            contexts = [self._context]
            for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
                contexts.append(memory.extend_context(contexts[parent], token))
            memory.learn(contexts, *self._warp(verified))
        else:
            path = list(verified.path[: len(verified.emitted)])
            contexts = [self._context]
            for node in path[1:]:
                contexts.append(memory.extend_context(contexts[-1], tree.tokens[node]))
            memory.learn(contexts, *self._warp(verified, path))

    def _warp(self, rows: PromptRows | VerifiedTree, nodes: Sequence[int] | None = None) -> tuple[IdRows, ScoreRows]:
        """Top tokens of every row, or of those of ``nodes``, and their warped probabilities: [n, K] each."""
        k = self.options.top_k
        top = rows.best(k) if isinstance(rows, PromptRows) else rows.best(k, nodes)
        if self._warper is None:
            return top.ids, warp_top(top, self._params)
        logits = rows.logits if nodes is None else rows.logits[list(nodes)]
        ids = torch.from_numpy(top.ids).to(logits.device, torch.int64)
        shares = self._warper.probs(logits).gather(-1, ids).nan_to_num()
        return top.ids, shares.cpu().numpy()


def _without_penalties(params: SamplingParams) -> SamplingParams:
    return replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=())


def warp_top(top: TopRows, params: SamplingParams) -> ScoreRows:
    """Probabilities of the top tokens [n, K] after temperature, top-k, top-p and min-p. At temperature 0: unwarped.

    This approximates the distribution that tokens are emitted from: tokens beyond the K are left out, penalties are not
    applied, and ties at the edge of a filter may be dropped. Verification is exact for any draft distribution.
    """
    if params.is_greedy:
        return top.probs()
    best = top.logits[:, :1]  # [n, 1]
    scores = np.where(np.isfinite(best), top.logits, -np.inf)  # rows without finite logits have no likely token
    scores = (scores - np.where(np.isfinite(best), best, 0.0)) / max(params.temperature, MIN_TEMPERATURE)
    probs = _normalise(np.exp(scores, dtype=np.float32))
    if 0 < params.top_k < probs.shape[1]:
        probs[:, params.top_k :] = 0.0
    if params.top_p < 1.0:
        probs = _normalise(probs)
        before = np.cumsum(probs, axis=1) - probs  # [n, K] total of all better tokens
        probs[:, 1:][before[:, 1:] >= params.top_p] = 0.0
    if params.min_p > 0.0:
        probs[probs < params.min_p * probs[:, :1]] = 0.0
    return _normalise(probs)


def _normalise(probs: ScoreRows) -> ScoreRows:
    rows: ScoreRows = probs / np.maximum(probs.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows
