"""The contract of a head: what every kind has, and what it takes from its target.

    head, config, _ = load_head("my-head")
    head.bind(TargetParts(embed, norm, head_matrix, norm_eps))
    target.set_taps(config.taps_for(target.info.num_layers))
    features = head.fuse(output.taps)                                     # [N, H]
    hidden = head(head.embed(next_ids), features, positions, attend)      # EAGLE and EAGLE-3
    tokens = head.target_ids(head.logits(hidden).argmax(dim=-1))

Embeddings, final norm and lm_head of the target are the target's: they are bound, never copied, and neither parameters
of a head nor part of its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from draftwood.errors import DraftwoodError, ModelError
from draftwood.heads.config import HeadConfig
from draftwood.heads.layers import RMSNorm, float_logits
from draftwood.targets import TargetParts
from draftwood.targets.native import rms_norm


class Head(nn.Module, ABC):
    """A draft head: one definition for drafting and for training."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._parts: TargetParts | None = None

    @property
    def parts(self) -> TargetParts:
        if self._parts is None:
            raise DraftwoodError("The head has no target yet", next_step="Call head.bind(TargetParts(...)) first.")
        return self._parts

    def bind(self, parts: TargetParts) -> None:
        """Gives the head its target's parts; they must have the sizes its configuration names."""
        config = self.config
        wanted = {
            "embed": (config.vocab_size, config.target_hidden_size),
            "norm": (config.target_hidden_size,),
            "head": (config.vocab_size, config.target_hidden_size),
        }
        got = {name: tuple(getattr(parts, name).shape) for name in wanted}
        wrong = [f"{name} {list(got[name])}, not {list(wanted[name])}" for name in wanted if got[name] != wanted[name]]
        if wrong:
            raise ModelError(
                "The head was made for another target", got="; ".join(wrong), next_step="See: draftwood inspect head"
            )
        self._parts = parts

    def embed(self, token_ids: Tensor) -> Tensor:
        """What a head reads of tokens of the target, ``[..., Ht]``; ``[..., H]`` where its embeddings are its own."""
        return F.embedding(token_ids, self.parts.embed)

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's hidden states ``[..., T*Ht]`` as the feature that the head reads, ``[..., H]``."""
        return self.target_norm(taps) if self.config.feature == "normed" else taps

    def target_norm(self, hidden: Tensor) -> Tensor:
        """The target's final norm."""
        return rms_norm(hidden, self.parts.norm, self.parts.norm_eps)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's lm_head over ``hidden [..., Ht]``; float32."""
        return float_logits(hidden, self.parts.head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Tokens of the target for tokens of the head."""
        return draft_ids

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Tokens of the head for tokens of the target; -1 where it has none."""
        return target_ids

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Starts anew: matrices at random by their number of inputs, norms at one, biases at zero.

        What should begin as something of the target's does so if the target is bound.
        """
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.fill_(1.0)
                elif isinstance(module, nn.Linear):
                    draw_(module.weight, module.in_features**-0.5, generator)
                    if module.bias is not None:
                        module.bias.zero_()
            self._start(generator)

    @abstractmethod
    def _start(self, generator: torch.Generator) -> None:
        """What begins otherwise than at random."""

    def _copy_target_head(self, weight: Tensor, rows: Tensor | None = None) -> None:
        """Lets an own lm_head begin as the target's, or as some rows of it, if there is a target."""
        if self._parts is not None:
            weight.copy_(self._parts.head if rows is None else self._parts.head[rows])


def draw_(weight: Tensor, scale: float, generator: torch.Generator) -> None:
    """Fills with random numbers of that scale, the same on every device and in every type."""
    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
