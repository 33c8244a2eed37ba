"""One forward pass of a fixed shape: all kernel launches in order, over buffers that never move.

*Narrow* passes (up to 64 rows: trees, short chunks) are bound by weight bandwidth; a layer is five kernels. *Wide*
passes (prompts, large batches) use the vendor's matrix products. *Exact* passes of all sizes are like narrow ones, in
an order of sums that does not depend on the size. All end by finding the top entries of each row of
logits, which are copied to the host in one transfer.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood.models import ModelConfig
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.attention import (
    WORD_BITS,
    choose_config,
    choose_ordered_config,
    max_tiles,
    ordered_attention,
    ordered_scratch_size,
    scratch_size,
    tree_attention,
)
from draftwood.targets.native.cuda.inputs import Inputs
from draftwood.targets.native.cuda.kernels import block_size, launch_top_rows, new_scratch, new_words, rows
from draftwood.targets.native.cuda.products import HEAD_BLOCK, MAX_ROWS, CacheWrite, Gpu, Heads, Kind, Product, Rotation
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.quantize import Matrix, Quantized, row_blocks, storage_of
from draftwood.targets.native.weights import LayerWeights, Weights
from draftwood.targets.toprows import TopRows


class Model(NamedTuple):
    """State shared by all passes of a target."""

    config: ModelConfig
    weights: Weights
    cache: KVCache
    rotation: tuple[torch.Tensor, torch.Tensor]  # cosines and sines [positions, D / 2]
    gpu: Gpu
    pdl: bool  # programmatic dependent launch: kernels may start before the previous one has finished
    is_exact: bool = False  # a row has the same bits in every pass


class Shape(NamedTuple):
    """Upper bounds of the batches that a pass can run."""

    num_rows: int
    num_sequences: int
    num_logits: int  # rows whose logits are computed; a narrow pass computes all or none
    num_best: int  # top entries per row of logits, at least 1
    taps: tuple[int, ...] = ()
    is_single: bool = False  # all sequences have one new node each: plain decoding. False if passes do not differ
    lane: int = 0  # passes of different lanes may be in flight together: each has its own inputs and outputs


class Pass(ABC):
    """Fill ``inputs``, call ``launch`` (or replay its graph), then read ``best``."""

    selects_rows: bool  # whether logits are computed only for the rows that the batch wants
    rotates_separately: bool  # whether a separate kernel rotates queries and keys
    reads_features: bool = False  # whether `inputs.moves` are features of rows, not cache rows to move

    def __init__(self, model: Model, shape: Shape, workspace: Workspace) -> None:
        config = model.config
        embed = model.weights.embed
        self._model = model
        self._shape = shape
        self._workspace = workspace
        self._buffers = workspace.buffers(shape.num_rows)
        self.nodes_per_tile = self._choose_attention()
        num_tiles = max_tiles(shape.num_rows, shape.num_sequences, self.nodes_per_tile)
        self.inputs = Inputs(shape.num_rows, num_tiles, self.nodes_per_tile, embed.device, config.sliding_window or 0)
        for_attention = self._attention_scratch(num_tiles)
        self._parts, self._counters = workspace.scratch(*map(max, for_attention, self._prepare()))
        self.taps: torch.Tensor | None = None  # [N, T*H]
        if shape.taps:
            self.taps = embed.new_zeros(shape.num_rows, len(shape.taps) * config.hidden_size)
        self.logits = workspace.logits(shape.num_logits, shape.lane)  # [R, V] float32
        self.words = new_words(shape.num_logits, shape.num_best, embed.device)  # [R, 2 * best + 1]: see `best`
        self.peaks = new_scratch(shape.num_logits, config.vocab_size, embed.device)  # of blocks, see `launch_top_rows`
        self._answer = torch.zeros(self.words.shape, dtype=torch.int32, pin_memory=embed.is_cuda)

    @property
    def pdl(self) -> bool:
        """Whether its kernels are launched before the previous one has finished, and wait by themselves."""
        return self._model.pdl

    def launch(self) -> None:
        """Launch the whole pass, from the inputs on the host to the result on the host. Does not wait."""
        self.send()
        self.compute()
        if self._shape.num_logits:
            self._answer.copy_(self.words, non_blocking=True)

    def send(self) -> None:
        """Copy the inputs to the device."""
        self.inputs.send()

    def compute(self) -> None:
        """The pass from inputs on the device to top entries on the device."""
        weights, cache, pdl = self._model.weights, self._model.cache, self._model.pdl
        norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        rows.move_rows(cache.keys, cache.values, self.inputs.moves, pdl=False)  # a copy may precede it, not a kernel
        rows.embed(self.inputs.ids, weights.embed, norms[0], self._buffers.hidden, self._ancestors(), pdl=pdl)
        for index, layer in enumerate(weights.layers):
            self._tap(index)
            self._project(index, layer)
            self._attend(index, layer)
            self._finish(layer, norms[index + 1])
        self._tap(len(weights.layers))
        self._launch_logits()

    def _launch_logits(self) -> None:
        """Compute the logits and find the top entries of each row."""
        if self._shape.num_logits:
            peaks_known = self._head()
            launch_top_rows(
                self.logits, self._shape.num_best, self.words, self.peaks,
                peaks_known=peaks_known, pdl=self._model.pdl,
            )  # fmt: skip

    def best(self) -> TopRows:
        """Top entries of the rows of logits, as views of the pass's memory. The pass must have finished."""
        words, k = self._answer.numpy(), self._shape.num_best
        return TopRows(words[:, :k], words[:, k : 2 * k].view(np.float32), words[:, 2 * k].view(np.float32))

    @abstractmethod
    def _prepare(self) -> tuple[int, int]:
        """Set up what is the same in every launch. Returns the float32 values and counters of scratch it needs."""

    @abstractmethod
    def _project(self, index: int, layer: LayerWeights) -> None:
        """Compute queries, keys and values from the normed hidden states."""

    @abstractmethod
    def _finish(self, layer: LayerWeights, next_norm: torch.Tensor) -> None:
        """Add the attention output to the hidden states, then run the feed-forward block."""

    @abstractmethod
    def _head(self) -> bool:
        """Compute logits from the normed hidden states. Returns whether it also wrote the peaks of their blocks."""

    def _attend(self, index: int, layer: LayerWeights) -> None:
        model, config, buffers = self._model, self._model.config, self._buffers
        keys, values = model.cache.keys[index], model.cache.values[index]
        if self.rotates_separately:
            cache_write = self._cache_write(index, layer)
            rows.rotate_and_store(buffers.qkv, cache_write, num_heads=config.num_heads, pdl=model.pdl)
        self._launch_attention(keys, values)

    def _choose_attention(self) -> int:
        """Choose the tiling of attention. Returns the number of nodes per tile."""
        self._attention = choose_config(**self._attention_sizes())
        return self._attention.nodes_per_tile

    def _attention_sizes(self) -> dict[str, int]:
        """What the tiling of attention depends on."""
        model, shape, config = self._model, self._shape, self._model.config
        return {
            "num_nodes": shape.num_rows,
            "num_sequences": shape.num_sequences,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_processors": model.gpu.num_processors,
            "shared_bytes": model.gpu.shared_bytes,
        }

    def _attention_scratch(self, num_tiles: int) -> tuple[int, int]:
        """The float32 values and counters of scratch that attention needs."""
        config = self._model.config
        return scratch_size(self._attention, num_tiles, config.num_kv_heads, config.head_dim)

    def _ancestors(self) -> rows.Ancestors | None:
        """The trees of the rows, if attention reads paths."""
        return None

    def _launch_attention(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Launch the attention of a layer over its ``keys, values [kv_heads, slots, D]``."""
        model, buffers, inputs = self._model, self._buffers, self.inputs
        tree_attention(
            buffers.qkv, keys, values, inputs.tiles, inputs.words, inputs.positions, buffers.mixed,
            self._parts, self._counters,
            config=self._attention, window=model.config.sliding_window or 0, pdl=model.pdl,
        )  # fmt: skip

    def _cache_write(self, index: int, layer: LayerWeights) -> CacheWrite:
        model, inputs = self._model, self.inputs
        rotation = Rotation(*model.rotation, layer.q_norm, layer.k_norm, model.config.norm_eps)
        return CacheWrite(rotation, inputs.positions, inputs.slots, model.cache.keys[index], model.cache.values[index])

    def _tap(self, layer: int) -> None:
        """Copy the input of ``layer`` if it is tapped, before the layer overwrites it."""
        for place, tapped in enumerate(self._shape.taps):
            if tapped == layer and self.taps is not None:
                width = self._model.config.hidden_size
                self.taps[:, place * width : (place + 1) * width].copy_(self._buffers.hidden.states)


class NarrowPass(Pass):
    """A few rows: norms, gates and residuals are fused into our own products."""

    selects_rows = False

    def _prepare(self) -> tuple[int, int]:
        config, weights = self._model.config, self._model.weights
        width, inner, layer = config.hidden_size, config.intermediate_size, weights.layers[-1]  # all are stored alike
        product = partial(self._new_product, eps=config.norm_eps)
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.qk_norm)
        self._heads = heads if heads.can_rotate else None
        self.rotates_separately = self._heads is None
        self._qkv = product(layer.qkv, width, config.q_size + 2 * config.kv_size, heads=self._heads)
        self._o = product(layer.o, config.q_size, width)
        self._gate_up = product(layer.gate_up, width, inner, Kind.GATED)
        self._down = product(layer.down, inner, width)
        self._logits = product(weights.head, width, config.vocab_size, Kind.HEAD)
        products = (self._qkv, self._o, self._gate_up, self._down, self._logits)
        floats, counters = map(max, *(product.scratch for product in products))
        return floats, counters

    def _new_product(
        self, weight: Matrix, num_in: int, num_out: int, kind: Kind = Kind.PLAIN, **options: Any
    ) -> Product:
        """A product with matrices that are stored like ``weight``."""
        rows, gpu, dtype = self._shape.num_rows, self._model.gpu, self._model.weights.embed.dtype
        options |= {"dtype": dtype, "weight_bytes": storage_of(weight)[0].itemsize, "pdl": self._model.pdl}
        return Product(num_in, num_out, rows, gpu, kind, **options)

    def _project(self, index: int, layer: LayerWeights) -> None:
        hidden = self._buffers.hidden
        self._qkv.launch(
            hidden.scaled, layer.qkv, self._buffers.qkv,
            squares=hidden.squares, num_squares=self._down.num_groups if index else 1,  # the embedding writes one
            bias=layer.qkv_bias, cache_write=self._cache_write(index, layer) if self._heads else None,
            parts=self._parts, counters=self._counters,
        )  # fmt: skip

    def _finish(self, layer: LayerWeights, next_norm: torch.Tensor) -> None:
        hidden, inner = self._buffers.hidden, self._buffers.inner
        parts, counters = self._parts, self._counters
        self._o.launch(
            self._buffers.mixed, layer.o, hidden.states,
            bias=layer.o_bias, hidden=hidden, next_norm=layer.post_norm, parts=parts, counters=counters,
        )  # fmt: skip
        self._gate_up.launch(
            hidden.scaled, layer.gate_up, inner,
            squares=hidden.squares, num_squares=self._o.num_groups, parts=parts, counters=counters,
        )  # fmt: skip
        self._down.launch(
            inner, layer.down, hidden.states, hidden=hidden, next_norm=next_norm, parts=parts, counters=counters
        )

    def _head(self) -> bool:
        hidden = self._buffers.hidden
        self._logits.launch(
            self._select(hidden.scaled), self._model.weights.head, self.logits,
            squares=self._select(hidden.squares, dim=1), num_squares=self._down.num_groups, peaks=self._head_peaks,
        )  # fmt: skip
        return self._head_peaks is not None

    def _select(self, states: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows to compute logits for."""
        return states

    @property
    def _head_peaks(self) -> torch.Tensor | None:
        """Where the head's product writes the peaks of its blocks; None if the top kernels use other blocks."""
        return self.peaks if block_size(self._model.config.vocab_size) == HEAD_BLOCK else None


class WidePass(Pass):
    """Many rows: the vendor's products, with small kernels between them. 8-bit weights are expanded first."""

    selects_rows = True
    rotates_separately = True

    def _prepare(self) -> tuple[int, int]:
        width, weights = self._model.config.hidden_size, self._model.weights
        self._wanted = weights.embed.new_zeros(self._shape.num_logits, width)
        self._room = self._workspace.matrix() if isinstance(weights.head, Quantized) else weights.embed.new_zeros(0)
        return 0, 0

    def _project(self, index: int, layer: LayerWeights) -> None:
        buffers = self._buffers
        self._norm(layer.input_norm)
        self._multiply(buffers.normed, self._dense(layer.qkv), layer.qkv_bias, buffers.qkv)

    def _finish(self, layer: LayerWeights, next_norm: torch.Tensor) -> None:
        buffers = self._buffers
        states = buffers.hidden.states
        states.addmm_(buffers.mixed, self._dense(layer.o).t())
        if layer.o_bias is not None:
            states.add_(layer.o_bias)
        self._norm(layer.post_norm)
        torch.mm(buffers.normed, self._dense(layer.gate_up).t(), out=buffers.gate_up)
        rows.gate_rows(buffers.gate_up, buffers.inner, pdl=False)
        states.addmm_(buffers.inner, self._dense(layer.down).t())

    def _head(self) -> bool:
        weights = self._model.weights
        self._norm(weights.norm)
        torch.index_select(self._buffers.normed, 0, self.inputs.wanted[: self._shape.num_logits], out=self._wanted)
        first = 0
        for block in row_blocks(weights.head, len(self._room) // self._model.config.hidden_size):
            head = self._dense(block)
            self._write_logits(self._wanted, head, self.logits[:, first : first + len(head)])
            first += len(head)
        return False

    def _dense(self, matrix: Matrix) -> torch.Tensor:
        """The matrix in the dtype of the rows. An expanded matrix is valid until the next one is expanded."""
        if isinstance(matrix, torch.Tensor):
            return matrix
        assert isinstance(matrix, Quantized)
        expanded = self._room[: matrix.values.numel()].view(matrix.values.shape)
        rows.expand(matrix.values, matrix.scales, expanded, pdl=False)
        return expanded

    @staticmethod
    def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    def _write_logits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``x [N, H]`` times ``weight [V, H]`` to ``out [N, V]`` float32."""
        if weight.is_cuda:
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.float().t(), out=out)

    def _norm(self, weight: torch.Tensor) -> None:
        buffers = self._buffers
        rows.norm_rows(buffers.hidden.states, weight, buffers.normed, self._model.config.norm_eps, pdl=False)


class ExactPass(NarrowPass):
    """Any number of rows. A row has the same bits in every pass: see ``products`` and ``attention/ordered.py``."""

    def _prepare(self) -> tuple[int, int]:
        self.selects_rows = self._shape.num_rows > MAX_ROWS
        demand = super()._prepare()
        if self.selects_rows:
            self._logits = self._logits.with_rows(max(self._shape.num_logits, 1))
        words, num_rows = self.inputs.words, self._shape.num_rows
        self._trees: rows.Ancestors | None = None
        if not self._shape.is_single:
            paths = self._workspace.paths(num_rows, words.shape[1] * WORD_BITS)
            self._trees = rows.Ancestors(words, self.inputs.afters, paths)
        return demand

    def _new_product(
        self, weight: Matrix, num_in: int, num_out: int, kind: Kind = Kind.PLAIN, **options: Any
    ) -> Product:
        return super()._new_product(weight, num_in, num_out, kind, exact=True, **options)

    def _choose_attention(self) -> int:
        self._ordered = choose_ordered_config(**self._attention_sizes(), capacity=self._model.cache.num_slots)
        return self._ordered.nodes_per_tile

    def _attention_scratch(self, num_tiles: int) -> tuple[int, int]:
        config = self._model.config
        return ordered_scratch_size(self._ordered, num_tiles, config.num_kv_heads, config.head_dim)

    def _ancestors(self) -> rows.Ancestors | None:
        return self._trees

    def _launch_attention(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        model, buffers, inputs, trees = self._model, self._buffers, self.inputs, self._trees
        ordered_attention(
            buffers.qkv, keys, values, inputs.tiles, None if trees is None else trees.paths, inputs.positions,
            buffers.mixed, self._parts, self._counters,
            config=self._ordered, window=model.config.sliding_window or 0, pdl=model.pdl,
        )  # fmt: skip

    def _select(self, states: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if not self.selects_rows:
            return states
        return torch.index_select(states, dim, self.inputs.wanted[: self._shape.num_logits])


def new_pass(model: Model, shape: Shape, workspace: Workspace) -> Pass:
    if model.is_exact:
        return ExactPass(model, shape, workspace)
    kind = NarrowPass if shape.num_rows <= MAX_ROWS else WidePass
    return kind(model, shape, workspace)
