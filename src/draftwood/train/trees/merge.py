"""Merge the draft trees of several heads at the same roots: related heads share most nodes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from draftwood.train.trees.draft_trees import DraftTrees


class MergedTrees(NamedTuple):
    """Merged trees of at most M nodes at B x R roots. Node 0 is the root; parents precede children; padding is last."""

    tokens: Tensor  # [B, R, M] int64; -1 at the root and at padding
    parents: Tensor  # [B, R, M] int64; 0 at the root and at padding
    is_node: Tensor  # [B, R, M] bool
    height: int
    numbers: list[Tensor]  # per tree: its nodes in the merged tree, [B, R, N] int64


def merge(trees: Sequence[DraftTrees]) -> MergedTrees:
    tokens, parents = trees[0].tokens, trees[0].parents
    width = tokens.shape[2]
    sizes = torch.full_like(tokens[..., :1], width)  # [B, R, 1]
    numbers = [torch.arange(width, device=tokens.device).expand_as(tokens)]
    height = int(torch.stack([tree.depths for tree in trees]).amax())
    for tree in trees[1:]:
        found = _find(tree, tokens, parents, height)  # [B, R, N]
        is_new = found < 0
        own = torch.where(is_new, sizes + is_new.cumsum(dim=2) - 1, found)
        sizes = sizes + is_new.sum(dim=2, keepdim=True)
        width = int(sizes.amax())
        places = torch.where(is_new, own, width)  # known nodes go to a column that is dropped
        tokens, parents = (
            F.pad(known, (0, width + 1 - known.shape[2]), value=fill).scatter(2, places, new)[..., :width]
            for known, new, fill in ((tokens, tree.tokens, -1), (parents, own.gather(2, tree.parents), 0))
        )
        numbers.append(own)
    is_node = torch.arange(width, device=tokens.device) < sizes
    return MergedTrees(tokens, parents, is_node, height, numbers)


def _find(tree: DraftTrees, tokens: Tensor, parents: Tensor, height: int) -> Tensor:
    """Find the nodes of a tree among ``tokens, parents [B, R, M]``: indices [B, R, N], -1 if missing."""
    same_token = tree.tokens[..., None] == tokens[:, :, None]  # [B, R, N, M]
    is_root = tree.depths == 0
    found = torch.where(is_root, 0, -1)
    for _ in range(height):  # each round resolves one more depth
        above = found.gather(2, tree.parents)
        fits = same_token & (parents[:, :, None] == above[..., None])
        has_one, which = fits.to(torch.uint8).max(dim=-1)
        found = torch.where(is_root, 0, torch.where(has_one > 0, which, -1))
    return found
