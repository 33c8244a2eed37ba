"""Evaluation of the head's predictions: which positions count, and the loss there, a block of positions at a time.

A prediction of step j at position q predicts token q + 1 after j steps on the head's own outputs; step 0 was at pair
q - 1 - j. It counts if the target generated token q + 1. The target's distributions are computed once for all steps.
Nothing as wide as the vocabulary is stored for the backward pass: blocks are recomputed there.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.heads import Head
from draftwood.train.base import Batch
from draftwood.train.frozen import FrozenTarget
from draftwood.train.losses.entropy import cross_entropies, hard_cross_entropy

MAX_LOGITS_ON_CPU = 2**24  # logits of the head and the target that are computed at once
BYTES_PER_LOGIT = 256  # of GPU memory; a logit needs about 20 until its gradient is computed

# (hidden [S, C, H], path_ids [C, S]) -> logits [S, C, Vd] of the head. ``path_ids`` are the tokens up to position q.
ComputeLogits = Callable[[Tensor, Tensor], Tensor]


class Positions(NamedTuple):
    """The counted positions: position ``last`` of text ``text``, whose next token is predicted."""

    text: Tensor  # [P] int64
    last: Tensor  # [P] int64, 1 or more

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Select every position except the first whose next token the target generated."""
        text, last = batch.answered[:, 2:].nonzero(as_tuple=True)
        return cls(text, last + 1)

    @property
    def number(self) -> int:
        return len(self.text)

    def at(self, values: Tensor, ahead: int = 0) -> Tensor:
        """Return ``values [B, L, ...]`` at the positions, or ``ahead`` of them: ``[P, ...]``."""
        return values[self.text, self.last + ahead]

    def reached(self, num_steps: int) -> Tensor:
        """Return ``[S, P]``: whether enough text precedes the position for a prediction of the step."""
        steps = torch.arange(num_steps, device=self.last.device)
        return self.last[None] - 1 >= steps[:, None]

    def select(self, outputs: Sequence[Tensor], num_steps: int) -> Tensor:
        """Return the hidden states of the predictions, ``[S, P, H]``, from the outputs of the steps (``unroll``).

        Values are arbitrary where a step does not reach the position."""
        found = [
            output[self.text, (self.last - 1 - step).clamp_min(0)] for step, output in enumerate(outputs[:num_steps])
        ]
        return torch.stack(found + [torch.zeros_like(found[0])] * (num_steps - len(found)))

    def paths(self, token_ids: Tensor, num_steps: int) -> Tensor:
        """Return the last S tokens up to each position, ``[P, S]``, padded on the left with the first token."""
        back = torch.arange(num_steps - 1, -1, -1, device=token_ids.device)
        return token_ids[self.text[:, None], (self.last[:, None] - back).clamp_min(0)]


class Evaluation(NamedTuple):
    """Loss and accuracy per prediction, ``[S, P]`` each. The first two have gradients."""

    cross_entropy: Tensor
    top_k: Tensor  # its part of the target's top-k tokens; 0 if not requested
    right: Tensor  # bool: the head's top-1 token is the target's
    close: Tensor  # bool: the text's token is in the head's top ``close_k``; False if not requested


