"""A recording: the texts of real runs with the target's top tokens at every context they visited, in one file.

It also holds the model facts that drafters need, so that a replay needs no model, and the number of cycles of each
recorded method, to validate replays. Log-probabilities are float32: drafters compare products of them, and float16
would reorder close candidates.
"""

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
from draftwood.disk import new_file, parse_json
from draftwood.errors import DraftwoodError
from draftwood.targets import TargetInfo

FORMAT, VERSION = "draftwood-recording", "1"
DEFAULT_WIDTH = 16  # top tokens stored per row

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """One text, and the rows on and off it."""

    task: str
    prompt: str  # the prompt's id within the task
    turn: int = 0
    sample: int = 0
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams
    finish_reason: str
    accepted_after_stop: tuple[int, ...] = ()  # accepted by the last cycle after the stop token
    rows: RowStore

    @property
    def group(self) -> tuple[str, str, int]:
        """Equal for the samples of one prompt."""
        return self.task, self.prompt, self.turn

    @cached_property
    def text(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids

    @property
    def max_tokens(self) -> int:
        """The effective limit of output tokens."""
        return len(self.output_ids) if self.finish_reason == "length" else self.params.max_tokens

    def check(self, vocab_size: int) -> None:
        """Raise if the request cannot be replayed: invalid tokens, or output positions without a row."""
        if not self.prompt_ids or not self.output_ids:
            raise ValueError(f"{self.prompt} has no prompt or no output")
        if not 0 <= min(self.text) <= max(self.text) < vocab_size:
            raise ValueError(f"{self.prompt} has tokens outside the vocabulary")
        for position in range(len(self.prompt_ids) - 1, len(self.text) - 1):
            if self.rows.find(ON_TEXT, position) is None:
                raise ValueError(f"{self.prompt} has no row at position {position}")


@dataclass(kw_only=True)
class Recording:
    """Recorded texts in order; the samples of a prompt are consecutive."""

    target: TargetInfo
    width: int = DEFAULT_WIDTH
    requests: list[RecordedRequest] = field(default_factory=list)
    methods: list[dict[str, Any]] = field(default_factory=list)  # BenchMethod.as_dict() with tokens, cycles, left_out
    num_left_out: int = 0  # outputs that differ from that of an earlier method

    def add(self, request: RecordedRequest) -> None:
        """Add a text, or rows to a known text. If outputs of a request differ, the first is kept."""
        key = (*request.group, request.sample)
        known = self._by_key.get(key)
        if known is None:
            self.requests.append(request)
            self._by_key[key] = request
        elif known.text == request.text:
            known.rows.merge(request.rows)
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
        return f"{text}, {self.num_left_out} differing outputs dropped" if self.num_left_out else text


def save_recording(path: Path, recording: Recording) -> None:
    if not recording.requests:
        raise DraftwoodError("Nothing was recorded", got=str(path))
    rows = [request.rows.arrays() for request in recording.requests]
    arrays: Arrays = {
        "tokens": np.concatenate([np.array(request.text, np.int32) for request in recording.requests]),
        **{name: np.concatenate([getattr(part, name) for part in rows]) for name in RowArrays._fields},
    }
    about = {
        "target": _describe_target(recording.target),
        "methods": recording.methods,
        "num_left_out": recording.num_left_out,
        "requests": [_describe_request(request) for request in recording.requests],
    }
    metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about, ensure_ascii=False)}
    with new_file(path) as temporary:
        save_file(arrays, temporary, metadata)


def load_recording(path: str | Path) -> Recording:
    """Load a recording; raises for other files, other versions and damaged files."""
    if Path(path).is_dir():
        raise DraftwoodError(f"{path} cannot be read as a recording", got="a folder", allowed="a file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_kind(path, metadata)
            about = parse_json(metadata["about"])
            arrays = {name: file.get_tensor(name) for name in ("tokens", *RowArrays._fields)}
        recording = _build(about, arrays)
    except (SafetensorError, OSError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise DraftwoodError(
            f"{path} cannot be read as a recording",
            got=error,
            next_step="Give a file written by `draftwood bench record`, or record it again.",
        ) from error
    if not recording.requests:
        raise DraftwoodError(f"{path} is an empty recording", next_step="Record some prompts.")
    return recording


def _check_kind(path: str | Path, metadata: Mapping[str, str]) -> None:
    for what, name, wanted in (("is not a recording", "format", FORMAT), ("has another version", "version", VERSION)):
        if metadata.get(name) != wanted:
            raise DraftwoodError(
                f"{path} {what}",
                got=metadata.get(name),
                allowed=wanted,
                next_step="Record the runs again: draftwood bench record.",
            )


def _describe_target(info: TargetInfo) -> dict[str, Any]:
    return {**asdict(info), "dtype": str(info.dtype).removeprefix("torch."), "device": str(info.device)}


def _restore_target(facts: Mapping[str, Any]) -> TargetInfo:
    """Rebuild the model facts; replays run on the CPU, whatever device was recorded."""
    return TargetInfo(
        **{
            **facts,
            "dtype": getattr(torch, facts["dtype"]),
            "device": torch.device("cpu"),
            "eos_token_ids": tuple(facts["eos_token_ids"]),
            "pass_sizes": tuple(facts.get("pass_sizes", ())),
        }
    )


def _describe_request(request: RecordedRequest) -> dict[str, Any]:
    return {
        "task": request.task,
        "prompt": request.prompt,
        "turn": request.turn,
        "sample": request.sample,
        "finish_reason": request.finish_reason,
        "behind": request.accepted_after_stop,  # the name in files of version 1
        "params": asdict(request.params),
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": len(request.output_ids),
        "rows": len(request.rows),
    }


def _build(about: Mapping[str, Any], arrays: Arrays) -> Recording:
    target = _restore_target(about["target"])
    ids, parents = arrays["ids"], arrays["parents"]
    if not ((ids >= 0) & (ids < target.vocab_size)).all() or not np.isfinite(arrays["logprobs"]).all():
        raise ValueError("the rows contain tokens outside the vocabulary, or values that are not finite")
    recording = Recording(
        target=target, width=ids.shape[1], methods=about["methods"], num_left_out=about["num_left_out"]
    )
    token = row = 0
    for entry in about["requests"]:
        start, middle = token, token + entry.pop("prompt_tokens")
        token = middle + entry.pop("output_tokens")
        first, row = row, row + entry.pop("rows")
        after_stop = tuple(entry.pop("behind", ()))
        if row > len(ids) or token > len(arrays["tokens"]):
            raise ValueError("it is truncated")
        if not (parents[first:row] < np.arange(row - first)).all() or (parents[first:row] < ON_TEXT).any():
            raise ValueError("a context comes before its parent")
        request = RecordedRequest(
            **{**entry, "params": SamplingParams(**entry["params"])},
            accepted_after_stop=after_stop,
            prompt_ids=tuple(arrays["tokens"][start:middle].tolist()),
            output_ids=tuple(arrays["tokens"][middle:token].tolist()),
            rows=RowStore.of(RowArrays(*(arrays[name][first:row] for name in RowArrays._fields))),
        )
        request.check(target.vocab_size)
        recording.requests.append(request)
    return recording
