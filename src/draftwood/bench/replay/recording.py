"""A recording: the texts of real runs with what the target said at every context they visited, in one file.

It also holds the facts about the model that drafters are built from, so that replaying needs no model, and how many
cycles each recorded method took, so that a replay of the same method can be held against it. Log-probabilities are
kept in single precision: drafters compare products of them, and half precision would reorder close guesses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftwood.bench.replay.rows import ON_TEXT, RowArrays, RowStore
from draftwood.config import SamplingParams
from draftwood.disk import new_file
from draftwood.errors import DraftwoodError
from draftwood.targets import TargetInfo

FORMAT, VERSION = "draftwood-recording", "1"
DEFAULT_WIDTH = 16  # tokens kept of each row

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """One text, and the rows along it and beside it."""

    task: str
    prompt: str  # the prompt's id within the task
    turn: int = 0
    sample: int = 0
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams
    finish_reason: str
    behind: tuple[int, ...] = ()  # tokens that the last cycle accepted too, behind the one that ended the text
    rows: RowStore

    @property
    def group(self) -> tuple[str, str, int]:
        """The same for the samples of one prompt."""
        return self.task, self.prompt, self.turn

    @cached_property
    def text(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids

    @property
    def max_tokens(self) -> int:
        """How many tokens the engine let it have, as far as that mattered."""
        return len(self.output_ids) if self.finish_reason == "length" else self.params.max_tokens

    def check(self, vocab_size: int) -> None:
        """Refuses what cannot be replayed: tokens the model does not have, places of the output without a row."""
        if not self.prompt_ids or not self.output_ids:
            raise ValueError(f"{self.prompt} has no prompt or no output")
        if not 0 <= min(self.text) <= max(self.text) < vocab_size:
            raise ValueError(f"{self.prompt} has tokens that the model does not have")
        for position in range(len(self.prompt_ids) - 1, len(self.text) - 1):
            if self.rows.find(ON_TEXT, position) is None:
                raise ValueError(f"{self.prompt} has no row at position {position}")


@dataclass(kw_only=True)
class Recording:
    """Texts in the order they were recorded; of one prompt the samples one after another."""

    target: TargetInfo
    width: int = DEFAULT_WIDTH
    requests: list[RecordedRequest] = field(default_factory=list)
    methods: list[dict[str, Any]] = field(default_factory=list)  # BenchMethod.as_dict() with tokens, cycles, left_out
    num_left_out: int = 0  # texts that another method told otherwise

    def add(self, request: RecordedRequest) -> None:
        """A new text, or more rows for one that is there. Of two different outputs of one request the first stays."""
        key = (*request.group, request.sample)
        known = self._by_key.get(key)
        if known is None:
            self.requests.append(request)
            self._by_key[key] = request
        elif known.text == request.text:
            known.rows.unite(request.rows)
        else:
            self.num_left_out += 1

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int, int], RecordedRequest]:
        return {(*request.group, request.sample): request for request in self.requests}

    @property
    def num_rows(self) -> int:
        return sum(len(request.rows) for request in self.requests)

    def summary(self) -> str:
        text = f"{len(self.requests)} texts, {self.num_rows} rows"
        return f"{text}, {self.num_left_out} other outputs left out" if self.num_left_out else text


def save_recording(path: Path, recording: Recording) -> None:
    if not recording.requests:
        raise DraftwoodError("Nothing was recorded, so there is nothing to save", got=str(path))
    rows = [request.rows.arrays() for request in recording.requests]
    arrays: Arrays = {
        "tokens": np.concatenate([np.array(request.text, np.int32) for request in recording.requests]),
        **{name: np.concatenate([getattr(part, name) for part in rows]) for name in RowArrays._fields},
    }
    about = {
        "target": _facts(recording.target),
        "methods": recording.methods,
        "num_left_out": recording.num_left_out,
        "requests": [_entry(request) for request in recording.requests],
    }
    metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about, ensure_ascii=False)}
    with new_file(path) as temporary:
        save_file(arrays, temporary, metadata)


def load_recording(path: str | Path) -> Recording:
    """Refuses what is no recording, one of another version, and a damaged one."""
    if Path(path).is_dir():
        raise DraftwoodError(f"{path} cannot be read as a recording", got="a folder", allowed="a file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_kind(path, metadata)
            about = json.loads(metadata["about"])
            arrays = {name: file.get_tensor(name) for name in ("tokens", *RowArrays._fields)}
        recording = _built(about, arrays)
    except (SafetensorError, OSError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise DraftwoodError(
            f"{path} cannot be read as a recording",
            got=error,
            next_step="Name a file that `draftwood bench record` wrote, or record it again.",
        ) from error
    if not recording.requests:
        raise DraftwoodError(f"{path} is an empty recording", next_step="Record some prompts.")
    return recording


def _check_kind(path: str | Path, metadata: Mapping[str, str]) -> None:
    for what, name, wanted in (("is no recording", "format", FORMAT), ("has another version", "version", VERSION)):
        if metadata.get(name) != wanted:
            raise DraftwoodError(
                f"{path} {what}",
                got=metadata.get(name),
                allowed=wanted,
                next_step="Record the runs again: draftwood bench record.",
            )


def _facts(info: TargetInfo) -> dict[str, Any]:
    return {**asdict(info), "dtype": str(info.dtype).removeprefix("torch."), "device": str(info.device)}


def _target(facts: Mapping[str, Any]) -> TargetInfo:
    """The model's facts as drafters saw them; they replay on the CPU, wherever it ran."""
    return TargetInfo(
        **{
            **facts,
            "dtype": getattr(torch, facts["dtype"]),
            "device": torch.device("cpu"),
            "eos_token_ids": tuple(facts["eos_token_ids"]),
            "pass_sizes": tuple(facts.get("pass_sizes", ())),
        }
    )


def _entry(request: RecordedRequest) -> dict[str, Any]:
    return {
        "task": request.task,
        "prompt": request.prompt,
        "turn": request.turn,
        "sample": request.sample,
        "finish_reason": request.finish_reason,
        "behind": request.behind,
        "params": asdict(request.params),
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": len(request.output_ids),
        "rows": len(request.rows),
    }


def _built(about: Mapping[str, Any], arrays: Arrays) -> Recording:
    target = _target(about["target"])
    ids, parents = arrays["ids"], arrays["parents"]
    if not ((ids >= 0) & (ids < target.vocab_size)).all() or not np.isfinite(arrays["logprobs"]).all():
        raise ValueError("the rows hold tokens that the model does not have, or no numbers")
    recording = Recording(
        target=target, width=ids.shape[1], methods=about["methods"], num_left_out=about["num_left_out"]
    )
    token = row = 0
    for entry in about["requests"]:
        start, middle = token, token + entry.pop("prompt_tokens")
        token = middle + entry.pop("output_tokens")
        first, row = row, row + entry.pop("rows")
        if row > len(ids) or token > len(arrays["tokens"]):
            raise ValueError("it is cut short")
        if not (parents[first:row] < np.arange(row - first)).all() or (parents[first:row] < ON_TEXT).any():
            raise ValueError("a context comes before its parent")
        request = RecordedRequest(
            **{**entry, "params": SamplingParams(**entry["params"]), "behind": tuple(entry.get("behind", ()))},
            prompt_ids=tuple(arrays["tokens"][start:middle].tolist()),
            output_ids=tuple(arrays["tokens"][middle:token].tolist()),
            rows=RowStore.of(RowArrays(*(arrays[name][first:row] for name in RowArrays._fields))),
        )
        request.check(target.vocab_size)
        recording.requests.append(request)
    return recording
