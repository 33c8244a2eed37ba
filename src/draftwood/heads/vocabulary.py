"""Draft vocabularies: the target tokens that a head can suggest, under its own, smaller ids."""

import torch
from torch import Tensor

from draftwood.errors import ModelError


def check_vocabulary(token_ids: Tensor, size: int, total: int) -> Tensor:
    """Return ``token_ids`` as int64 if they are ``size`` different tokens of a target with ``total``; raise if not."""
    token_ids = token_ids.to(torch.int64)
    inside = int(((token_ids >= 0) & (token_ids < total)).sum())
    different = len(torch.unique(token_ids))
    if token_ids.shape != (size,) or inside != size or different != size:
        raise ModelError(
            "The token ids are not a draft vocabulary",
            got=f"{token_ids.numel()} ids, {different} of them different, {inside} of them tokens of the target",
            allowed=f"{size} different tokens, from 0 to {total - 1}",
        )
    return token_ids


def token_mask(token_ids: Tensor, total: int) -> Tensor:
    """Whether each token of the target is among ``token_ids``, ``[total]`` bool."""
    mask = torch.zeros(total, dtype=torch.bool, device=token_ids.device)
    mask[token_ids] = True
    return mask


def inverse_map(token_ids: Tensor, total: int) -> Tensor:
    """The head's id of each token of the target, ``[total]`` int64; -1 if it has none."""
    own_ids = torch.full((total,), -1, dtype=torch.int64, device=token_ids.device)
    own_ids[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return own_ids


def decode_offsets(offsets: Tensor) -> Tensor:
    """The target ids that offsets (``d2t``, target id minus own id) stand for."""
    return torch.arange(len(offsets), device=offsets.device) + offsets