class Evaluator:
    """Compares the head's distributions with the target's, or with the tokens of the text if labels are ``hard``.

    A head with a draft vocabulary learns the target's distribution restricted to it. If the target's top-1 token is
    not in it, the loss is zero and the prediction is wrong, as in the original EAGLE-3 implementation.
    """

    def __init__(
        self,
        head: Head,
        frozen: FrozenTarget,
        compute_logits: ComputeLogits,
        *,
        hard: bool = False,
        top_k: int = 0,
        close_k: int = 0,
    ) -> None:
        self._head = head
        self._frozen = frozen
        self._compute_logits = compute_logits
        self._hard = hard
        self._top_k = top_k
        self._close_k = close_k

    def evaluate(
        self, hidden: Tensor, positions: Positions, batch: Batch, states: Tensor, block: int | None = None
    ) -> Evaluation:
        """Evaluate predictions ``hidden [S, P, H]`` against the target's hidden states ``[B, L, H]``.

        ``block``: number of positions that are computed at once.
        """
        num_steps, num_positions = hidden.shape[:2]
        size = block or self._block_size(num_steps, hidden.device)
        found = []
        for start in range(0, num_positions, size):
            some = Positions(positions.text[start : start + size], positions.last[start : start + size])
            inputs = (
                hidden[:, start : start + size],
                some.at(states),
                some.at(batch.token_ids, ahead=1),
                some.paths(batch.token_ids, num_steps),
            )
            if torch.is_grad_enabled():
                evaluation = checkpoint(self._evaluate_block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                evaluation = self._evaluate_block(*inputs)
            found.append(evaluation)
        if not found:
            empty = hidden[..., 0].float()  # [S, 0]
            return Evaluation(empty, empty, empty.bool(), empty.bool())
        return Evaluation(*(torch.cat(part, dim=1) for part in zip(*found, strict=True)))

    def _evaluate_block(self, hidden: Tensor, states: Tensor, token_ids: Tensor, path_ids: Tensor) -> Evaluation:
        """Compute what gradients need first: the recomputation of a checkpoint stops as soon as it has that."""
        logits = self._compute_logits(hidden, path_ids).float()  # [S, C, Vd]
        draft_ids = self._head.draft_ids(token_ids)  # [C], -1: not in its vocabulary
        if self._hard:
            wanted, whole = token_ids, hard_cross_entropy(logits, draft_ids)
            top = torch.zeros_like(whole)
        else:
            labels, wanted = self._labels(states)  # [C, Vd], [C]
            whole, top = cross_entropies(logits, labels, self._head.draft_ids(wanted) >= 0, self._top_k)
        return Evaluation(whole, top, *self._compare(logits, wanted, draft_ids))

    @torch.no_grad()
    def _compare(self, logits: Tensor, wanted: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``right`` and ``close`` of `Evaluation`, ``[S, C]`` each."""
        right = self._head.target_ids(logits.argmax(dim=-1)) == wanted
        if not self._close_k:
            return right, torch.zeros_like(right)
        better = (logits > _pick(logits, draft_ids)[..., None]).sum(dim=-1)
        return right, (better < self._close_k) & (draft_ids >= 0)

    @torch.no_grad()
    def _labels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's distribution after ``states [C, H]`` over the draft vocabulary, and its top-1 token.

        Computed in the precision of the target, whatever precision the head is trained in.
        """
        with torch.autocast(states.device.type, enabled=False):
            logits = self._frozen.logits(states).float()  # [C, V]
        best = logits.argmax(dim=-1)
        if self._head.config.has_draft_vocabulary:
            logits = logits[:, self._vocabulary(logits.device)]
        return logits.softmax(dim=-1), best

    def _vocabulary(self, device: torch.device) -> Tensor:
        return self._head.target_ids(torch.arange(self._head.config.draft_vocab_size, device=device))

    def _block_size(self, num_steps: int, device: torch.device) -> int:
        config = self._head.config
        wide = num_steps * config.draft_vocab_size + config.vocab_size
        return max(max_logits(device) // wide, 1)


def max_logits(device: torch.device) -> int:
    """Return how many logits to compute at once: few on a CPU for its caches, about a tenth of the memory on a GPU."""
    if device.type != "cuda":
        return MAX_LOGITS_ON_CPU
    return int(torch.cuda.get_device_properties(device).total_memory) // BYTES_PER_LOGIT


def smooth_l1(predicted: Tensor, true: Tensor) -> Tensor:
    """Return the smooth L1 distance of features ``[..., H]``, averaged over H."""
    return F.smooth_l1_loss(predicted.float(), true.float().expand_as(predicted), reduction="none").mean(dim=-1)


def accuracy(right: Tensor, counted: Tensor) -> Tensor:
    """Return the accuracy over counted positions; 0 if there are none."""
    return (right & counted).sum(dim=-1).float() / counted.sum(dim=-1).clamp_min(1)


def calibration_error(confidence: Tensor, right: Tensor, num_bins: int = 15) -> Tensor:
    """Return the expected calibration error (ECE) of predictions ``[N]``, with bins of equal width."""
    if not len(confidence):
        return torch.zeros((), device=confidence.device)
    bins = (confidence * num_bins).long().clamp(0, num_bins - 1)
    distance = torch.zeros(num_bins, dtype=torch.float64, device=confidence.device)
    distance.index_add_(0, bins, right.double() - confidence.double())
    return distance.abs().sum() / len(confidence)


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logits of ``ids [C]`` in ``logits [S, C, V]``; arbitrary for -1."""
    return logits.gather(-1, ids.clamp_min(0).expand(len(logits), -1)[..., None]).squeeze(-1)
