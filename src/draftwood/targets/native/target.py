"""The native target: our own decoders for the Llama family over a preallocated cache.

It packs segments, runs them through a decoder and manages the cache. The decoder is chosen once, when the target is
built: a fused one on a CPU with a C compiler and on a GPU with Triton, otherwise the eager one.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch

from draftwood.config import CPU_FORMATS
from draftwood.errors import CapabilityError, OptionError
from draftwood.models import GgufFile, ModelConfig, stored_tensors
from draftwood.progress import Progress, report
from draftwood.targets.base import (
    DEFAULT_TOP_K,
    Draw,
    ForwardOutput,
    Layers,
    PendingPass,
    Segment,
    TargetInfo,
    TargetParts,
    chain_parents,
)
from draftwood.targets.cache import KVCache
from draftwood.targets.native import cuda
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.decoder import Decoder, pack
from draftwood.targets.native.eager import EagerDecoder, EagerLayers
from draftwood.targets.native.quantize import Matrix, format_of, to_dense
from draftwood.targets.native.stored import assemble_stored, load_stored_parts, quantized_tensors, stored_formats
from draftwood.targets.native.weights import LoadProgress, Weights, load_dense_parts, load_weights, open_weights
from draftwood.targets.searches import Found, SearchPlan
from draftwood.targets.slots import SlotTarget
from draftwood.targets.toprows import MAX_TOP_K


class NativeTarget(SlotTarget):
    _cache: KVCache

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: Weights,
        cache_tokens: int,
        *,
        backend: str = "auto",
        exact: bool = False,
        read_parts: Callable[[], TargetParts] | None = None,
        quantize: str | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """``exact``: require that the logits of a node have the same bits in every pass.

        ``read_parts``: reads embeddings and head again, so that they need not be kept in memory. ``quantize``: what
        the weights are called if they are quantised; ``progress``: of weights that are read as they are packed.
        """
        dtype, device = weights.embed.dtype, weights.embed.device
        num_parameters, quantize = weights.num_parameters(), quantize or format_of(weights.head)
        # For draft heads. A decoder may consume the weights, so the parts are held here, or read again when needed.
        embed = weights.embed if weights.stored_embed is None else weights.stored_embed
        self._parts = read_parts or partial(_make_parts, embed, weights.norm, weights.head, config.norm_eps, dtype)
        self._cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, cache_tokens, dtype, device)
        self._decoder = _new_decoder(config, weights, self._cache, backend, exact, progress)
        self._layers = _share_layers(config, weights, self._decoder)
        self._taps: tuple[int, ...] = ()
        self.num_lanes = self._decoder.num_lanes
        self.config = config
        self.info = TargetInfo(
            name=name if quantize is None else f"{name} ({quantize})",  # a quantised model is a different model
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
            is_exact=self._decoder.is_exact,
            can_draw=self._decoder.can_draw,
            keeps_taps=self._decoder.keeps_taps,
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
        progress: LoadProgress | None = None,
        quantize: str | None = None,
        exact: bool = False,
    ) -> Self:
        read_parts = None
        if device.type == "cpu":  # its decoder packs the weights
            read_parts = partial(load_dense_parts, folder, config, dtype, device)
        if quantize in CPU_FORMATS:
            with open_weights(folder, config) as lookup:
                weights = assemble_stored(config, quantized_tensors(config, lookup, quantize), dtype)
                return cls(
                    name,
                    config,
                    weights,
                    cache_tokens,
                    backend="fused-cpu",
                    read_parts=read_parts,
                    quantize=quantize,
                    progress=progress,
                )
        weights = load_weights(folder, config, dtype, device, progress, quantize)
        return cls(name, config, weights, cache_tokens, backend=backend, exact=exact, read_parts=read_parts)

    @classmethod
    def from_stored(
        cls,
        path: Path,
        name: str,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        cache_tokens: int,
        progress: LoadProgress | None = None,
    ) -> Self | None:
        """Runs the weights of a GGUF file as they are stored; ``dtype`` is that of the cache and of hidden states.

        None if the decoder has no kernel for a format in the file.
        """
        with GgufFile(path) as file:
            tensors = stored_tensors(file, config)
            formats = stored_formats(tensors)
            if CpuDecoder.why_not_stored(formats):
                return None
            weights = assemble_stored(config, tensors, dtype)
            read_parts = partial(load_stored_parts, path, config, dtype)
            target = cls(
                name, config, weights, cache_tokens, backend="fused-cpu", read_parts=read_parts,
                quantize=", ".join(formats), progress=progress,
            )  # fmt: skip
            file.check_unchanged()
        return target

    @property
    def cache(self) -> KVCache:
        return self._cache

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        return self._decoder.forward(pack(segments, self._cache), self._taps)

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        if self.num_lanes == 1:
            return super().launch(segments)
        return self._decoder.launch(pack(segments, self._cache), self._taps, lane)

    def grow(self, segments: Sequence[Segment], plan: SearchPlan) -> list[Found] | None:
        searches = self._decoder.grow(pack(segments, self._cache), plan)
        if searches is not None:
            for segment, found in zip(segments, searches, strict=True):
                self.keep(segment.sequence, range(len(segment.token_ids)))
                self._cache.reserve(segment.sequence, found.parents(plan))
        return searches

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self._cache.keep(sequence, nodes, self._decoder.move_rows)

    def resize(self, sequence: int, capacity: int) -> bool:
        return self._cache.resize(sequence, capacity, self._decoder.move_rows)

    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        return self._cache.fork(sequence, capacity, length, self._decoder.move_rows)

    def set_taps(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if not 0 <= layer <= self.info.num_layers:
                raise OptionError("No such layer to tap", got=layer, allowed=f"0 to {self.info.num_layers}")
        self._taps = tuple(layers)

    def parts(self) -> TargetParts:
        return super().parts() if self.config.scales_ends else self._parts()

    def layers(self) -> Layers | None:
        return None if self.config.sliding_window else self._layers

    def set_top(self, k: int) -> None:
        self._decoder.num_best = k if k <= min(MAX_TOP_K, self.info.vocab_size) else 0

    @property
    def num_prepared(self) -> int:
        return self._decoder.num_prepared

    def ready_sizes(self, num_segments: int) -> tuple[int, ...]:
        return self._decoder.ready_sizes(num_segments)

    def prepare(self, largest: int, progress: Progress | None = None) -> None:
        sizes = self.info.pass_sizes
        sizes = sizes[: bisect_left(sizes, largest) + 1]
        if not sizes or not self.can_open(sizes[-1]):
            return
        sequence = self.open(sizes[-1])
        self.set_top(DEFAULT_TOP_K)
        try:
            for number, size in enumerate(sizes):
                report(progress, "preparing the GPU", number, len(sizes))
                draw = Draw((1.0, 0, 1.0, 0.0), lambda: [0.0]) if size == 1 else None
                self.forward([Segment(sequence, [0] * size, chain_parents(size), size, draw=draw)])
        finally:
            self.close(sequence)
        report(progress, "preparing the GPU", len(sizes), len(sizes))


def _make_parts(embed: Matrix, norm: torch.Tensor, head: Matrix, norm_eps: float, dtype: torch.dtype) -> TargetParts:
    return TargetParts(to_dense(embed, dtype), norm, to_dense(head, dtype), norm_eps)


def _new_decoder(
    config: ModelConfig, weights: Weights, cache: KVCache, backend: str, exact: bool, progress: LoadProgress | None
) -> Decoder:
    """Builds the fastest decoder that does not decline the model, or the one that was asked for."""
    device, dtype = weights.embed.device, weights.embed.dtype
    candidates: dict[str, tuple[Callable[[], str], Callable[[], Decoder]]] = {
        "fused-cpu": (
            lambda: CpuDecoder.why_declined(config, dtype, device),
            lambda: CpuDecoder(config, weights, cache, progress),
        ),
        "fused-cuda": (
            lambda: cuda.why_unavailable(config, dtype, device, format_of(weights.head)),
            lambda: cuda.new_decoder(config, weights, cache, exact=exact),
        ),
        "eager": (
            lambda: "it is not exact" if exact else EagerDecoder.why_declined(config),
            lambda: EagerDecoder(config, weights, cache, device),
        ),
    }
    wanted = list(candidates) if backend == "auto" else [backend]
    for name in wanted:
        why_declined, build = candidates[name]
        if not (why := why_declined()):
            if backend == "auto" and name == "eager" and device.type == "cpu":
                _warn_if_slow()
            return build()
    raise CapabilityError(
        f"The decoder {wanted[-1]!r} cannot run this model here",
        got=why,
        next_step="Let the backend be 'auto', or run the model through transformers (target 'hf').",
    )


def _warn_if_slow() -> None:
    if why := CpuDecoder.why_unavailable():
        warnings.warn(f"Decoding is slow, the eager CPU decoder runs: {why}.", RuntimeWarning, stacklevel=2)


def _share_layers(config: ModelConfig, weights: Weights, decoder: Decoder) -> Layers | None:
    """Returns layers as fast as the decoder; None if the decoder consumed the weights."""
    if not weights.layers:
        return None
    return cuda.new_layers(config, weights) if decoder.name == "fused-cuda" else EagerLayers(config, weights)
