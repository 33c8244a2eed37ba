"""Logits -> the distribution the user asked for, with the order and the semantics of transformers.

Penalties, temperature, top-k, top-p, min-p. Everything runs in float32 on the device of the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from draftwood.config import SamplingParams

# Below this float32 logits overflow when divided, and any two different ones are already infinitely far apart.
MIN_TEMPERATURE = 1e-30
NUCLEUS_GUESS = 1024


class Warper:
    """Warps the logits of one request.

    ``output_ids`` are always the generated tokens that were not handed to ``commit``: either the whole output and the
    path inside the tree, or, cheaper, the path alone after every emitted token has been committed.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._temperature = max(params.temperature, MIN_TEMPERATURE)
        # How often each token was generated; tokens of the prompt alone are there with 0.
        self._counts: dict[int, int] = dict.fromkeys(prompt_ids if params.repetition_penalty != 1.0 else (), 0)
        self._committed: tuple[torch.Tensor, torch.Tensor] | None = None  # _counts as tensors

    def commit(self, token_ids: Iterable[int]) -> None:
        """Counts tokens that are in the output for good."""
        if self._params.has_penalties:
            for token in token_ids:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._committed = None

    def processed(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> torch.Tensor:
        """Logits [V] with the penalties applied, float32. Without penalties they may be ``logits`` itself."""
        logits = logits.float()
        if not self._params.has_penalties:
            return logits
        if self._committed is None:
            self._committed = _as_tensors(self._counts, logits)
        penalised = logits.clone()
        self._penalise(penalised, logits, *self._committed)
        # Recomputed from the raw logits, so a token counted above is not penalised twice.
        pending = {token: self._counts.get(token, 0) + count for token, count in Counter(output_ids).items()}
        self._penalise(penalised, logits, *_as_tensors(pending, logits))
        return penalised

    def probs(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> torch.Tensor:
        """The distribution [V] of the next token, float32. At temperature 0 all of it is on the greedy choice."""
        scores = self.processed(logits, output_ids)
        if self._params.is_greedy:
            return torch.zeros_like(scores).index_fill_(0, torch.argmax(scores, keepdim=True), 1.0)
        scores = scores / self._temperature
        kept = self._kept(scores)
        if kept is None:
            return torch.softmax(scores, dim=-1)
        return torch.zeros_like(scores).index_copy_(0, kept, torch.softmax(scores[kept], dim=-1))

    def choice(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> int:
        """The greedy choice; argmax takes the lowest id among equals."""
        return int(torch.argmax(self.processed(logits, output_ids)))

    def _penalise(self, out: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Writes the penalised logits of the tokens ``ids`` [D], generated ``counts`` [D] times, into ``out`` [V]."""
        params = self._params
        scores = logits[ids]
        scores = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        out[ids] = scores

    def _kept(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The ids [M] that the filters leave, None if no filter is on. Each filter sees what the one before it left."""
        params = self._params
        kept = None
        if 0 < params.top_k < len(scores):
            kept = _at_least_kth(scores, params.top_k)
        if params.top_p < 1.0:
            kept = _nucleus(scores, params.top_p) if kept is None else kept[_nucleus(scores[kept], params.top_p)]
        if params.min_p > 0.0:
            kept = _near_best(scores, params.min_p) if kept is None else kept[_near_best(scores[kept], params.min_p)]
        return kept


def _as_tensors(counts: Mapping[int, int], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [D] and counts [D]. A prompt may hold ids the output layer does not have: they cannot be generated."""
    known = {token: count for token, count in counts.items() if token < len(logits)}
    ids = torch.tensor(list(known), dtype=torch.int64)
    return ids.to(logits.device), torch.tensor(list(known.values()), dtype=logits.dtype).to(logits.device)


def _at_least_kth(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of all scores that are not below the k-th best: ties can make them more than k."""
    return (scores >= torch.topk(scores, k).values[-1]).nonzero().squeeze(-1)


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the fewest best scores whose probabilities reach ``top_p``; the lower id goes first among equals.

    A token stays if those before it do not reach ``top_p`` yet, so the best one always does. The nucleus nearly always
    lies within a few best tokens, which saves sorting the vocabulary.
    """
    probs = torch.softmax(scores, dim=-1)
    size = NUCLEUS_GUESS
    while True:
        best = _at_least_kth(probs, min(size, len(probs)))
        ordered, order = torch.sort(probs[best], descending=True, stable=True)
        reached = torch.cumsum(ordered, dim=-1)
        inside = 1 + int((reached < top_p).sum())
        if inside <= len(best) or size >= len(probs):
            return best[order[:inside]]
        size *= 8


def _near_best(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Indices of the tokens at least ``min_p`` times as probable as the best one."""
    probs = torch.softmax(scores, dim=-1)
    return (probs >= min_p * probs.max()).nonzero().squeeze(-1)
