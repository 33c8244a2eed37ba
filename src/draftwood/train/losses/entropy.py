"""Cross-entropies over a vocabulary that pass over its logits as few times as they can.

The logits of a step are gigabytes, and on a GPU every pass over them takes as long as a good part of the product that
made them. Hence: ``log_softmax`` and ``softmax`` are one kernel each, where a log-sum-exp is four; a gradient is
written once, not added up from parts; and what a block says comes after what its gradients need, since a checkpoint
that computes it again stops as soon as it has those.

The derivatives of the cross-entropy against labels that sum to one are the head's probabilities less the labels.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Entropies(NamedTuple):
    """``[S, C]`` each."""

    whole: Tensor
    top_k: Tensor  # the part of the likeliest tokens in it, neither side scaled up to them


def cross_entropies(logits: Tensor, labels: Tensor, known: Tensor, top_k: int = 0) -> Entropies:
    """Of ``logits [S, C, V]`` against distributions ``labels [C, V]``, and the part of their ``top_k`` likeliest; 0
    where a label is not ``known [C]``."""
    probs, ids = _likeliest(labels, top_k)  # [C, K]
    log_probs = logits.log_softmax(dim=-1)  # [S, C, V]
    slopes = cast(tuple[Tensor, Tensor], _Slopes.apply(log_probs, labels, probs, ids))  # type: ignore[no-untyped-call]
    whole_slope, top_slope = (torch.where(known, each, 0.0) for each in slopes)
    with torch.no_grad():
        whole = -(labels * log_probs).sum(dim=-1)
        top = -(probs * log_probs.gather(-1, ids.expand(*log_probs.shape[:-1], -1))).sum(dim=-1)
        whole, top = (torch.where(known, each, 0.0) for each in (whole, top))
    return Entropies(whole + whole_slope, top + top_slope)


def hard_cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Of ``logits [S, C, V]`` against tokens ``ids [C]``, ``[S, C]``; 0 for an id below 0."""
    wanted = ids.clamp_min(0).expand(logits.shape[:-1])[..., None]
    return torch.where(ids >= 0, -logits.log_softmax(dim=-1).gather(-1, wanted).squeeze(-1), 0.0)


def class_cross_entropy(logits: Tensor, ids: Tensor, probs: Tensor, rest: Tensor) -> Tensor:
    """Of ``logits [N, V]`` against ``probs [N, K]`` of the tokens ``ids`` and ``rest [N]`` of all others, which are one
    class: ``[N]``. A row has no id twice."""
    if ids.shape[1] == logits.shape[1]:
        classes, masses = logits.gather(1, ids), probs
    else:
        classes = cast(Tensor, _Classes.apply(logits, ids))  # type: ignore[no-untyped-call]
        masses = torch.cat([each.to(logits.dtype) for each in (probs, rest[:, None])], dim=1)
    return -(masses * classes.log_softmax(dim=-1)).sum(dim=-1)


def log_sum_exp(logits: Tensor, best_ids: Tensor, probs: Tensor | None = None) -> Tensor:
    """Of ``logits [N, V]``, ``[N]``, from their softmax at their greatest: 1 / V or more, so its logarithm is exact."""
    probs = logits.softmax(dim=-1) if probs is None else probs
    best, share = (each.gather(1, best_ids[:, None]).squeeze(1) for each in (logits, probs))
    return best - share.log()


def _likeliest(labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` greatest of ``labels [C, V]`` and where they are; nothing is searched for none."""
    if not k:
        return labels[:, :0], labels.new_zeros(len(labels), 0, dtype=torch.int64)
    probs, ids = labels.topk(min(k, labels.shape[-1]), dim=-1)
    return probs, ids


class _Slopes(torch.autograd.Function):
    """Zeros ``[S, C]`` with the gradients of both ``Entropies`` by ``log_probs [S, C, V]``, together in one buffer.

    The values are not made here: they would be made again on the way back.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, labels: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(labels, probs, ids)
        one = log_probs[..., 0]
        return torch.zeros_like(one), torch.zeros_like(one)

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor, None, None, None]:
        labels, probs, ids = ctx.saved_tensors
        by_whole, by_top = (-each[..., None] for each in by)  # [S, C, 1]
        gradient = by_whole * labels
        gradient.scatter_add_(-1, ids.expand(*gradient.shape[:-1], -1), by_top * probs)
        return gradient, None, None, None


class _Classes(torch.autograd.Function):
    """The logits of K + 1 classes from ``logits [N, V]``: those of the tokens ``ids [N, K]``, and last the log-sum-exp
    of all others, ``[N, K + 1]``.

    The others are told from the rest by -inf, which is put into the given logits and taken out again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        others = logits.data  # the same memory; nobody is told of a change, for there will be none
        kept = others.gather(1, ids)
        others.scatter_(1, ids, float("-inf"))
        probs = others.softmax(dim=-1)  # among the others; 0 for the kept
        total = log_sum_exp(others, others.argmax(dim=-1), probs)
        others.scatter_(1, ids, kept)
        ctx.save_for_backward(ids, probs)
        return torch.cat([kept, total[:, None]], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_class: Tensor) -> tuple[Tensor, None]:
        ids, probs = ctx.saved_tensors
        return (probs * by_class[:, -1:]).scatter_(1, ids, by_class[:, :-1]), None
