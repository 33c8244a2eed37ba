"""EAGLE-3 heads on a CPU: a draft pass is one call into C, with the head's matrices in 8 bits."""

from collections.abc import Sequence

from torch import Tensor, nn

from draftwood.heads import Eagle3Head, FirstLayer
from draftwood.sources.neural.head import EagleModel
from draftwood.sources.neural.head_weights import decoder_config, layer_weights
from draftwood.targets.native import PackedBatch, Weights
from draftwood.targets.native.cpu import CpuDecoder, CpuFeatureDecoder


class FusedEagleModel(EagleModel):
    """``EagleModel`` in the fused CPU decoder, where ``why_not_fused`` allows it. The head keeps only what the decoder
    does not have: it can no longer run by itself."""

    def __init__(self, head: Eagle3Head, taps: tuple[int, ...], num_slots: int) -> None:
        super().__init__(head, taps, num_slots)
        parts, first = head.parts, head.layers[0]
        assert isinstance(first, FirstLayer)
        embed = parts.embed if head.embed_tokens is None else head.embed_tokens.weight.detach()
        lm_head = parts.head if head.lm_head is None else head.lm_head.weight.detach()
        layers = [layer_weights(layer) for layer in head.layers]
        self._norms_output = head.config.norm_output
        self._norm = head.norm
        self._decoder = CpuFeatureDecoder(
            decoder_config(head.config),
            Weights(embed, layers, head.norm.weight.detach(), lm_head, tied=False),
            self._cache,
            feature_norm=first.hidden_norm.weight.detach(),
            norm_before_residual=head.config.norm_before_residual,
        )
        head.layers, head.lm_head = nn.ModuleList(), None

    def _logits(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        logits, hidden = self._decoder.run(batch, self._given(batch, features))
        self._store(batch, self._norm(hidden) if self._norms_output else hidden)
        return logits


def why_not_fused(head: Eagle3Head) -> str:
    """The reason why a bound head cannot run in the fused decoder; empty if it can."""
    embed = head.parts.embed if head.embed_tokens is None else head.embed_tokens.weight
    return CpuDecoder.why_declined(decoder_config(head.config), embed.dtype, embed.device)
