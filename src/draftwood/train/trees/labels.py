"""What a target says behind a node, kept as its best K tokens and the mass of all others; and the loss against it.

The others count as one class, "something else": the head's probability of that is the sum over all but the K tokens, so
nothing is pretended about how the mass is spread there. The loss is then the cross-entropy between two distributions
over K + 1 classes. It is smallest where the head agrees on all of them, and its distance from that point is never more
than the distance of the whole distributions; with K = V they are the same.

A head with a vocabulary of its own is told the target's distribution over its tokens, renormalised. Where the target's
own choice is none of them a label does not count, as in the original EAGLE-3.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.train.losses import class_cross_entropy, log_sum_exp, max_logits
from draftwood.train.trees.head_run import DraftHead


class Labels(NamedTuple):
    """Best first; ids are the head's own."""

    ids: Tensor  # [..., K] integer
    probs: Tensor  # [..., K]
    rest: Tensor  # [...] the mass of all other tokens
    counts: Tensor  # [...] bool


class Children(NamedTuple):
    """The best k tokens behind a node among those that the head has."""

    tokens: Tensor  # [n, k] int64, tokens of the target
    log_probs: Tensor  # [n, k] under the target's distribution over all its tokens


def vocabulary_of(head: DraftHead) -> Tensor | None:
    """The target's tokens that the head has, [Vd]; None: all."""
    return head.target_ids(_own_ids(head)) if head.config.has_draft_vocabulary else None


def read_labels(logits: Tensor, vocabulary: Tensor | None, num_kept: int, width: int) -> tuple[Labels, Children]:
    """From the target's logits [n, V]: ``num_kept`` entries of a label, ``width`` children."""
    own = logits if vocabulary is None else logits[:, vocabulary]  # [n, Vd]
    best = own.topk(min(max(num_kept, width), own.shape[1]))
    own_total = log_sum_exp(own, best.indices[:, 0])[:, None]  # [n, 1]
    total, counts = own_total, torch.ones_like(best.indices[:, 0], dtype=torch.bool)
    if vocabulary is not None:
        top = logits.argmax(dim=-1)  # [n]
        total = log_sum_exp(logits, top)[:, None]
        counts = best.values[:, 0] == logits.gather(1, top[:, None]).squeeze(1)
    probs = (best.values - own_total).exp()[:, :num_kept]
    ids = best.indices
    tokens = (ids if vocabulary is None else vocabulary[ids])[:, :width]
    log_probs = best.values[:, :width] - total
    rest = (1.0 - probs.sum(dim=-1)).clamp(min=0.0) if num_kept < own.shape[1] else torch.zeros_like(probs[:, 0])
    return Labels(ids[:, :num_kept], probs, rest, counts), Children(tokens, log_probs)


class NodeLosses(NamedTuple):
    cross_entropy: Tensor  # [N]
    is_right: Tensor  # [N] bool, whether the head's choice is the target's


def node_losses(head: DraftHead, hidden: Tensor, labels: Labels, block: int | None = None) -> NodeLosses:
    """Of the head's outputs ``hidden [N, H]`` against labels [N, K], ``block`` at a time; logits are not kept."""
    size = block or max(1, max_logits(hidden.device) // head.config.draft_vocab_size)
    given = zip(
        *(torch.split(each, size) for each in (hidden, labels.ids.long(), labels.probs, labels.rest)), strict=True
    )
    parts = [
        cast(tuple[Tensor, Tensor], checkpoint(_losses_of, head, *part, use_reentrant=False, preserve_rng_state=False))
        if torch.is_grad_enabled()
        else _losses_of(head, *part)
        for part in given
    ]
    if not parts:
        nothing = hidden.new_zeros(0)
        return NodeLosses(nothing.float(), nothing.bool())
    return NodeLosses(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _losses_of(head: DraftHead, hidden: Tensor, ids: Tensor, probs: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden)  # [n, Vd]
    losses = class_cross_entropy(logits, ids, probs, rest)  # first: a checkpoint that comes again leaves behind it
    return losses, logits.detach().argmax(dim=-1) == ids[:, 0]


def _own_ids(head: DraftHead) -> Tensor:
    return torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)
