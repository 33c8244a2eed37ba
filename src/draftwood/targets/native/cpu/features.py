"""A draft head as one C call per pass: a small decoder whose rows are a token and a feature.

The output matrix of a large vocabulary has more weights than the rest of a head. So a head drafts from a *shortlist*:
the first ids, since vocabularies made by merging begin with frequent tokens, and tokens of the texts that it has read.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from draftwood.models import ModelConfig, StoredTensor
from draftwood.targets.base import ForwardOutput
from draftwood.targets.cache import KVCache
from draftwood.targets.native.block_formats import choose_format, quantize_rows
from draftwood.targets.native.cpu.decoder import CpuDecoder
from draftwood.targets.native.cpu.packing import Packer
from draftwood.targets.native.cpu.records import Matrix as MatrixRecord
from draftwood.targets.native.decoder import PackedBatch
from draftwood.targets.native.quantize import Matrix, Stored
from draftwood.targets.native.weights import Weights

FORMAT = "q4_1"  # of the layers, half the bytes of q8_0: passes read all weights. Output matrices are in 8 bits.
FREQUENT, SEEN = 8192, 1024  # tokens of a shortlist: first ids, and others that occurred lately
PACKED_ROWS = 64  # packed together; a multiple of the groups of every kernel
FUSED_STEP = 64  # hidden states that features are made of are read in steps of this many


class CpuFeatureDecoder(CpuDecoder):
    """The first layer reads normed tokens beside normed features; the feature is its residual."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        *,
        feature_norm: torch.Tensor,
        norm_before_residual: bool,
        fuse: tuple[torch.Tensor, torch.Tensor | None] | None = None,
        has_shortlist: bool = False,
    ) -> None:
        """Quantises the matrices. ``weights.layers[0].qkv`` has 2H inputs, ``weights.embed`` any number of
        rows. ``norm_before_residual``: the residual is the normed feature. ``fuse``: matrix and bias that make features
        of hidden states. ``has_shortlist``: predict tokens of a shortlist, if the vocabulary is larger."""
        for layer in weights.layers:
            layer.qkv, layer.o = quantized(layer.qkv), quantized(layer.o)
            layer.gate_up, layer.down = quantized(layer.gate_up), quantized(layer.down)
        self.shortlist: Shortlist | None = None
        whole = weights.head
        assert isinstance(whole, torch.Tensor)
        is_short = has_shortlist and config.vocab_size > FREQUENT + SEEN
        if is_short:
            weights.head = torch.cat([whole[:FREQUENT], whole.new_zeros(SEEN, whole.shape[1])])
            config = replace(config, vocab_size=FREQUENT + SEEN)
        weights.head = quantized(weights.head, is_table=True)
        super().__init__(config, weights, cache)
        self._model.feature_norm = self._pad_vector(feature_norm)
        self._model.norm_before_residual = int(norm_before_residual)
        self.can_fuse = fuse is not None and fuse[0].shape[1] % FUSED_STEP == 0
        if fuse is not None and self.can_fuse:
            matrix = quantized(fuse[0])
            self._fuse_packer = Packer(
                self._kernel, Weights(weights.embed, [], weights.norm, matrix, True), self._dtype
            )
            self._model.fuse, self._model.fuse_bias = self._fuse_packer.pack(matrix), self._pad_vector(fuse[1])
        if is_short:
            self.shortlist = Shortlist(self._kernel, self._model.head, whole)
            self._model.vocab = self._model.head.outputs = FREQUENT

    @property
    def vocab_size(self) -> int:
        """Tokens that it predicts at the moment."""
        return int(self._model.vocab)

    def run(
        self, batch: PackedBatch, features: torch.Tensor | None, given: torch.Tensor | None = None
    ) -> ForwardOutput:
        """Returns logits ``[R, V]`` of the requested rows, and the states ``[N, H]`` after the last layer as taps; both
        are float32, and the next pass overwrites the logits. ``features [N, H]``, or ``given``: what they are made of.
        """
        prepared = [None if part is None else part.float().contiguous() for part in (features, given)]
        return self._run(batch, (self._config.num_layers,), *prepared)

    def note_text(self, token_ids: Iterable[int]) -> None:
        """Adds tokens of a text to the shortlist, if there is one."""
        if self.shortlist is not None and self.shortlist.add(token_ids):
            self._model.vocab = self._model.head.outputs = self.shortlist.size
            self._views.clear()


class Shortlist:
    """The tokens of the rows of an output matrix; the last rows belong to tokens that occurred lately."""

    def __init__(self, kernel: ctypes.CDLL, matrix: MatrixRecord, weight: torch.Tensor) -> None:
        """``matrix``: packed, with room for all; ``weight [V, H]``: the rows of all tokens."""
        self.ids = np.arange(FREQUENT + SEEN, dtype=np.int32)
        self.ids[FREQUENT:] = -1
        self.size = FREQUENT
        self._places: dict[int, int] = {}  # of tokens that occurred
        self._next = 0
        self._weight = weight
        self._format = choose_format(FORMAT, weight.shape[1], is_table=True)
        self._rows = quantize_rows(weight.new_zeros(SEEN, weight.shape[1]), self._format).numpy()
        self._kernel, self._matrix = kernel, matrix

    def add(self, token_ids: Iterable[int]) -> bool:
        """Adds tokens that are not there, in place of the oldest ones; False if all are there."""
        new = [token for token in dict.fromkeys(token_ids) if token >= FREQUENT and token not in self._places][-SEEN:]
        if not new:
            return False
        places = [(self._next + count) % SEEN for count in range(len(new))]
        for place, token in zip(places, new, strict=True):
            if self.ids[FREQUENT + place] in self._places:
                del self._places[int(self.ids[FREQUENT + place])]
            self._places[token], self.ids[FREQUENT + place] = place, token
        self._rows[places] = quantize_rows(self._weight[new], self._format).numpy()
        for first in sorted({place // PACKED_ROWS * PACKED_ROWS for place in places}):
            self._pack(first, min(PACKED_ROWS, SEEN - first))
        self._next = (places[-1] + 1) % SEEN
        self.size = FREQUENT + len(self._places)
        return True

    def _pack(self, first: int, count: int) -> None:
        """Packs rows of tokens that occurred, a few at a time: this is done while a request waits."""

        def part(data: int | None, rows: int) -> MatrixRecord:
            return MatrixRecord(data, rows, self._matrix.inputs, 0, self._matrix.format)

        start = int(self._kernel.draftwood_packed_bytes(ctypes.byref(part(None, FREQUENT + first))))
        packed = part(self._matrix.data + start, count)
        self._kernel.draftwood_pack(ctypes.byref(packed), self._rows[first:].ctypes.data, 1)


def quantized(weight: Matrix, *, is_table: bool = False) -> Stored:
    """The rows as if a file had them; 4 bits where blocks fill the rows, 8 bits for an output matrix."""
    assert isinstance(weight, torch.Tensor)
    kind = choose_format(FORMAT, weight.shape[1], is_table=is_table)
    shape = (weight.shape[0], weight.shape[1])
    return Stored((StoredTensor(kind, shape, partial(_blocks, weight, kind), partial(_floats, weight)),))


def _blocks(weight: torch.Tensor, kind: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return quantize_rows(weight, kind).numpy()


def _floats(weight: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return weight.float().numpy()
