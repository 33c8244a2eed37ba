"""EAGLE-1 and EAGLE-2 heads. The heads of HASS, GRIFFIN and TALF differ only in their training.

One matrix joins token and feature. Decoder layers predict the target's next feature from that, and the target's lm_head
maps it to logits.
"""

import torch
from torch import Tensor, nn

from draftwood.heads.base import Head
from draftwood.heads.config import HeadConfig
from draftwood.heads.layers import DecoderLayer, Rotation
from draftwood.targets import Attend


class EagleHead(Head):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, input_norm=index > 0) for index in range(config.num_layers)
        )
        self._rotation = Rotation(config)

    def forward(self, token_embeds: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Predict the features ``[..., N, H]`` of tokens whose predecessors have ``features [..., N, H]``."""
        hidden: Tensor = self.fc(torch.cat([token_embeds, features], dim=-1))
        angles = self._rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, angles, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` float32. A predicted state before the target's final norm is normed first."""
        return self.target_logits(hidden if self.config.feature == "normed" else self.target_norm(hidden))

    def _reset_special(self, generator: torch.Generator) -> None:
        pass
