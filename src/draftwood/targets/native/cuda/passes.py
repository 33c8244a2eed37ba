"""One pass of a fixed shape through the model: all it launches, in order, over memory that stays where it is.

*Narrow* passes (up to 64 rows: trees, short chunks) are bound by the weights' way from memory; five kernels make a
layer. *Wide* ones (prompts, large batches) take their products from the vendor's library. Both end with the
best entries of every row of logits, which travel to the host in one copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from draftwood.models import ModelConfig
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.attention import choose, most_tiles, scratch_size, tree_attention
from draftwood.targets.native.cuda.inputs import Inputs
from draftwood.targets.native.cuda.kernels import block_size, launch_top_rows, new_scratch, new_words, rows
from draftwood.targets.native.cuda.products import HEAD_BLOCK, MOST_ROWS, Gpu, Heads, Kind, Product, Rotation, Turned
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.quantize import Matrix, Quantized, row_blocks, storage_of
from draftwood.targets.native.weights import LayerWeights, Weights
from draftwood.targets.toprows import TopRows


class Model(NamedTuple):
    """What all passes of a target share."""

    config: ModelConfig
    weights: Weights
    cache: KVCache
    rotation: tuple[torch.Tensor, torch.Tensor]  # cosines and sines [positions, D / 2]
    gpu: Gpu
    overlap: bool  # whether kernels may start while the one before them ends


class Shape(NamedTuple):
    """What a pass is made for: upper bounds for what it is used for."""

    num_rows: int
    num_sequences: int
    num_logits: int  # rows whose logits are computed: all of them or none, in a narrow pass
    num_best: int  # entries found of each of these rows, 1 or more
    taps: tuple[int, ...] = ()
    lane: int = 0  # passes of different lanes may be under way at once: they have their own inputs and answers


class Pass(ABC):
    """``inputs`` is filled, ``launch`` runs it all (a graph may have captured it), then ``best`` is the answer."""

    selects_rows: bool  # whether there are logits of the wanted rows alone
    turns_apart: bool  # whether a kernel of its own turns queries and keys

    def __init__(self, model: Model, shape: Shape, workspace: Workspace) -> None:
        config = model.config
        embed = model.weights.embed
        self._model = model
        self._shape = shape
        self._workspace = workspace
        self._buffers = workspace.buffers(shape.num_rows)
        self._attention = choose(
            num_nodes=shape.num_rows,
            num_sequences=shape.num_sequences,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_processors=model.gpu.num_processors,
            shared_bytes=model.gpu.shared_bytes,
        )
        per_tile = self._attention.nodes_per_tile
        num_tiles = most_tiles(shape.num_rows, shape.num_sequences, per_tile)
        self.inputs = Inputs(shape.num_rows, num_tiles, per_tile, embed.device, config.sliding_window or 0)
        floats, counters = scratch_size(self._attention, num_tiles, config.num_kv_heads, config.head_dim)
        more_floats, more_counters = self._prepare()
        self._parts, self._counters = workspace.scratch(max(floats, more_floats), max(counters, more_counters))
        self.taps: torch.Tensor | None = None  # [N, T*H]
        if shape.taps:
            self.taps = embed.new_zeros(shape.num_rows, len(shape.taps) * config.hidden_size)
        self.logits = workspace.logits(shape.num_logits, shape.lane)  # [R, V] float32
        self._words = new_words(shape.num_logits, shape.num_best, embed.device)
        self._peaks = new_scratch(shape.num_logits, config.vocab_size, embed.device)
        self._answer = torch.zeros(self._words.shape, dtype=torch.int32, pin_memory=embed.is_cuda)

    def launch(self) -> None:
        """Everything, from the inputs on the host to the answer there. Does not wait for it."""
        weights, cache, overlap = self._model.weights, self._model.cache, self._model.overlap
        norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        self.inputs.send()
        rows.move_rows(cache.keys, cache.values, self.inputs.moves, pdl=False)  # follows a copy
        rows.embed(self.inputs.ids, weights.embed, norms[0], self._buffers.hidden, pdl=overlap)
        for index, layer in enumerate(weights.layers):
            self._tap(index)
            self._project(index, layer)
            self._attend(index, layer)
            self._finish(layer, norms[index + 1])
        self._tap(len(weights.layers))
        if self._shape.num_logits:
            peaks_known = self._head()
            launch_top_rows(
                self.logits, self._shape.num_best, self._words, self._peaks, peaks_known=peaks_known, pdl=overlap
            )
            self._answer.copy_(self._words, non_blocking=True)

    def best(self) -> TopRows:
        """The best entries of the rows of logits. The pass must have ended; the arrays are its own."""
        words, k = self._answer.numpy(), self._shape.num_best
        return TopRows(words[:, :k], words[:, k : 2 * k].view(np.float32), words[:, 2 * k].view(np.float32))

    @abstractmethod
    def _prepare(self) -> tuple[int, int]:
        """Settles what is the same in every launch; float32 values and counters of scratch that its kernels need."""

    @abstractmethod
    def _project(self, index: int, layer: LayerWeights) -> None:
        """Hidden states, normed, to queries, keys and values."""

    @abstractmethod
    def _finish(self, layer: LayerWeights, next_norm: torch.Tensor) -> None:
        """What attention mixed back into the hidden states, and the feed-forward part."""

    @abstractmethod
    def _head(self) -> bool:
        """Hidden states, normed, to logits; says whether it has noted their peaks."""

    def _attend(self, index: int, layer: LayerWeights) -> None:
        model, config, buffers, inputs = self._model, self._model.config, self._buffers, self.inputs
        keys, values = model.cache.keys[index], model.cache.values[index]
        if self.turns_apart:
            rows.rotate_and_store(
                buffers.qkv, self._turned(index, layer), num_heads=config.num_heads, pdl=model.overlap
            )
        tree_attention(
            buffers.qkv, keys, values, inputs.tiles, inputs.words, inputs.positions, buffers.mixed,
            self._parts, self._counters,
            config=self._attention, window=config.sliding_window or 0, pdl=model.overlap,
        )  # fmt: skip

    def _turned(self, index: int, layer: LayerWeights) -> Turned:
        """How the queries and keys of a layer turn, and where its keys and values go."""
        model, inputs = self._model, self.inputs
        rotation = Rotation(*model.rotation, layer.q_norm, layer.k_norm, model.config.norm_eps)
        return Turned(rotation, inputs.positions, inputs.slots, model.cache.keys[index], model.cache.values[index])

    def _tap(self, layer: int) -> None:
        """Hidden states that somebody asked for, before they change."""
        for place, tapped in enumerate(self._shape.taps):
            if tapped == layer and self.taps is not None:
                width = self._model.config.hidden_size
                self.taps[:, place * width : (place + 1) * width].copy_(self._buffers.hidden.states)


class NarrowPass(Pass):
    """A few rows: the norms, the gates and the residuals are inside our own products."""

    selects_rows = False

    def _prepare(self) -> tuple[int, int]:
        config, shape, weights = self._model.config, self._shape, self._model.weights
        width, inner = config.hidden_size, config.intermediate_size
        weight_bytes = storage_of(weights.head)[0].itemsize

        def product(num_in: int, num_out: int, kind: Kind = Kind.PLAIN, heads: Heads | None = None) -> Product:
            return Product(
                num_in, num_out, shape.num_rows, self._model.gpu, kind, heads=heads,
                dtype=weights.embed.dtype, weight_bytes=weight_bytes, eps=config.norm_eps, pdl=self._model.overlap,
            )  # fmt: skip

        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.qk_norm)
        self._heads = heads if heads.can_turn else None
        self.turns_apart = self._heads is None
        self._qkv = product(width, config.q_size + 2 * config.kv_size, heads=self._heads)
        self._o = product(config.q_size, width)
        self._gate_up = product(width, inner, Kind.GATED)
        self._down = product(inner, width)
        self._logits = product(width, config.vocab_size, Kind.HEAD)
        demands = [kind.scratch for kind in (self._qkv, self._o, self._gate_up, self._down, self._logits)]
        return max(floats for floats, _ in demands), max(counters for _, counters in demands)

    def _project(self, index: int, layer: LayerWeights) -> None:
        hidden = self._buffers.hidden
        self._qkv.launch(
            hidden.scaled, layer.qkv, self._buffers.qkv,
            squares=hidden.squares, num_squares=self._down.num_blocks if index else 1,  # one behind the embedding
            bias=layer.qkv_bias, turned=self._turned(index, layer) if self._heads else None,
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
            squares=hidden.squares, num_squares=self._o.num_blocks, parts=parts, counters=counters,
        )  # fmt: skip
        self._down.launch(
            inner, layer.down, hidden.states, hidden=hidden, next_norm=next_norm, parts=parts, counters=counters
        )

    def _head(self) -> bool:
        hidden = self._buffers.hidden
        notes = block_size(self._model.config.vocab_size) == HEAD_BLOCK
        self._logits.launch(
            hidden.scaled, self._model.weights.head, self.logits,
            squares=hidden.squares, num_squares=self._down.num_blocks, peaks=self._peaks if notes else None,
        )  # fmt: skip
        return notes


class WidePass(Pass):
    """Many rows: the vendor's products, with small kernels between them. Weights of 8 bits are expanded before."""

    selects_rows = True
    turns_apart = True

    def _prepare(self) -> tuple[int, int]:
        width, weights = self._model.config.hidden_size, self._model.weights
        self._wanted = weights.embed.new_zeros(self._shape.num_logits, width)
        self._room = self._workspace.matrix() if isinstance(weights.head, Quantized) else weights.embed.new_zeros(0)
        return 0, 0

    def _project(self, index: int, layer: LayerWeights) -> None:
        buffers = self._buffers
        self._norm(layer.input_norm)
        if layer.qkv_bias is None:
            torch.mm(buffers.normed, self._dense(layer.qkv).t(), out=buffers.qkv)
        else:
            torch.addmm(layer.qkv_bias, buffers.normed, self._dense(layer.qkv).t(), out=buffers.qkv)

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
            logits = self.logits[:, first : first + len(head)]
            first += len(head)
            if head.is_cuda:
                torch.mm(self._wanted, head.t(), out_dtype=torch.float32, out=logits)
            else:
                torch.mm(self._wanted.float(), head.float().t(), out=logits)
        return False

    def _dense(self, matrix: Matrix) -> torch.Tensor:
        """In the type of the rows. What had to be expanded is there until the next one is."""
        if isinstance(matrix, torch.Tensor):
            return matrix
        expanded = self._room[: matrix.values.numel()].view(matrix.values.shape)
        rows.expand(matrix.values, matrix.scales, expanded, pdl=False)
        return expanded

    def _norm(self, weight: torch.Tensor) -> None:
        buffers = self._buffers
        rows.norm_rows(buffers.hidden.states, weight, buffers.normed, self._model.config.norm_eps, pdl=False)


def new_pass(model: Model, shape: Shape, workspace: Workspace) -> Pass:
    kind = NarrowPass if shape.num_rows <= MOST_ROWS else WidePass
    return kind(model, shape, workspace)
