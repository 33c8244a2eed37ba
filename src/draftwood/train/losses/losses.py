"""What losses are made of: where guesses count, and how good they are, a block of positions at a time.

A guess is what a head says behind position q of a text, having reached it in so many steps on its own: step j started
from pair q - 1 - j. It counts where the target wrote token q + 1. The distributions of the target are made once for the
guesses of all steps, and nothing as wide as the vocabulary is kept for the way back: blocks are computed again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.heads import Head
from draftwood.train.base import Batch
from draftwood.train.frozen import FrozenTarget
from draftwood.train.losses.entropy import cross_entropies, hard_cross_entropy

LOGITS_ON_CPU = 2**24  # that are computed together, of all steps and of the target, where nobody asks for a block
BYTES_A_LOGIT = 256  # of a GPU's memory: one of them takes about 20 until its gradient is there

# (hidden [S, C, H], path_ids [C, S]) -> logits [S, C, Vd] of the head. ``path_ids`` are the tokens up to position q.
Say = Callable[[Tensor, Tensor], Tensor]


class Places(NamedTuple):
    """The guesses that count, by what they are made behind: position ``last`` of text ``text``."""

    text: Tensor  # [P] int64
    last: Tensor  # [P] int64, 1 or more

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """Behind every token, but the first, that is followed by one the target wrote."""
        text, last = batch.answered[:, 2:].nonzero(as_tuple=True)
        return cls(text, last + 1)

    @property
    def number(self) -> int:
        return len(self.text)

    def at(self, values: Tensor, ahead: int = 0) -> Tensor:
        """Of ``values [B, L, ...]`` those at the last position, or so many ahead of it: ``[P, ...]``."""
        return values[self.text, self.last + ahead]

    def reached(self, num_steps: int) -> Tensor:
        """Whether the text is long enough for a guess of that step, ``[S, P]``."""
        steps = torch.arange(num_steps, device=self.last.device)
        return self.last[None] - 1 >= steps[:, None]

    def guesses(self, outputs: Sequence[Tensor], num_steps: int) -> Tensor:
        """The hidden states of the guesses, ``[S, P, H]``, from the outputs of the steps (``unroll``); of steps that
        did not reach the position anything."""
        found = [
            output[self.text, (self.last - 1 - step).clamp_min(0)] for step, output in enumerate(outputs[:num_steps])
        ]
        return torch.stack(found + [torch.zeros_like(found[0])] * (num_steps - len(found)))

    def paths(self, token_ids: Tensor, num_steps: int) -> Tensor:
        """The tokens up to the last position, ``[P, S]``; before the text the first one."""
        back = torch.arange(num_steps - 1, -1, -1, device=token_ids.device)
        return token_ids[self.text[:, None], (self.last[:, None] - back).clamp_min(0)]


class Marks(NamedTuple):
    """How good the guesses are, ``[S, P]`` each; gradients flow from the first two."""

    cross_entropy: Tensor
    top_k: Tensor  # the share of the target's likeliest tokens in it; 0 where not asked for
    right: Tensor  # bool: the head's likeliest token is the target's
    close: Tensor  # bool: the token of the text is among the head's ``close_k`` likeliest; False where not asked for


class Marker:
    """Compares what a head says with what its target says, or with the text where labels are hard.

    A head with a vocabulary of its own learns the target's distribution over that vocabulary. Where the target's
    likeliest token is not in it there is no loss, and the guess is wrong: as in the original implementation.
    """

    def __init__(
        self, head: Head, frozen: FrozenTarget, say: Say, *, hard: bool = False, top_k: int = 0, close_k: int = 0
    ) -> None:
        self._head = head
        self._frozen = frozen
        self._say = say
        self._hard = hard
        self._top_k = top_k
        self._close_k = close_k

    def marks(self, hidden: Tensor, places: Places, batch: Batch, states: Tensor, block: int | None = None) -> Marks:
        """Of the guesses ``hidden [S, P, H]``, with the target's hidden states ``[B, L, H]`` along the texts.

        ``block``: positions that are computed together.
        """
        num_steps, num_places = hidden.shape[:2]
        size = block or self._block(num_steps, hidden.device)
        found = []
        for start in range(0, num_places, size):
            some = Places(places.text[start : start + size], places.last[start : start + size])
            inputs = (
                hidden[:, start : start + size],
                some.at(states),
                some.at(batch.token_ids, ahead=1),
                some.paths(batch.token_ids, num_steps),
            )
            if torch.is_grad_enabled():
                marks = checkpoint(self._mark, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                marks = self._mark(*inputs)
            found.append(marks)
        if not found:
            empty = hidden[..., 0].float()  # [S, 0]
            return Marks(empty, empty, empty.bool(), empty.bool())
        return Marks(*(torch.cat(part, dim=1) for part in zip(*found, strict=True)))

    def _mark(self, hidden: Tensor, states: Tensor, token_ids: Tensor, path_ids: Tensor) -> Marks:
        """Gradients first: a checkpoint that comes here again leaves as soon as it has what they need."""
        logits = self._say(hidden, path_ids).float()  # [S, C, Vd]
        own_ids = self._head.draft_ids(token_ids)  # [C], -1: not in its vocabulary
        if self._hard:
            wanted, whole = token_ids, hard_cross_entropy(logits, own_ids)
            top = torch.zeros_like(whole)
        else:
            labels, wanted = self._labels(states)  # [C, Vd], [C]
            whole, top = cross_entropies(logits, labels, self._head.draft_ids(wanted) >= 0, self._top_k)
        return Marks(whole, top, *self._hits(logits, wanted, own_ids))

    @torch.no_grad()
    def _hits(self, logits: Tensor, wanted: Tensor, own_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the likeliest token is the ``wanted`` one, and whether that of the text is close: ``[S, C]`` each."""
        right = self._head.target_ids(logits.argmax(dim=-1)) == wanted
        if not self._close_k:
            return right, torch.zeros_like(right)
        better = (logits > _pick(logits, own_ids)[..., None]).sum(dim=-1)
        return right, (better < self._close_k) & (own_ids >= 0)

    @torch.no_grad()
    def _labels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution behind ``states [C, H]`` over the head's vocabulary, its likeliest token of all.

        It is computed as the target computes it, whatever the head is trained in.
        """
        with torch.autocast(states.device.type, enabled=False):
            logits = self._frozen.logits(states).float()  # [C, V]
        best = logits.argmax(dim=-1)
        if self._head.config.has_draft_vocabulary:
            logits = logits[:, self._vocabulary(logits.device)]
        return logits.softmax(dim=-1), best

    def _vocabulary(self, device: torch.device) -> Tensor:
        return self._head.target_ids(torch.arange(self._head.config.draft_vocab_size, device=device))

    def _block(self, num_steps: int, device: torch.device) -> int:
        config = self._head.config
        wide = num_steps * config.draft_vocab_size + config.vocab_size
        return max(most_logits(device) // wide, 1)


def most_logits(device: torch.device) -> int:
    """That are held at once: few on a CPU for its caches, on a GPU as many as take a tenth of its memory."""
    if device.type != "cuda":
        return LOGITS_ON_CPU
    return int(torch.cuda.get_device_properties(device).total_memory) // BYTES_A_LOGIT


def smooth_l1(guessed: Tensor, true: Tensor) -> Tensor:
    """How far features ``[..., H]`` are from the true ones, a mean over their numbers, ``[...]``."""
    return F.smooth_l1_loss(guessed.float(), true.float().expand_as(guessed), reduction="none").mean(dim=-1)


def share(right: Tensor, counted: Tensor) -> Tensor:
    """The share of the counted that are right, 0 where none is counted: an accuracy."""
    return (right & counted).sum(dim=-1).float() / counted.sum(dim=-1).clamp_min(1)


def calibration_error(confidence: Tensor, right: Tensor, num_bins: int = 15) -> Tensor:
    """The expected calibration error: guesses ``[N]`` in bins of equal width by their ``confidence``, in each the
    distance of the share that is ``right`` from the mean confidence, weighted by the bin's size."""
    if not len(confidence):
        return torch.zeros((), device=confidence.device)
    bins = (confidence * num_bins).long().clamp(0, num_bins - 1)
    distance = torch.zeros(num_bins, dtype=torch.float64, device=confidence.device)
    distance.index_add_(0, bins, right.double() - confidence.double())
    return distance.abs().sum() / len(confidence)


def _pick(logits: Tensor, ids: Tensor) -> Tensor:
    """Of ``logits [S, C, V]`` those of ``ids [C]``; of -1 anything."""
    return logits.gather(-1, ids.clamp_min(0).expand(len(logits), -1)[..., None]).squeeze(-1)
