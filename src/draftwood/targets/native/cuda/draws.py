"""Sampled tokens, drawn right after a pass from its logits. The host prepares them while the pass runs.

They are not part of captured graphs: greedy passes do not pay for them, and one graph serves both.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from draftwood.targets.native.cuda.kernels import DrawScratch, launch_draws
from draftwood.targets.native.cuda.passes import Pass
from draftwood.targets.native.decoder import DRAW_FIELDS, PackedBatch

FIRST_SIZE = 64  # draws that memory is allocated for at first


class Draws:
    """Draws for the passes of one lane, of which one is in flight at a time."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._allocate(FIRST_SIZE)

    def launch(self, work: Pass, batch: PackedBatch) -> DrawnTokens:
        """Launch the draws that the batch asks for, to run after its pass. Does not wait."""
        fields, outputs = batch.list_draws(is_selected=work.selects_rows)
        size = len(outputs)
        if size > len(self._tokens):
            self._allocate(1 << (size - 1).bit_length())
        self._host.numpy()[:size] = np.frombuffer(fields).reshape(size, DRAW_FIELDS)
        draws = self._draws[:size]
        if draws.device != self._host.device:
            draws.copy_(self._host[:size], non_blocking=True)
        launch_draws(work.logits, work.words, work.peaks, draws, self._scratch, self._tokens)
        answer = self._answer[:size]
        answer.copy_(self._tokens[:size], non_blocking=True)
        return DrawnTokens(answer.numpy(), np.frombuffer(outputs, np.int64), batch.num_wanted, self._tokens[:size])

    def _allocate(self, size: int) -> None:
        device, on_gpu = self._device, self._device.type == "cuda"
        self._host = torch.empty((size, DRAW_FIELDS), dtype=torch.float64, pin_memory=on_gpu)
        self._draws = torch.empty((size, DRAW_FIELDS), dtype=torch.float64, device=device) if on_gpu else self._host
        self._scratch = DrawScratch.new(size, self._vocab_size, device)
        self._tokens = torch.empty(size, dtype=torch.int32, device=device)
        self._answer = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)


class DrawnTokens:
    """The tokens of a pass, to be read when it has finished."""

    def __init__(
        self, tokens: npt.NDArray[np.int32], outputs: npt.NDArray[np.int64], num_outputs: int, on_device: torch.Tensor
    ) -> None:
        self._tokens, self._outputs, self._num_outputs = tokens, outputs, num_outputs
        self.on_device = on_device  # the same tokens

    def read(self) -> npt.NDArray[np.int32]:
        """[R] for all rows that the batch wants; only those that were asked for mean something."""
        found = np.zeros(self._num_outputs, np.int32)
        found[self._outputs] = self._tokens
        return found
