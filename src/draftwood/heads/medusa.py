"""Medusa heads: each predicts the token at one depth from the target's last hidden state, independently."""

import torch
from torch import Tensor, nn

from draftwood.heads.base import Head
from draftwood.heads.config import HeadConfig
from draftwood.heads.layers import ResidualBlock, float_logits
from draftwood.targets import Attend


class MedusaBranch(nn.Module):
    """The head for one depth: a residual block, applied ``num_residual`` times, and its own lm_head.

    All applications share their weights, as in the original implementation.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.num_residual = config.num_residual
        self.block = ResidualBlock(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if config.own_lm_head else None

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(self.num_residual):
            hidden = self.block(hidden)
        return hidden


class MedusaHead(Head):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.branches = nn.ModuleList(MedusaBranch(config) for _ in range(config.num_heads_ahead))

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The input of ``logits_at``: the features themselves."""
        return features

    def logits_at(self, depth: int, hidden: Tensor, path_embeds: Tensor) -> Tensor:
        """Logits ``[..., V]`` of nodes at ``depth`` of a draft tree, 1 for the children of the root.

        ``hidden [..., Ht]`` belongs to the token before the root; ``path_embeds [..., depth, Ht]`` are not used.
        """
        branch = self.branches[depth - 1]
        assert isinstance(branch, MedusaBranch)
        hidden = branch(hidden)
        return self.target_logits(hidden) if branch.lm_head is None else float_logits(hidden, branch.lm_head.weight)

    def _reset_special(self, generator: torch.Generator) -> None:
        """Each branch starts as the target's lm_head after a block that is the identity."""
        for branch in self.branches:
            assert isinstance(branch, MedusaBranch)
            branch.block.linear.weight.zero_()
            if branch.lm_head is not None:
                self._copy_target_head(branch.lm_head.weight)
