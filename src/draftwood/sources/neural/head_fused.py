"""EAGLE-3 heads on a CPU: a draft pass is one call into C, with the layers in 4 bits and the output matrix in 8.

A head with the target's vocabulary may draft from a shortlist of it (targets/native/cpu/features.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftwood.heads import Eagle3Head, FirstLayer
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head import EagleModel, slots_above
from draftwood.sources.neural.head_weights import bias_of, decoder_config, layer_weights
from draftwood.targets import TopRows
from draftwood.targets.native import PackedBatch, Weights
from draftwood.targets.native.cpu import CpuDecoder, CpuFeatureDecoder


class FusedEagleModel(EagleModel):
    """``EagleModel`` in the fused CPU decoder, where ``why_not_fused`` allows it. The head keeps only what the decoder
    does not have: it can no longer run by itself."""

    def __init__(self, head: Eagle3Head, taps: tuple[int, ...], num_slots: int, *, has_shortlist: bool = False) -> None:
        super().__init__(head, taps, num_slots)
        parts, first = head.parts, head.layers[0]
        assert isinstance(first, FirstLayer)
        embed = parts.embed if head.embed_tokens is None else head.embed_tokens.weight.detach()
        lm_head = parts.head if head.lm_head is None else head.lm_head.weight.detach()
        layers = [layer_weights(layer) for layer in head.layers]
        self._norms_output = head.config.norm_output
        self._norm = head.norm
        self._states = self._hidden.numpy()  # [slots, H] in the same memory
        only_fc = isinstance(head.input_norm, nn.Identity) and not head.fc_norm
        self._decoder = CpuFeatureDecoder(
            decoder_config(head.config),
            Weights(embed, layers, head.norm.weight.detach(), lm_head, tied=False),
            self._cache,
            feature_norm=first.hidden_norm.weight.detach(),
            norm_before_residual=head.config.norm_before_residual,
            fuse=(head.fc.weight.detach(), bias_of(head.fc)) if only_fc else None,
            has_shortlist=has_shortlist and not head.config.has_draft_vocabulary,
        )
        head.layers, head.lm_head = nn.ModuleList(), None

    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        decoder = self._decoder
        for segment, features, _ in segments:
            if features is not None:
                decoder.note_text(segment.token_ids)
        decoder.num_best = min(k, decoder.vocab_size)
        return super().forward(segments, k)

    def _logits(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        texts = [own for own in features if own is not None]
        if len(texts) == len(features) and self._decoder.can_fuse:
            output = self._decoder.run(batch, None, texts[0] if len(texts) == 1 else torch.cat(texts))
        elif texts:
            output = self._decoder.run(batch, self._given(batch, features))
        else:
            above = [slot for segment in batch.segments for slot in slots_above(segment)]
            output = self._decoder.run(batch, torch.from_numpy(self._states[above]))
        hidden = output.taps
        assert hidden is not None
        self._store(batch, self._norm(hidden) if self._norms_output else hidden)
        self._found = output.top
        return output.logits

    def _store(self, batch: PackedBatch, hidden: Tensor) -> None:
        states = hidden.numpy()
        for segment in batch.segments:
            self._states[segment.first_slot : segment.first_slot + segment.size] = states[segment.rows]

    def _top(self, logits: Tensor, k: int) -> TopRows:
        found, shortlist = self._found, self._decoder.shortlist
        if found is None:  # no rows
            return super()._top(logits, k)
        return found if shortlist is None else found.renamed(shortlist.ids)


def why_not_fused(head: Eagle3Head) -> str:
    """The reason why a bound head cannot run in the fused decoder; empty if it can."""
    embed = head.parts.embed if head.embed_tokens is None else head.embed_tokens.weight
    return CpuDecoder.why_declined(decoder_config(head.config), embed.dtype, embed.device)
