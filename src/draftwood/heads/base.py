"""The contract of a head: what every kind has, and what it uses of its target.

    head, config, _ = load_head("my-head")
    head.bind(TargetParts(embed, norm, head_matrix, norm_eps))
    target.set_taps(config.taps_for(target.info.num_layers))
    features = head.fuse(output.taps)                                     # [N, H]
    hidden = head(head.embed(next_ids), features, positions, attend)      # EAGLE and EAGLE-3
    tokens = head.target_ids(head.logits(hidden).argmax(dim=-1))

The target's embeddings, final norm and lm_head are bound by reference. They are neither copied, nor parameters of the
head, nor part of its state.
"""

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
    """A draft head: the same module for drafting and training."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._parts: TargetParts | None = None
        self._wide_head: Tensor | None = None  # the target's lm_head in float32, once it was needed

    @property
    def parts(self) -> TargetParts:
        if self._parts is None:
            raise DraftwoodError("The head has no target yet", next_step="Call head.bind(TargetParts(...)) first.")
        return self._parts

    def bind(self, parts: TargetParts) -> None:
        """Set the target's parts. Raises if their sizes differ from the head's configuration."""
        width, vocab_size = self.config.target_hidden_size, self.config.vocab_size
        expected = {"embed": (vocab_size, width), "norm": (width,), "head": (vocab_size, width)}
        got = {name: tuple(getattr(parts, name).shape) for name in expected}
        wrong = [f"{name} {list(got[name])}, not {list(size)}" for name, size in expected.items() if got[name] != size]
        if wrong:
            raise ModelError(
                "The head was made for another target", got="; ".join(wrong), next_step="Run: draftwood inspect head"
            )
        self._parts, self._wide_head = parts, None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of target tokens, ``[..., Ht]``; ``[..., H]`` if the head has its own."""
        return F.embedding(token_ids, self.parts.embed)

    def fuse(self, taps: Tensor) -> Tensor:
        """Map the target's hidden states ``[..., T*Ht]`` to the features that the head reads, ``[..., H]``."""
        return self.target_norm(taps) if self.config.feature == "normed" else taps

    def target_norm(self, hidden: Tensor) -> Tensor:
        """Apply the target's final norm."""
        return rms_norm(hidden, self.parts.norm, self.parts.norm_eps)

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's lm_head to ``hidden [..., Ht]``; float32."""
        weight = self.parts.head
        if not (weight.is_cuda or torch.is_grad_enabled()):
            if self._wide_head is None:  # on a CPU, half precision would be converted in every pass
                self._wide_head = weight.float()
            hidden, weight = hidden.float(), self._wide_head
        return float_logits(hidden, weight)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map token ids of the head to those of the target."""
        return draft_ids

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Map token ids of the target to those of the head; -1 for tokens that the head does not have."""
        return target_ids

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialize: matrices at random, scaled by their number of inputs; norms with ones, biases with zeros.

        Parts that start as copies of the target are copied if the target is bound.
        """
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.fill_(1.0)
                elif isinstance(module, nn.Linear):
                    fill_normal_(module.weight, module.in_features**-0.5, generator)
                    if module.bias is not None:
                        module.bias.zero_()
            self._reset_special(generator)

    @abstractmethod
    def _reset_special(self, generator: torch.Generator) -> None:
        """Initialize the parameters that do not start as ``reset_parameters`` leaves them."""

    def _copy_target_head(self, weight: Tensor, rows: Tensor | None = None) -> None:
        """Copy the target's lm_head, or some rows of it, to ``weight`` if a target is bound."""
        if self._parts is not None:
            weight.copy_(self._parts.head if rows is None else self._parts.head[rows])


def fill_normal_(weight: Tensor, scale: float, generator: torch.Generator) -> None:
    """Fill with normal random numbers of standard deviation ``scale``, the same on every device and in every dtype."""
    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
