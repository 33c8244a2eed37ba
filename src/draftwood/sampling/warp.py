"""Warp logits into the requested distribution, with the order and semantics of transformers.

Penalties and biases, temperature, top-k, top-p, min-p. Everything runs in float32 on the device of the logits.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from draftwood.config import SamplingParams

# Dividing float32 logits by less could overflow, and any two different logits are already infinitely far apart.
MIN_TEMPERATURE = 1e-20
NUCLEUS_GUESS = 1024
LARGEST_TOP_K = 2**31 - 1  # above any vocabulary, where it keeps all tokens; kernels read it as a float64


class Warper:
    """Warps the logits of one request.

    ``output_ids`` are always the generated tokens that were not passed to ``commit``: the whole output plus the path in
    the tree, or, cheaper, only the path after every emitted token has been committed.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._temperature = max(params.temperature, MIN_TEMPERATURE)
        # How often each token was generated; tokens that occur only in the prompt have 0.
        self._counts: dict[int, int] = dict.fromkeys(prompt_ids if params.repetition_penalty != 1.0 else (), 0)
        self._committed: tuple[torch.Tensor, torch.Tensor] | None = None  # _counts as tensors
        self._biases = dict(params.logit_bias)

    @property
    def rule(self) -> tuple[float, ...]:
        """Without penalties, everything that the distribution depends on besides the logits."""
        return self._temperature, min(self._params.top_k, LARGEST_TOP_K), self._params.top_p, self._params.min_p

    def commit(self, token_ids: Iterable[int]) -> None:
        """Count tokens that are final output."""
        if self._params.has_penalties:
            for token in token_ids:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._committed = None

    def penalise(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> torch.Tensor:
        """Apply the penalties to logits [V]; float32. Without penalties this may return ``logits`` itself."""
        logits = logits.float()
        if not self._params.has_penalties:
            return logits
        if self._committed is None:
            self._committed = _as_tensors(self._counts, logits)
        penalised = logits.clone()
        self._penalise_into(penalised, logits, *self._committed)
        # Recomputed from the raw logits, so a token counted above is not penalised twice.
        pending = {token: self._counts.get(token, 0) + count for token, count in Counter(output_ids).items()}
        self._penalise_into(penalised, logits, *_as_tensors(pending, logits))
        if self._biases:
            ids, biases = _as_tensors(self._biases, logits)
            penalised[ids] += biases
        return penalised

    def probs(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> torch.Tensor:
        """The distribution [V] of the next token, float32. At temperature 0 it is one-hot on the greedy choice.

        Without penalties, which depend on the path of a row, many rows [n, V] may be passed at once.
        """
        params, scores = self._params, self.penalise(logits, output_ids)
        if params.is_greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)
        if self._temperature != 1.0:
            scores = scores / self._temperature
        kept = None  # each filter sees the result of the one before
        if 0 < params.top_k < scores.shape[-1]:
            kept, scores = _top_k(scores, params.top_k)
        if params.top_p < 1.0:
            inside, scores = _top_p(scores, params.top_p)
            kept = inside if kept is None else kept.gather(-1, inside)
        probs = torch.softmax(scores, dim=-1)
        if params.min_p > 0.0:
            probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs if kept is None else torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, kept, probs)

    def choice(self, logits: torch.Tensor, output_ids: Sequence[int] = ()) -> int:
        """The greedy choice; ties go to the lowest id."""
        return int(torch.argmax(self.penalise(logits, output_ids)))

    def _penalise_into(self, out: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Write the penalised logits of tokens ``ids`` [D], generated ``counts`` [D] times, to ``out`` [V]."""
        params = self._params
        scores = logits[ids]
        scores = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        out[ids] = scores


def _as_tensors(counts: Mapping[int, float], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [D] and counts or biases [D], without ids that the output layer does not have."""
    known = {token: count for token, count in counts.items() if token < len(logits)}
    ids = torch.tensor(list(known), dtype=torch.int64)
    return ids.to(logits.device), torch.tensor(list(known.values()), dtype=logits.dtype).to(logits.device)


def _top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [.., S] of all scores not below the k-th best, in order, and the scores. Ties can make them more than k.

    Here and in ``_top_p`` rows may keep different numbers of tokens; dropped tokens have the score -inf. The search
    starts with k + 1 scores and grows only if the last one ties with the k-th.
    """
    vocab_size, size = scores.shape[-1], k + 1
    while True:
        values, ids = torch.topk(scores, size)
        kth = values[..., k - 1 : k]
        if size == vocab_size or bool(((values[..., -1:] < kth) | (kth == -torch.inf)).all()):
            ids, order = ids.sort(dim=-1)
            return ids, values.masked_fill(values < kth, -torch.inf).gather(-1, order)
        size = min(8 * size, vocab_size)


def _top_p(scores: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [.., S] of the smallest set of best scores whose probabilities reach ``top_p``, and the scores.

    Ties go to the lower index. A token stays if those before it do not reach ``top_p``, so the best one always stays.
    The set nearly always lies within a few top tokens, which avoids sorting the vocabulary.
    """
    probs = torch.softmax(scores, dim=-1)
    size = min(NUCLEUS_GUESS, probs.shape[-1])
    while True:
        indices = torch.topk(probs, size, sorted=False).indices.sort(dim=-1).values
        ordered, order = torch.sort(probs.gather(-1, indices), dim=-1, descending=True, stable=True)
        inside = 1 + (ordered.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
        edge = ordered.gather(-1, inside.clamp(max=size) - 1)
        # If the last one ties with the edge, a tied token of lower index may be missing.
        if size == probs.shape[-1] or bool((ordered[..., -1:] < edge).all()):
            break
        size = min(8 * size, probs.shape[-1])
    indices = indices.gather(-1, order)
    outside = torch.arange(size, device=scores.device) >= inside
    return indices, scores.gather(-1, indices).masked_fill(outside, -torch.inf)
