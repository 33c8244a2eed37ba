"""The fused CPU decoder: a forward is one call into C, from token ids to logits.

It is *batch-invariant*: the logits of a node are bit-identical whether its context was computed in single steps, in
prompt chunks of any size or as a path through a tree, and whatever else is in the batch. So speculative decoding emits
exactly what plain decoding emits, in every dtype.
"""

import ctypes
from collections.abc import Callable
from itertools import accumulate, chain

import numpy as np
import torch

from draftwood.errors import OptionError
from draftwood.models import ModelConfig
from draftwood.targets.base import ForwardOutput
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cpu import build
from draftwood.targets.native.cpu.records import CACHE_TYPES, FORMATS, Batch, Layer, Matrix, Model, Segment
from draftwood.targets.native.decoder import Decoder, PackedBatch
from draftwood.targets.native.quantize import Matrix as Weight
from draftwood.targets.native.quantize import storage_of, to_dense
from draftwood.targets.native.rope import inverse_frequencies
from draftwood.targets.native.weights import LayerWeights, Weights

VECTOR_PADDING = 64  # norms and biases are padded with zeros to a multiple of this
ALIGNMENT = 64
KEPT_LOGITS = 64  # rows of logits whose memory is reused: as many as a tree usually has
OVERREAD = 256  # bytes read past the end: a product loads one row of weights ahead


