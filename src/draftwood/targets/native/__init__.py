"""The native target: our own decoders for Llama-family models."""

from draftwood.targets.native.decoder import PackedBatch, PackedSegment, pack
from draftwood.targets.native.eager import HEAD_ROWS, CacheAttention, rms_norm, rotate
from draftwood.targets.native.rope import inverse_frequencies
from draftwood.targets.native.stored import assemble_stored, has_weights, load_parts, quantized_tensors
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import LayerWeights, Weights, assemble
