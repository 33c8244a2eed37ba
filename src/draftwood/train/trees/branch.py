"""Log-probabilities of a branch at each root under the head, with gradients."""

from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.train.trees.head_run import DraftHead, HeadRun
from draftwood.train.trees.rewards import Branch

ROWS = 4096  # rows whose logits are in memory at once


def branch_log_probs(head: DraftHead, run: HeadRun, branch: Branch, is_root: Tensor) -> Tensor:
    """Return the log-probability of every token of the branches, [B, R, D]; 0 after the end of a branch and where
    ``is_root`` is False.

    ``run`` is still at its roots. All tokens of a branch are in the draft vocabulary."""
    length = torch.where(is_root, branch.length, 0)  # [B, R]
    longest = int(length.amax()) if length.numel() else 0
    levels = [torch.zeros(length.numel(), device=length.device)] * branch.tokens.shape[-1]
    parents = torch.zeros_like(length)[..., None]
    hidden = run.at_roots()  # [B, R, 1, H]
    for depth in range(longest):
        if depth:
            hidden = run.step(branch.tokens[..., depth - 1 : depth], parents)
        where = (length.flatten() > depth).nonzero()[:, 0]
        own = head.draft_ids(branch.tokens[..., depth].flatten()[where])
        found = _log_probs(head, hidden.flatten(0, 2).index_select(0, where), own)
        levels[depth] = levels[depth].index_add(0, where, found)
    return torch.stack(levels, dim=-1).view(branch.tokens.shape)


def _log_probs(head: DraftHead, hidden: Tensor, own_ids: Tensor) -> Tensor:
    """Return log-probabilities of draft tokens [n] after ``hidden [n, H]``, in blocks, without storing logits."""
    parts = []
    for rows, ids in zip(torch.split(hidden, ROWS), torch.split(own_ids, ROWS), strict=True):
        if torch.is_grad_enabled() and rows.requires_grad:
            again = checkpoint(_block_log_probs, head, rows, ids, use_reentrant=False, preserve_rng_state=False)
            parts.append(cast(Tensor, again))
        else:
            with torch.enable_grad():  # the same rounding as with gradients
                parts.append(_block_log_probs(head, rows.detach().requires_grad_(), ids).detach())
    return torch.cat(parts)


def _block_log_probs(head: DraftHead, hidden: Tensor, own_ids: Tensor) -> Tensor:
    logits = head.logits(hidden)  # [n, Vd]
    return logits.gather(1, own_ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
