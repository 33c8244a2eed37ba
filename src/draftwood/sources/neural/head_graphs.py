"""EAGLE heads on a GPU: a draft pass is one replay of a captured CUDA graph.

Passes that are too large for a graph run through the module, whose parameters become views of the merged ones. What is
stored twice are large matrices, in 8 bits for passes over few rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from draftwood.heads import Eagle3Head, EagleHead, FirstLayer
from draftwood.sources.neural.base import DraftSegment, SearchAhead
from draftwood.sources.neural.head import EagleModel
from draftwood.sources.neural.head_weights import bias_of, decoder_config, layer_weights
from draftwood.targets import DeviceAnswer, Found, SearchPlan, TopRows, chain_parents
from draftwood.targets.native import PackedBatch, Weights, cuda, pack
from draftwood.targets.native.cuda.features import MAX_FEATURES, FeatureDecoder, FeatureWeights, GivenStates


class GraphedEagleModel(EagleModel):
    """``EagleModel`` in CUDA graphs, where ``why_not_graphed`` allows it."""

    searches = True
    searches_ahead = True
    root_chunk = 16

    def __init__(
        self, head: EagleHead | Eagle3Head, taps: tuple[int, ...], num_slots: int, *, quantize: bool = False
    ) -> None:
        """``quantize``: where the GPU can, passes over few rows read large matrices in 8 bits."""
        super().__init__(head, taps, num_slots)
        vocabulary = head.vocabulary() if isinstance(head, Eagle3Head) and head.config.has_draft_vocabulary else None
        quantize = quantize and not cuda.why_not_on(self._hidden.device, "fp8")
        self._decoder = FeatureDecoder(feature_weights(head), self._cache, self._hidden, vocabulary, quantize=quantize)

    @property
    def num_prepared(self) -> int:
        return self._decoder.num_prepared

    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        parts = [self._forward_pass(some, k) for some in _split_passes(segments)]
        return parts[0] if len(parts) == 1 else TopRows(*map(np.concatenate, zip(*parts, strict=True)))

    def _forward_pass(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        batch, given = self._pack(segments)
        shape = self._decoder.shape_for(batch, given, k)
        if shape is None:
            return super().forward(segments, k)
        top = self._decoder.forward(batch, given, k, shape)
        return top.renamed(self._vocabulary) if self._head.config.has_draft_vocabulary else top

    def grow(self, segments: Sequence[DraftSegment], plan: SearchPlan) -> list[Found] | None:
        if not self._decoder.can_grow(plan):
            return None
        batch, given = self._pack(segments)
        shape = self._decoder.shape_for(batch, given, plan.best)
        if shape is None:
            return None
        searches = self._decoder.grow(batch, given, plan, shape)
        for each in segments:
            self.keep(each.segment.sequence, range(len(each.segment.token_ids)))
        return list(map(self._named, searches))

    def start_ahead(self, answer: DeviceAnswer, sequence: int, plan: SearchPlan) -> SearchAhead | None:
        if not self._decoder.can_grow(plan):
            return None
        extent = self._cache[sequence]
        launch = self._decoder.start_ahead(answer, extent.base, extent.length, plan)
        if launch is None:
            return None

        def finish(text: Sequence[int]) -> Found | None:
            read, found = self._decoder.finish_ahead(launch)
            if read != text:
                return None
            self._cache.reserve(sequence, chain_parents(len(text)))
            self.keep(sequence, range(len(text)))
            return self._named(found)

        return finish

    def _named(self, found: Found) -> Found:
        return found._replace(names=self._vocabulary) if self._head.config.has_draft_vocabulary else found

    def _pack(self, segments: Sequence[DraftSegment]) -> tuple[PackedBatch, list[GivenStates | None]]:
        """With the hidden states of the text, which stay where they are until a pass has run."""
        batch = pack([each.segment for each in segments], self._cache)
        given: list[GivenStates | None] = []
        for _, features, rows in segments:
            if features is None:
                given.append(None)
            else:
                given.append(GivenStates(self._convert(features), range(len(features)) if rows is None else rows))
        return batch, given


def why_not_graphed(head: EagleHead | Eagle3Head) -> str:
    """The reason why a bound head cannot run in CUDA graphs; empty if it can."""
    embed = head.parts.embed
    if embed.device.type != "cuda":
        return "not a GPU"
    return cuda.why_unavailable(decoder_config(head.config), embed.dtype, embed.device)


def feature_weights(head: EagleHead | Eagle3Head) -> FeatureWeights:
    """Merge the head's parameters; its modules become views of the result."""
    return _eagle3(head) if isinstance(head, Eagle3Head) else _eagle(head)


def _eagle(head: EagleHead) -> FeatureWeights:
    config, parts = head.config, head.parts
    layers = [layer_weights(layer) for layer in head.layers]
    return FeatureWeights(
        config=decoder_config(config),
        weights=Weights(parts.embed, layers, parts.norm, parts.head, tied=True),
        fc=head.fc.weight.detach(),
        fc_bias=bias_of(head.fc),
        feature_norm=None,
        norm_before_residual=False,
        has_norm=config.feature != "normed",
        norm_eps=parts.norm_eps,
        norm_output=False,
        fuse=head.fuse,
        tap_size=config.num_taps * config.target_hidden_size,
    )


def _eagle3(head: Eagle3Head) -> FeatureWeights:
    config, parts = head.config, head.parts
    embed = parts.embed if head.embed_tokens is None else head.embed_tokens.weight.detach()
    lm_head = parts.head if head.lm_head is None else head.lm_head.weight.detach()
    layers = [layer_weights(layer) for layer in head.layers]
    first = head.layers[0]
    assert isinstance(first, FirstLayer)
    return FeatureWeights(
        config=decoder_config(config),
        weights=Weights(embed, layers, head.norm.weight.detach(), lm_head, tied=head.lm_head is None),
        fc=None,
        fc_bias=None,
        feature_norm=first.hidden_norm.weight.detach(),
        norm_before_residual=config.norm_before_residual,
        has_norm=True,
        norm_eps=config.norm_eps,
        norm_output=config.norm_output,
        fuse=head.fuse,
        tap_size=config.num_taps * config.target_hidden_size,
    )


def _split_passes(segments: Sequence[DraftSegment]) -> Iterator[list[DraftSegment]]:
    """Group the segments in order into passes; segments that are too large for one get their own."""
    some: list[DraftSegment] = []
    size = 0
    for segment in segments:
        more = len(segment.segment.token_ids)
        if some and size + more > MAX_FEATURES:
            yield some
            some, size = [], 0
        some.append(segment)
        size += more
    if some:
        yield some
