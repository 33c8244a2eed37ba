"""Hidden states of the target stored on disk, so that later epochs do not run it again.

    FOLDER/states.bin     one row per token: the taps that the head reads, then the last hidden state
    FOLDER/index.json     model and dtype, and the first row of each text; written last, so it marks a complete folder

Texts are found by a hash of their tokens. Missing ones are computed.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwood.disk import new_file, parse_json
from draftwood.errors import DraftwoodError, OptionError
from draftwood.heads import identify_target
from draftwood.progress import Progress, report
from draftwood.train.base import Batch, Example, Signals
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.frozen.memory import free_bytes

_STORED_TYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16}  # numpy has no bfloat16


class StoredSignals:
    """Like ``FrozenTarget.signals``, from disk if the text is stored."""

    def __init__(self, frozen: FrozenTarget, folder: Path, taps: Sequence[int]) -> None:
        """``taps``: the hidden states that the head reads, the same as those of ``frozen``."""
        info = frozen.target.info
        self._frozen = frozen
        self._folder = folder
        self._num_taps = len(taps)
        self._width = info.hidden_size
        self._dtype = info.dtype
        # The name too: nothing else distinguishes different quantisations of one model.
        model = {"model": identify_target(frozen.target), "name": info.name}
        self._identity = {**model, "taps": list(taps), "dtype": str(info.dtype)}
        self._starts: dict[str, int] = {}
        self._states: npt.NDArray[Any] | None = None

    @property
    def row_size(self) -> int:
        return (self._num_taps + 1) * self._width

    def num_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.row_size * self._dtype.itemsize

    def fill(self, batches: Sequence[Sequence[Example]], device: torch.device, progress: Progress | None) -> None:
        """Compute and store the states of all texts, unless they are stored already."""
        if self._is_stored(batches):
            return
        num_tokens = sum(len(example.token_ids) for examples in batches for example in examples)
        self._check_space(self.num_bytes(num_tokens))
        starts: dict[str, int] = {}
        row = 0
        with new_file(self._folder / "states.bin") as path, path.open("wb") as file:
            (self._folder / "index.json").unlink(missing_ok=True)
            for number, examples in enumerate(batches):
                report(progress, "hidden states of the target", number, len(batches))
                for example, states in zip(examples, self._compute(examples, device), strict=True):
                    starts[_digest(example.token_ids)] = row
                    row += len(states)
                    file.write(states.tobytes())
        report(progress, "hidden states of the target", len(batches), len(batches))
        with new_file(self._folder / "index.json") as path:
            path.write_text(json.dumps({"of": self._identity, "rows": row, "starts": starts}), encoding="utf-8")

    def open(self) -> None:
        """Read the index. Every process calls it after ``fill``."""
        index = self._read_index()
        if index is None:
            raise DraftwoodError(f"{self._folder} has no hidden states")
        self._starts = index["starts"]
        shape = (index["rows"], self.row_size)
        self._states = np.memmap(self._folder / "states.bin", dtype=_STORED_TYPES[self._dtype], mode="r", shape=shape)

    def signals(self, batch: Batch) -> Signals:
        assert self._states is not None
        lengths = batch.lengths.tolist()
        texts = [ids[:n].to("cpu", torch.int32).numpy() for ids, n in zip(batch.token_ids, lengths, strict=True)]
        places = [self._starts.get(_digest(text)) for text in texts]
        if any(place is None for place in places):
            return self._frozen.signals(batch)
        states = torch.zeros(*batch.token_ids.shape, self.row_size, dtype=self._dtype)
        for row, place, length in zip(states, places, lengths, strict=True):
            assert place is not None
            stored = torch.from_numpy(np.array(self._states[place : place + length]))
            row[:length] = stored.view(self._dtype)
        states = states.to(batch.token_ids.device)
        return Signals(states[..., : -self._width], states[..., -self._width :])

    def _compute(self, examples: Sequence[Example], device: torch.device) -> Iterable[npt.NDArray[Any]]:
        """Compute the rows of each text in their stored type."""
        signals = self._frozen.signals(Batch.of(examples, device))
        joined = torch.cat([signals.taps, signals.hidden], dim=-1).cpu()
        for states, example in zip(joined, examples, strict=True):
            yield _to_stored_type(states[: len(example.token_ids)].contiguous())

    def _is_stored(self, batches: Sequence[Sequence[Example]]) -> bool:
        index = self._read_index()
        if index is None:
            return False
        return all(_digest(example.token_ids) in index["starts"] for examples in batches for example in examples)

    def _read_index(self) -> dict[str, Any] | None:
        path = self._folder / "index.json"
        try:
            if not path.is_file():
                return None
            index: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
            of, wanted, starts = index["of"], self.num_bytes(int(index["rows"])), dict(index["starts"])
            stored = (self._folder / "states.bin").stat().st_size
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._make_read_error(f"{type(error).__name__}: {error}") from error
        if of != self._identity:
            raise OptionError(
                f"The hidden states in {self._folder} belong to another model or dtype",
                got=json.dumps(of),
                allowed=json.dumps(self._identity),
                next_step="Set run.cache_signals to another folder, or remove this one.",
            )
        if stored != wanted:
            raise self._make_read_error(f"states.bin has {stored:,} bytes instead of {wanted:,}")
        return {"rows": int(index["rows"]), "starts": starts}

    def _make_read_error(self, found: str) -> DraftwoodError:
        return DraftwoodError(
            f"The hidden states in {self._folder} cannot be read",
            got=found,
            next_step="Remove the folder to compute them again, or set run.cache_signals to another one.",
        )

    def _check_space(self, needed: int) -> None:
        free = free_bytes(self._folder)
        if free < needed:
            raise DraftwoodError(
                "The disk is too full for the hidden states of the target",
                got=f"{free:,} bytes free in {self._folder}",
                allowed=f"at least {needed:,} bytes",
                next_step="Remove run.cache_signals to compute them when they are needed.",
            )


def _to_stored_type(states: Tensor) -> npt.NDArray[Any]:
    kept = states.view(torch.int16) if states.dtype == torch.bfloat16 else states
    bits: npt.NDArray[Any] = kept.numpy()
    return bits


def _digest(token_ids: npt.NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).hexdigest()
