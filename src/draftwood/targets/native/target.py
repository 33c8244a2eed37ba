"""The native target: our own decoder for the Llama family over a preallocated cache.

It packs segments, lets a decoder compute them and keeps the books of the cache. Which decoder runs is decided once,
when the target is built: a fused one on a CPU with a C compiler and on a GPU with Triton, the eager one elsewhere.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from draftwood.errors import CapabilityError, OptionError
from draftwood.models import ModelConfig
from draftwood.progress import Progress, report
from draftwood.targets.base import (
    USUAL_TOP,
    Flight,
    ForwardOutput,
    Layers,
    Segment,
    Target,
    TargetInfo,
    TargetParts,
    chain_parents,
)
from draftwood.targets.cache import KVCache
from draftwood.targets.native import cuda
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.decoder import Decoder, pack
from draftwood.targets.native.eager import EagerDecoder, EagerLayers
from draftwood.targets.native.quantize import Matrix, dense, format_of
from draftwood.targets.native.weights import LayersRead, Weights, load_parts, load_weights
from draftwood.targets.toprows import KERNEL_MOST


class NativeTarget(Target):
    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: Weights,
        cache_tokens: int,
        *,
        backend: str = "auto",
        read_parts: Callable[[], TargetParts] | None = None,
    ) -> None:
        """``read_parts``: where embeddings and head can be had again, so that they need not be kept."""
        dtype, device = weights.embed.dtype, weights.embed.device
        num_parameters, quantize = weights.num_parameters(), format_of(weights.head)
        # For draft heads. A decoder may take the weights apart, so they are held here, or read again when needed.
        self._parts = read_parts or partial(_parts, weights.embed, weights.norm, weights.head, config.norm_eps)
        self._cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, cache_tokens, dtype, device)
        self._decoder = _decoder(config, weights, self._cache, backend)
        self._layers = _layers(config, weights, self._decoder)
        self._taps: tuple[int, ...] = ()
        self.num_lanes = self._decoder.num_lanes
        self.config = config
        self.info = TargetInfo(
            name=name if quantize is None else f"{name} ({quantize})",  # another model than the one it was made from
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            context_length=config.context_length,
            dtype=dtype,
            device=device,
            eos_token_ids=config.eos_token_ids,
            num_parameters=num_parameters,
            cache_bytes_per_token=config.cache_bytes_per_token(dtype.itemsize),
            backend=self._decoder.name,
            quantize=quantize,
            pass_sizes=self._decoder.pass_sizes,
        )

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        name: str,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cache_tokens: int,
        backend: str = "auto",
        progress: LayersRead | None = None,
        quantize: str | None = None,
    ) -> NativeTarget:
        weights = load_weights(folder, config, dtype, device, progress, quantize)
        packs = device.type == "cpu"  # that decoder does
        read_parts = partial(load_parts, folder, config, dtype, device) if packs else None
        return cls(name, config, weights, cache_tokens, backend=backend, read_parts=read_parts)

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def num_slots(self) -> int:
        return self._cache.num_slots

    def open(self, capacity: int) -> int:
        return self._cache.open(capacity)

    def can_open(self, capacity: int) -> bool:
        return self._cache.can_open(capacity)

    def close(self, sequence: int) -> None:
        self._cache.close(sequence)

    def length(self, sequence: int) -> int:
        return self._cache[sequence].length

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        return self._decoder.forward(pack(segments, self._cache), self._taps)

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> Flight:
        if self.num_lanes == 1:
            return super().launch(segments)
        return self._decoder.launch(pack(segments, self._cache), self._taps, lane)

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self._cache.keep(sequence, nodes, self._decoder.move_rows)

    def truncate(self, sequence: int, length: int) -> None:
        self._cache.truncate(sequence, length)

    def fork(self, sequence: int, capacity: int) -> int:
        return self._cache.fork(sequence, capacity, self._decoder.move_rows)

    def set_taps(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if not 0 <= layer <= self.info.num_layers:
                raise OptionError("No such layer to tap", got=layer, allowed=f"0 to {self.info.num_layers}")
        self._taps = tuple(layers)

    def parts(self) -> TargetParts:
        return self._parts()

    def layers(self) -> Layers | None:
        return None if self.config.sliding_window else self._layers

    def set_top(self, k: int) -> None:
        self._decoder.num_best = k if k <= min(KERNEL_MOST, self.info.vocab_size) else 0

    def prepare(self, largest: int, progress: Progress | None = None) -> None:
        sizes = self.info.pass_sizes
        sizes = sizes[: bisect_left(sizes, largest) + 1]
        if not sizes or not self.can_open(sizes[-1]):
            return
        sequence = self.open(sizes[-1])
        self.set_top(USUAL_TOP)
        try:
            for number, size in enumerate(sizes):
                report(progress, "preparing the GPU", number, len(sizes))
                self.forward([Segment(sequence, [0] * size, chain_parents(size), size)])
        finally:
            self.close(sequence)
        report(progress, "preparing the GPU", len(sizes), len(sizes))


def _parts(embed: torch.Tensor, norm: torch.Tensor, head: Matrix, norm_eps: float) -> TargetParts:
    return TargetParts(embed, norm, dense(head, embed.dtype), norm_eps)


def _decoder(config: ModelConfig, weights: Weights, cache: KVCache, backend: str) -> Decoder:
    """The fastest there is for the model on its device, or the one that was asked for."""
    device, dtype = weights.embed.device, weights.embed.dtype
    if backend in ("auto", "fused-cpu"):
        if device.type == "cpu" and CpuDecoder.supports(config, dtype):
            return CpuDecoder(config, weights, cache)
        if backend == "fused-cpu":
            raise CapabilityError(
                "The fused CPU decoder cannot run here",
                got=f"{device.type}, {dtype}: {CpuDecoder.why_unavailable()}",
                next_step="Install a C compiler, or let the backend be 'auto' or 'eager'.",
            )
    if backend in ("auto", "fused-cuda"):
        why = cuda.why_unavailable(config, dtype, device, format_of(weights.head))
        if not why:
            return cuda.new_decoder(config, weights, cache)
        if backend == "fused-cuda":
            raise CapabilityError(
                "The fused GPU decoder cannot run here",
                got=f"{device.type}, {dtype}: {why}",
                next_step="Let the backend be 'auto' or 'eager'.",
            )
    if backend == "auto" and device.type == "cpu" and (why := CpuDecoder.why_unavailable()):
        warnings.warn(f"Decoding is slow, the eager CPU decoder runs: {why}.", RuntimeWarning, stacklevel=2)
    return EagerDecoder(config, weights, cache, device)


def _layers(config: ModelConfig, weights: Weights, decoder: Decoder) -> Layers | None:
    """What is lent, as fast as the decoder; None if that has packed the weights for itself."""
    if not weights.layers:
        return None
    return cuda.new_layers(config, weights) if decoder.name == "fused-cuda" else EagerLayers(config, weights)
