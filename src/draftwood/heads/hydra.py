"""Hydra heads: like Medusa heads, but each also reads the tokens drafted before its own.

Hydra++ adds a decoder layer over the hidden states before the heads (``num_layers`` 1), with a KV cache.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from draftwood.heads.base import Head
from draftwood.heads.config import HeadConfig
from draftwood.heads.layers import DecoderLayer, ResidualBlock, RMSNorm, Rotation, float_logits
from draftwood.targets import Attend


class JoiningBlock(nn.Module):
    """Map hidden state and embeddings side by side to one width: ``res_connection(x) + silu(linear(x))``."""

    def __init__(self, size: int, num_tokens: int) -> None:
        super().__init__()
        wide = size * (num_tokens + 1)
        self.linear = nn.Linear(wide, size)
        self.res_connection = nn.Linear(wide, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class HydraBranch(nn.Module):
    """The head for one depth. All blocks after the first share their weights, as in the original implementation."""

    def __init__(self, config: HeadConfig, num_tokens: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_further = config.num_residual - 1
        self.join = JoiningBlock(size, num_tokens)
        self.block = ResidualBlock(size) if self.num_further else None
        self.lm_head = nn.Linear(size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.join(x)
        for _ in range(self.num_further):
            assert self.block is not None
            hidden = self.block(hidden)
        return hidden

    def reset_to_identity(self) -> None:
        """Initialize so that the output is the hidden state."""
        for block in (self.join, self.block):
            if block is not None:
                block.linear.weight.zero_()
        self.join.res_connection.weight.zero_().fill_diagonal_(1.0)


class PrefixLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config, 0)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self._rotation = Rotation(config)

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        angles = self._rotation(positions, features.dtype)
        hidden: Tensor = self.norm(self.layers[0](features, angles, attend))
        return hidden


class HydraHead(Head):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.prefix = PrefixLayer(config) if config.num_layers else None
        self.branches = nn.ModuleList(HydraBranch(config, depth) for depth in range(1, config.num_heads_ahead + 1))

    def forward(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The input of ``logits_at`` for the features ``[..., N, Ht]`` of a text."""
        if self.prefix is None:
            return features
        hidden: Tensor = self.prefix(features, positions, attend)
        return hidden

    def logits_at(self, depth: int, hidden: Tensor, path_embeds: Tensor) -> Tensor:
        """Logits ``[..., V]`` of nodes at ``depth`` of a draft tree, 1 for the children of the root.

        ``hidden [..., Ht]`` belongs to the token before the root; ``path_embeds [..., depth, Ht]`` are the tokens on
        the path from the root to the node's parent.
        """
        branch = self.branches[depth - 1]
        assert isinstance(branch, HydraBranch)
        hidden = branch(torch.cat([hidden, path_embeds.flatten(-2)], dim=-1))
        return float_logits(hidden, branch.lm_head.weight, branch.lm_head.bias)

    def _reset_special(self, generator: torch.Generator) -> None:
        """Each branch starts as the target's lm_head over the hidden state, without the tokens."""
        for branch in self.branches:
            assert isinstance(branch, HydraBranch)
            branch.reset_to_identity()
            self._copy_target_head(branch.lm_head.weight)
