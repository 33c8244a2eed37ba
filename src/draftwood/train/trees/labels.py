"""Labels: the target's distribution after a node as its top K tokens and the mass of all others, and the loss.

All other tokens form one class, so nothing is assumed about their distribution. The loss is the cross-entropy over
K + 1 classes. It is minimal where the head agrees on all of them, and its excess over the minimum is at most that of
the full cross-entropy; with K = V they are equal.

A head with a draft vocabulary gets the target's distribution restricted to it and renormalised. If the target's top-1
token is not in it, the label does not count, as in the original EAGLE-3.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.train.losses import class_cross_entropy, log_sum_exp, max_logits
from draftwood.train.trees.head_run import DraftHead


class Labels(NamedTuple):
    """Labels, best token first."""

    ids: Tensor  # [..., K] integer, draft token ids
    probs: Tensor  # [..., K]
    rest: Tensor  # [...] the mass of all other tokens
    counts: Tensor  # [...] bool


class Children(NamedTuple):
    """The top k tokens after a node within the draft vocabulary."""

    tokens: Tensor  # [n, k] int64, target token ids
    log_probs: Tensor  # [n, k] under the target's distribution over its whole vocabulary


def find_vocabulary(head: DraftHead) -> Tensor | None:
    """Return the target token ids of the draft vocabulary, [Vd]; None if it has all tokens."""
    return head.target_ids(_list_draft_ids(head)) if head.config.has_draft_vocabulary else None


def read_labels(logits: Tensor, vocabulary: Tensor | None, num_kept: int, width: int) -> tuple[Labels, Children]:
    """Read labels with ``num_kept`` tokens and ``width`` children from the target's logits [n, V]."""
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
    is_right: Tensor  # [N] bool: the head's top-1 token is the target's


def node_losses(head: DraftHead, hidden: Tensor, labels: Labels, block: int | None = None) -> NodeLosses:
    """Return the losses of ``hidden [N, H]`` against labels [N, K], in blocks, without storing logits."""
    size = block or max(1, max_logits(hidden.device) // head.config.draft_vocab_size)
    given = zip(
        *(torch.split(each, size) for each in (hidden, labels.ids.long(), labels.probs, labels.rest)), strict=True
    )
    parts = [
        cast(
            tuple[Tensor, Tensor], checkpoint(_score_block, head, *part, use_reentrant=False, preserve_rng_state=False)
        )
        if torch.is_grad_enabled()
        else _score_block(head, *part)
        for part in given
    ]
    if not parts:
        nothing = hidden.new_zeros(0)
        return NodeLosses(nothing.float(), nothing.bool())
    return NodeLosses(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _score_block(head: DraftHead, hidden: Tensor, ids: Tensor, probs: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    logits = head.logits(hidden)  # [n, Vd]
    losses = class_cross_entropy(logits, ids, probs, rest)  # first: the recomputation of a checkpoint stops after it
    return losses, logits.detach().argmax(dim=-1) == ids[:, 0]


def _list_draft_ids(head: DraftHead) -> Tensor:
    return torch.arange(head.config.draft_vocab_size, device=head.fc.weight.device)
