"""The fused CPU decoder: a forward is one call into C, from token ids to logits.

It is *batch-invariant*: the logits of a node are bit-identical whether its context was computed in single steps, in
prompt chunks of any size or as a path through a tree, and whatever else is in the batch. So speculative decoding emits
exactly what plain decoding emits, in every dtype.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwood.errors import OptionError
from draftwood.models import ModelConfig
from draftwood.targets.base import ForwardOutput
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cpu import build
from draftwood.targets.native.cpu.packing import Packer
from draftwood.targets.native.cpu.records import CACHE_TYPES, DTYPES, FORMATS, Batch, Layer, Matrix, Model
from draftwood.targets.native.decoder import DRAW_FIELDS, Decoder, PackedBatch
from draftwood.targets.native.rope import inverse_frequencies
from draftwood.targets.native.weights import LayerWeights, LoadProgress, Weights
from draftwood.targets.toprows import KernelRows

UNKNOWN_TOKEN = 2  # result of draftwood_forward
VECTOR_PADDING = 64  # norms and biases are padded with zeros to a multiple of this
KEPT_LOGITS = 64  # rows of logits whose memory is reused: as many as a tree usually has


class _Rows(NamedTuple):
    """Memory for results, with its addresses: getting one of a tensor takes longer than most other steps."""

    logits: torch.Tensor  # [R, V]
    greedy_ids: torch.Tensor  # [R]
    logits_address: int
    greedy_address: int


class CpuDecoder(Decoder):
    name = "fused-cpu"
    is_exact = True
    can_draw = True
    keeps_taps = True

    def __init__(
        self, config: ModelConfig, weights: Weights, cache: KVCache, progress: LoadProgress | None = None
    ) -> None:
        """Packs the weights and empties ``weights`` at the same time, so that memory does not double."""
        kernel = build.load_kernel()
        assert kernel is not None, "why_declined() comes first"
        self._kernel = kernel
        self._config = config
        self._dtype = weights.embed.dtype
        self._cache = cache  # keep alive what the model record points to: this and the next
        self._vectors: list[torch.Tensor] = []
        self._embed = weights.embed.contiguous()
        self._num_tokens = len(self._embed) or config.vocab_size  # a draft head may have fewer tokens than it reads
        self._packer = Packer(kernel, weights, self._dtype)
        # Allocating logits in every forward would cost more than all other work between two forwards.
        self._kept = _new_rows(KEPT_LOGITS, config.vocab_size)
        self._views: dict[int, _Rows] = {}  # of these, by number of rows
        self._layers = (Layer * config.num_layers)()
        self._model = self._pack_model(weights, progress)
        self._packer.release()
        self._model_address = ctypes.addressof(self._model)
        self._forward = kernel.draftwood_forward
        self._forward.restype = ctypes.c_int
        self._forward.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

    @staticmethod
    def is_available() -> bool:
        """Whether this machine has the kernel or can compile it."""
        return build.load_kernel() is not None

    @staticmethod
    def needs_build() -> bool:
        """Whether ``is_available`` is going to compile the kernel, which takes several seconds."""
        return build.needs_build()

    @staticmethod
    def why_unavailable() -> str:
        return build.why_unavailable()

    @staticmethod
    def instructions() -> str:
        """Returns the instruction set that the kernel uses here: "NEON", "AVX2", "AVX-512", "AMX", ..."""
        kernel = build.load_kernel()
        if kernel is None:
            return "none"
        describe = kernel.draftwood_describe
        describe.restype = ctypes.c_char_p
        return str(describe().decode())

    @staticmethod
    def why_declined(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
        """Returns why this decoder cannot run a model; empty if it can."""
        if device.type != "cpu":
            return "it runs on CPUs only"
        if dtype not in DTYPES:
            return f"it computes in {' or '.join(map(_dtype_name, DTYPES))}, not in {_dtype_name(dtype)}"
        if extras := config.list_extras():
            return f"the model has {' and '.join(extras)}"
        return config.why_not_native() or build.why_unavailable()

    @staticmethod
    def why_not_stored(formats: Sequence[str]) -> str:
        """Returns why matrices in these formats of GGUF files cannot run as they are stored; empty if they can."""
        unknown = [name for name in formats if name not in FORMATS]
        return f"it has no kernel for {' and '.join(unknown)}" if unknown else ""

    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        """Taps are float32: after a pass, when the caches hold other things, converting a few rows takes 0.1 ms."""
        return self._run(batch, tap_layers)

    def _run(
        self,
        batch: PackedBatch,
        tap_layers: tuple[int, ...],
        features: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """``features [rows, H]`` or ``given [rows, taps]``, what the model makes them of: float32, if it reads such.
        Taps are float32."""
        rows, num_best = len(batch.token_ids), self.num_best
        fields, nodes, wanted = list[int](), list[int](), 0
        for start, base, prefix_len, own, num_logits, after in batch.segments:
            fields += (start, base, prefix_len, len(nodes), after, len(own) - after, num_logits)  # Segment of model.h
            nodes += own
            wanted += num_logits
        token_ids, parents = array("q", batch.token_ids), array("q", nodes)
        segments, taps = array("q", fields), array("q", tap_layers)
        inputs = [part.buffer_info()[0] for part in (token_ids, parents, segments, taps)]
        results = self._rows(wanted)
        tapped = torch.empty(rows, len(tap_layers) * self._config.hidden_size) if tap_layers else None
        words = np.empty(KernelRows.num_words(wanted, num_best), np.int32) if num_best and wanted else None
        draws = batch.list_draws(is_selected=True).fields
        drawn = np.zeros(wanted, np.int32) if draws else None
        record = Batch(
            rows,
            len(nodes),
            len(batch.segments),
            len(tap_layers),
            wanted,
            0 if words is None else num_best,
            *inputs,
            results.logits_address,
            results.greedy_address,
            None if words is None else ctypes.addressof(ctypes.c_int32.from_buffer(words.data)),
            None if tapped is None else tapped.data_ptr(),
            None if features is None else features.data_ptr(),
            None if given is None else given.data_ptr(),
            len(draws) // DRAW_FIELDS,
            draws.buffer_info()[0],
            None if drawn is None else drawn.ctypes.data,
        )
        failure = self._forward(self._model_address, ctypes.addressof(record), torch.get_num_threads())
        if failure == UNKNOWN_TOKEN:
            raise OptionError(
                "A token id is outside the vocabulary",
                got=f"ids from {min(token_ids)} to {max(token_ids)}",
                allowed=f"0 to {self._num_tokens - 1}",
            )
        if failure:
            raise MemoryError(f"not enough memory for a forward of {rows} positions")
        top = None if words is None else KernelRows.in_words(words, wanted, num_best)
        return ForwardOutput(results.logits, results.greedy_ids, tapped, top, drawn)

    def _rows(self, count: int) -> _Rows:
        """Memory for the results of ``count`` rows, which the next pass may overwrite."""
        vocab_size = self._model.vocab
        if count > KEPT_LOGITS:
            return _new_rows(count, vocab_size)
        if count not in self._views:
            logits, greedy_ids, *addresses = self._kept
            own = logits.flatten()[: count * vocab_size].view(count, vocab_size)
            self._views[count] = _Rows(own, greedy_ids[:count], *addresses)
        return self._views[count]

    def move_rows(self, sources: list[int], first: int) -> None:
        """Like ``KVCache.move_rows``: every cycle moves a few rows."""
        keys = self._cache.keys  # [layers, kv_heads, slots, head_dim]
        row_bytes = keys.shape[3] * keys.itemsize
        index = (ctypes.c_int64 * len(sources))(*sources)
        for plane in (keys, self._cache.values):
            self._kernel.draftwood_move_rows(
                ctypes.c_void_p(plane.data_ptr()),
                ctypes.c_int64(keys.shape[0] * keys.shape[1]),
                ctypes.c_int64(keys.shape[2] * row_bytes),
                ctypes.c_int64(row_bytes),
                index,
                ctypes.c_int64(first),
                ctypes.c_int64(len(sources)),
            )

    def _pack_model(self, weights: Weights, progress: LoadProgress | None) -> Model:
        config, cache = self._config, self._cache
        for index in range(config.num_layers):
            self._layers[index] = self._pack_layer(weights.layers.pop(0))
            if progress is not None and weights.stored_embed is not None:  # others were read before
                progress(index + 1, config.num_layers)
        head, weights.head = weights.head, torch.empty(0, dtype=self._dtype)
        weights.embed = torch.empty(0, dtype=self._dtype)
        if config.tied_embeddings:
            embed, self._embed = Matrix(), weights.embed
        elif weights.stored_embed is not None:
            embed = self._packer.pack(weights.stored_embed)
        else:
            embed = self._packer.describe(self._embed)
        return Model(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            tokens=self._num_tokens,
            window=config.sliding_window or 0,
            cache_type=CACHE_TYPES[cache.keys.dtype],
            slots=cache.keys.shape[2],
            norm_eps=config.norm_eps,
            layer=ctypes.addressof(self._layers),
            norm=self._pad_vector(weights.norm),
            inverse_frequencies=self._pad_vector(inverse_frequencies(config.rope, config.head_dim)),
            embed=embed,
            embed_packed=int(weights.stored_embed is not None),
            head=self._packer.pack(head),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
        )

    def _pack_layer(self, layer: LayerWeights) -> Layer:
        return Layer(
            input_norm=self._pad_vector(layer.input_norm),
            post_norm=self._pad_vector(layer.post_norm),
            qkv_bias=self._pad_vector(layer.qkv_bias),
            o_bias=self._pad_vector(layer.o_bias),
            q_norm=self._pad_vector(layer.q_norm),
            k_norm=self._pad_vector(layer.k_norm),
            qkv=self._packer.pack_parts(layer.qkv),
            o=self._packer.pack(layer.o),
            gate_up=self._packer.pack_gate_up(layer.gate_up),
            down=self._packer.pack(layer.down),
        )

    def _pad_vector(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        padded = torch.zeros(-(-values.numel() // VECTOR_PADDING) * VECTOR_PADDING)
        padded[: values.numel()] = values
        self._vectors.append(padded)
        return padded.data_ptr()


def _new_rows(count: int, vocab_size: int) -> _Rows:
    logits, greedy_ids = torch.empty(count, vocab_size), torch.empty(count, dtype=torch.int64)
    return _Rows(logits, greedy_ids, logits.data_ptr(), greedy_ids.data_ptr())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
