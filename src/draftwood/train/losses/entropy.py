"""Cross-entropies over the vocabulary with as few passes over the logits as possible.

The logits of a step are gigabytes, and on a GPU a pass over them costs a good part of the matmul that computed them.
Hence ``log_softmax`` and ``softmax`` (one kernel each) instead of log-sum-exp (four), one write per gradient, and
values after everything that gradients need, since the recomputation of a checkpoint stops as soon as it has that.

The gradient of the cross-entropy with labels that sum to one is the head's probabilities minus the labels.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Entropies(NamedTuple):
    """``[S, C]`` each."""

    total: Tensor
    top_k: Tensor  # the terms of the top-k labels; neither side is renormalised


def cross_entropies(logits: Tensor, labels: Tensor, known: Tensor, top_k: int = 0) -> Entropies:
    """Return cross-entropies of ``logits [S, C, V]`` with ``labels [C, V]``, and their part of the ``top_k`` labels.

    Both are 0 where ``known [C]`` is False."""
    probs, ids = _find_top_k(labels, top_k)  # [C, K]
    log_probs = logits.log_softmax(dim=-1)  # [S, C, V]
    slopes = cast(tuple[Tensor, Tensor], _ZeroWithGradients.apply(log_probs, labels, probs, ids))  # type: ignore[no-untyped-call]
    total_slope, top_slope = (torch.where(known, each, 0.0) for each in slopes)
    with torch.no_grad():
        total = -(labels * log_probs).sum(dim=-1)
        top = -(probs * log_probs.gather(-1, ids.expand(*log_probs.shape[:-1], -1))).sum(dim=-1)
        total, top = (torch.where(known, each, 0.0) for each in (total, top))
    return Entropies(total + total_slope, top + top_slope)


def hard_cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy ``[S, C]`` of ``logits [S, C, V]`` with tokens ``ids [C]``; 0 for negative ids."""
    wanted = ids.clamp_min(0).expand(logits.shape[:-1])[..., None]
    return torch.where(ids >= 0, -logits.log_softmax(dim=-1).gather(-1, wanted).squeeze(-1), 0.0)


def class_cross_entropy(logits: Tensor, ids: Tensor, probs: Tensor, rest: Tensor) -> Tensor:
    """Return the cross-entropy ``[N]`` of ``logits [N, V]`` with ``probs [N, K]`` of the tokens ``ids``.

    All other tokens form one class with probability ``rest [N]``. The ids of a row are distinct."""
    if ids.shape[1] == logits.shape[1]:
        classes, masses = logits.gather(1, ids), probs
    else:
        classes = cast(Tensor, _ClassLogits.apply(logits, ids))  # type: ignore[no-untyped-call]
        masses = torch.cat([each.to(logits.dtype) for each in (probs, rest[:, None])], dim=1)
    return -(masses * classes.log_softmax(dim=-1)).sum(dim=-1)


def log_sum_exp(logits: Tensor, best_ids: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the log-sum-exp ``[N]`` of ``logits [N, V]``, from the softmax at the maximum.

    That probability is at least 1 / V, so its logarithm is accurate."""
    probs = logits.softmax(dim=-1) if probs is None else probs
    best, share = (each.gather(1, best_ids[:, None]).squeeze(1) for each in (logits, probs))
    return best - share.log()


def _find_top_k(labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the top-k of ``labels [C, V]``: values and indices."""
    if not k:
        return labels[:, :0], labels.new_zeros(len(labels), 0, dtype=torch.int64)
    probs, ids = labels.topk(min(k, labels.shape[-1]), dim=-1)
    return probs, ids


class _ZeroWithGradients(torch.autograd.Function):
    """Returns zeros ``[S, C]`` whose gradients are those of both ``Entropies`` with respect to ``log_probs [S, C, V]``.

    The values are computed elsewhere, so that a checkpoint does not recompute them.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, labels: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(labels, probs, ids)
        one = log_probs[..., 0]
        return torch.zeros_like(one), torch.zeros_like(one)

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor, None, None, None]:
        labels, probs, ids = ctx.saved_tensors
        by_total, by_top = (-each[..., None] for each in by)  # [S, C, 1]
        gradient = by_total * labels
        gradient.scatter_add_(-1, ids.expand(*gradient.shape[:-1], -1), by_top * probs)
        return gradient, None, None, None


class _ClassLogits(torch.autograd.Function):
    """Returns the logits ``[N, K + 1]`` of K + 1 classes: the tokens ``ids [N, K]``, and all others as one class.

    The given logits are set to -inf at ``ids`` for a moment and restored, which saves a copy.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        others = logits.data  # the same memory, without a version bump, since it is restored below
        kept = others.gather(1, ids)
        others.scatter_(1, ids, float("-inf"))
        probs = others.softmax(dim=-1)  # among the other tokens; 0 at ids
        total = log_sum_exp(others, others.argmax(dim=-1), probs)
        others.scatter_(1, ids, kept)
        ctx.save_for_backward(ids, probs)
        return torch.cat([kept, total[:, None]], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_class: Tensor) -> tuple[Tensor, None]:
        ids, probs = ctx.saved_tensors
        return (probs * by_class[:, -1:]).scatter_(1, ids, by_class[:, :-1]), None
