"""GTO's objective: rewards of draft trees, advantages in groups, and the clipped ratio of the accepted branch.

All functions take tensors whose last dimension is [..., N] nodes or [..., m] members of a group.
"""

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from draftwood.train.trees.draft_trees import DraftTrees

REWARDS = ("lse", "max", "mean")


def branch_values(probs: Tensor, trees: DraftTrees) -> Tensor:
    """Return the expected number of accepted tokens on the path to each node, [..., N], without the root.

    This is the sum over the path of the products of ``probs``."""
    below_root = trees.depths > 0
    chance, value = torch.ones_like(probs), torch.zeros_like(probs)
    for _ in range(_height(trees)):  # each round resolves one more depth
        chance = torch.where(below_root, probs * chance.gather(-1, trees.parents), 1.0)
        value = torch.where(below_root, chance + value.gather(-1, trees.parents), 0.0)
    return value


def is_leaf(trees: DraftTrees) -> Tensor:
    """Return [..., N] bool. If the tree is only the root, the root is a leaf."""
    has_child = torch.zeros_like(trees.parents, dtype=torch.bool)
    below_root = trees.depths > 0
    has_child.scatter_(-1, torch.where(below_root, trees.parents, 0), True)
    if trees.parents.shape[-1] == 1:
        has_child = torch.zeros_like(has_child)
    return ~has_child


def reward(probs: Tensor, trees: DraftTrees, kind: str, eta: float) -> Tensor:
    """Return the reward of each tree, [...]: the smooth maximum, maximum or mean over its branches."""
    values, leaves = branch_values(probs, trees), is_leaf(trees)
    if kind == "lse":
        return (eta * values).masked_fill(~leaves, float("-inf")).logsumexp(dim=-1) / eta
    if kind == "max":
        return values.masked_fill(~leaves, float("-inf")).amax(dim=-1)
    return (values * leaves).sum(dim=-1) / leaves.sum(dim=-1)


class Branch(NamedTuple):
    tokens: Tensor  # [..., D] int64, 0 after the end
    length: Tensor  # [...] int64

    def pad(self, depth: int) -> Self:
        """Return the branch with D = ``depth``."""
        return self._replace(tokens=F.pad(self.tokens, (0, depth - self.tokens.shape[-1])))


def accepted_branch(choices: Tensor, trees: DraftTrees) -> Branch:
    """Return the longest branch whose tokens are all the target's ``choices [..., N]`` after their parents."""
    below_root = trees.depths > 0
    fits = (trees.tokens == choices.gather(-1, trees.parents)) | ~below_root
    accepted = fits
    for _ in range(_height(trees)):
        accepted = fits & accepted.gather(-1, trees.parents)
    return branch_to(torch.where(accepted, trees.depths, 0).argmax(dim=-1, keepdim=True), trees)


def branch_to(node: Tensor, trees: DraftTrees) -> Branch:
    """Return the branch from the root to ``node [..., 1]``."""
    height, length = _height(trees), trees.depths.gather(-1, node)
    tokens = torch.zeros(*length.shape[:-1], max(height, 1), dtype=torch.int64, device=length.device)
    for depth in range(height, 0, -1):
        is_on_path = trees.depths.gather(-1, node) == depth
        token = trees.tokens.gather(-1, node)
        tokens[..., depth - 1 : depth] = torch.where(is_on_path, token, 0)
        node = torch.where(is_on_path, trees.parents.gather(-1, node), node)
    return Branch(tokens, length[..., 0])


def advantages(rewards: Tensor, delta: float) -> Tensor:
    """Standardise rewards in groups [..., m], with the population standard deviation (0 for a group of one)."""
    away = rewards - rewards.mean(dim=-1, keepdim=True)
    return away / (away.square().mean(dim=-1, keepdim=True).sqrt() + delta)


def ratios(log_probs: Tensor, reference: Tensor, length: Tensor) -> Tensor:
    """Return the per-token probability ratio of a branch under the head and the reference, [...]."""
    return ((log_probs - reference) / length.clamp(min=1)).exp()


def clipped(ratio: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    """Return the clipped objective of each tree, to be maximised, [...]."""
    return torch.minimum(ratio * advantage, ratio.clamp(1.0 - epsilon, 1.0 + epsilon) * advantage)


def _height(trees: DraftTrees) -> int:
    return int(trees.depths.amax()) if trees.depths.numel() else 0