class CpuDecoder(Decoder):
    name = "fused-cpu"
    is_exact = True

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache) -> None:
        """Packs the weights and empties ``weights`` at the same time, so that memory does not double."""
        kernel = build.load_kernel()
        assert kernel is not None, "why_declined() comes first"
        self._kernel = kernel
        self._config = config
        self._dtype = weights.embed.dtype
        self._cache = cache  # keep alive what the model record points to: this and the next
        self._vectors: list[torch.Tensor] = []
        self._embed: torch.Tensor | None = None if config.tied_embeddings else weights.embed.contiguous()
        self._arena = self._allocate_arena(weights)
        self._used = 0
        # Allocating logits in every forward would cost more than all other work between two forwards.
        self._logits = torch.empty(KEPT_LOGITS, config.vocab_size)
        self._layers = (Layer * config.num_layers)()
        self._model = self._pack_model(weights)

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
        if dtype not in FORMATS:
            return f"it computes in {' or '.join(map(_dtype_name, FORMATS))}, not in {_dtype_name(dtype)}"
        if extras := config.list_extras():
            return f"the model has {' and '.join(extras)}"
        return config.why_not_native() or build.why_unavailable()

    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        config = self._config
        rows, wanted = len(batch.token_ids), sum(segment.num_logits for segment in batch.segments)
        logits = self._logits[:wanted] if wanted <= len(self._logits) else torch.empty(wanted, config.vocab_size)
        greedy_ids = torch.empty(wanted, dtype=torch.int64)
        tapped = torch.empty(rows, len(tap_layers) * config.hidden_size)
        token_ids = np.array(batch.token_ids, dtype=np.int64)
        positions = np.array(batch.positions(), dtype=np.int64)
        trees = [segment.parents for segment in batch.segments]
        firsts = list(accumulate(map(len, trees), initial=0))
        parents = np.fromiter(chain.from_iterable(trees), dtype=np.int64, count=firsts[-1])
        taps = np.array(tap_layers, dtype=np.int64)
        if rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
            raise OptionError(
                "A token id is outside the vocabulary",
                got=f"ids from {token_ids.min()} to {token_ids.max()}",
                allowed=f"0 to {config.vocab_size - 1}",
            )
        segments = (Segment * len(batch.segments))(
            *[
                Segment(s.start, s.base, s.prefix_len, first, s.after, s.size, s.num_logits)
                for s, first in zip(batch.segments, firsts, strict=False)
            ]
        )
        record = Batch(
            rows=rows,
            nodes=firsts[-1],
            segments=len(batch.segments),
            taps=len(tap_layers),
            wanted=wanted,
            token_ids=token_ids.ctypes.data,
            positions=positions.ctypes.data,
            parents=parents.ctypes.data,
            segment=ctypes.addressof(segments),
            tap_layers=taps.ctypes.data,
            logits=logits.data_ptr(),
            greedy_ids=greedy_ids.data_ptr(),
            tapped=tapped.data_ptr(),
        )
        if self._kernel.draftwood_forward(ctypes.byref(self._model), ctypes.byref(record), torch.get_num_threads()):
            raise MemoryError(f"not enough memory for a forward of {rows} positions")
        return ForwardOutput(logits, greedy_ids, tapped.to(self._dtype) if tap_layers else None)

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

    def _pack_model(self, weights: Weights) -> Model:
        config, cache = self._config, self._cache
        for index in range(config.num_layers):
            self._layers[index] = self._pack_layer(weights.layers.pop(0))
        head, weights.head = weights.head, torch.empty(0, dtype=self._dtype)
        weights.embed = torch.empty(0, dtype=self._dtype)
        return Model(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            window=config.sliding_window or 0,
            cache_type=CACHE_TYPES[cache.keys.dtype],
            slots=cache.keys.shape[2],
            norm_eps=config.norm_eps,
            layer=ctypes.addressof(self._layers),
            norm=self._pad_vector(weights.norm),
            inverse_frequencies=self._pad_vector(inverse_frequencies(config.rope, config.head_dim)),
            embed=Matrix() if self._embed is None else self._record(self._embed, self._embed.data_ptr()),
            head=self._pack(head),
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
            qkv=self._pack(layer.qkv),
            o=self._pack(layer.o),
            gate_up=self._pack(layer.gate_up, joined=True),
            down=self._pack(layer.down),
        )

    def _pad_vector(self, values: torch.Tensor | None) -> int | None:
        if values is None:
            return None
        padded = torch.zeros(-(-values.numel() // VECTOR_PADDING) * VECTOR_PADDING)
        padded[: values.numel()] = values
        self._vectors.append(padded)
        return padded.data_ptr()

    def _allocate_arena(self, weights: Weights) -> torch.Tensor:
        """Allocates all packed matrices in one piece, so that huge pages fit. Untouched pages cost nothing yet."""
        size = self._packed_bytes(self._record(weights.head))
        for layer in weights.layers:
            matrices = [self._record(matrix) for matrix in (layer.qkv, layer.o, layer.down)]
            size += sum(map(self._packed_bytes, [*matrices, self._record(layer.gate_up, joined=True)]))
        arena = torch.empty(size + ALIGNMENT + OVERREAD, dtype=torch.uint8)
        self._function("draftwood_advise", None)(arena.data_ptr(), arena.numel())
        return arena

    def _record(self, weight: Weight, data: int | None = None, *, joined: bool = False) -> Matrix:
        """Describes ``weight [outputs, inputs]``; ``joined``: its rows are the gates, then as many ups."""
        values, scales = storage_of(weight)
        outputs, inputs = values.shape
        dtype = values.dtype if scales is None else self._dtype  # 8-bit weights are expanded before they are packed
        return Matrix(data, outputs // 2 if joined else outputs, inputs, int(joined), FORMATS[dtype])

    def _packed_bytes(self, matrix: Matrix) -> int:
        size = self._function("draftwood_packed_bytes", ctypes.c_int64)(ctypes.byref(matrix))
        return -(-int(size) // ALIGNMENT) * ALIGNMENT

    def _pack(self, weight: Weight, *, joined: bool = False) -> Matrix:
        """Packs ``weight`` into the arena."""
        start = -(-self._arena.data_ptr() // ALIGNMENT) * ALIGNMENT + self._used
        matrix = self._record(weight, start, joined=joined)
        self._used += self._packed_bytes(matrix)
        rows = to_dense(weight, self._dtype).contiguous()
        self._function("draftwood_pack", None)(ctypes.byref(matrix), rows.data_ptr(), torch.get_num_threads())
        return matrix

    def _function(self, name: str, result: type[ctypes.c_int64] | None) -> Callable[..., int]:
        function = getattr(self._kernel, name)
        function.restype = result
        function.argtypes = _ARGUMENTS[name]
        return function  # type: ignore[no-any-return]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "draftwood_advise": (_POINTER, _INT64),
    "draftwood_packed_bytes": (_POINTER,),
    "draftwood_pack": (_POINTER, _POINTER, ctypes.c_int),
}
