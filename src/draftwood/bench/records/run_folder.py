"""What a benchmark writes down: one line of JSON a request, and one manifest a run.

A *run* is a folder. ``run.json`` says what was asked for, on which machine, with which versions; ``requests.jsonl`` has
a line for every finished request, appended as they finish, so a run that was killed keeps what it had. Everything a
report shows is computed from these two files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from draftwood.disk import cache_home, new_file, write_json
from draftwood.errors import DraftwoodError

FORMAT, VERSION = "draftwood-bench", 1
MANIFEST, REQUESTS = "run.json", "requests.jsonl"

IDENTICAL, TIE, ERROR, DIFFERENT = "identical", "tie", "error", "different"


class RequestKey(NamedTuple):
    """Which request of a run a record is about."""

    method: str
    task: str
    prompt: str
    turn: int
    sample: int
    repeat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessVerdict:
    """A greedy output beside that of plain decoding of the same prompt."""

    # identical; tie: two tokens as good as equal; error: ours is wrong; different: a peer has arithmetic of its own
    verdict: str
    position: int | None = None  # of the first difference
    gap: float | None = None  # logits between the best token and the worse of the two


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One finished request, or one that failed (``error``)."""

    method: str  # its label, as in the manifest
    task: str
    prompt: str  # the prompt's id within the task
    turn: int = 0  # of a conversation
    sample: int = 0  # which trajectory of the prompt
    repeat: int = 0  # which time round
    batch: str = ""  # the first of the prompts it ran together with, in any of its turns; empty where it ran alone
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_tokens: int = 0  # what decode_seconds were spent on: speed is the one over the other
    decode_seconds: float = 0.0  # without reading the prompt; in a batch the request's share
    total_seconds: float = 0.0  # from the request to its last token; in a batch the request's share
    first_token_seconds: float | None = None
    peak_bytes: int | None = None  # of memory, while it ran: the GPU's if there is one, else the process's
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    lossless: LosslessVerdict | None = None  # None: sampled, or there was nothing to compare with
    stats: dict[str, Any] | None = None  # RequestStats.as_dict(); of a peer what it tells, or None
    error: str | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.method, self.task, self.prompt, self.turn, self.sample, self.repeat)

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        content = json.loads(line)
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in content.items() if name in known}  # a later version may write more
        if values.get("lossless") is not None:
            values["lossless"] = LosslessVerdict(**values["lossless"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """What a run is. It may be continued with the same settings, prompts, machine and versions; the rest is for people
    and reports."""

    settings: dict[str, Any]  # BenchSettings.as_dict()
    methods: list[dict[str, Any]]  # BenchMethod.as_dict()
    tasks: dict[str, dict[str, Any]]  # by name: prompts (count), source, sha256 of the prompts
    model: dict[str, Any]  # describe_model()
    machine: dict[str, Any]  # describe_machine()
    software: dict[str, str]  # versions
    command: str
    started: str  # UTC, ISO 8601
    finished: str | None = None
    failed: dict[str, str] = field(default_factory=dict)  # methods that were given up, and why
    absent: dict[str, str] = field(default_factory=dict)  # peers that are not there, and how to get them
    recipe: str | None = None
    paper: list[dict[str, Any]] = field(default_factory=list)  # a recipe's figures: method, task, metric, value


class BenchRun(NamedTuple):
    name: str
    manifest: RunManifest
    records: list[RequestRecord]


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keeps others from writing to a run. The lock lies in the cache: a run's folder has results and nothing else."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    path = cache_home() / "locks" / f"bench-{name}.lock"
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DraftwoodError(
            "Another process is writing to the folder of the results",
            got=str(folder),
            next_step="Wait until it has ended, or name a new folder.",
        ) from error
    except OSError as error:
        raise DraftwoodError(
            f"{path} cannot be written",
            got=error,
            next_step="Set DRAFTWOOD_HOME to a folder that you may write to.",
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # nobody waits for it, and every run has one of its own: they would pile up
            path.unlink()
        lock.release()


def write_manifest(folder: Path, manifest: RunManifest) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> RunManifest:
    path = folder / MANIFEST
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"{content['format']} {content['version']}")
        return RunManifest(**{f.name: content[f.name] for f in fields(RunManifest) if f.name in content})
    except FileNotFoundError as error:
        raise DraftwoodError(
            f"{folder} is no benchmark run",
            got=f"no {MANIFEST} there",
            next_step="Name a folder that --out made.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftwoodError(
            f"{path} cannot be read",
            got=error,
            allowed=f"{FORMAT} {VERSION}",
            next_step="It is damaged or of another version: begin a run in a new folder.",
        ) from error


def append_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Adds lines to the run and makes sure that they are on disk."""
    lines = "".join(record.as_json() + "\n" for record in records)
    try:
        with (folder / REQUESTS).open("a", encoding="utf-8") as handle:
            handle.write(lines)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise DraftwoodError(
            f"{folder / REQUESTS} cannot be written",
            got=error,
            next_step="Make room, then give the same command again: it goes on from here.",
        ) from error


def write_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Puts these lines in the place of all there were."""
    with new_file(folder / REQUESTS) as temporary:
        temporary.write_text("".join(record.as_json() + "\n" for record in records), encoding="utf-8")


def read_records(folder: Path) -> list[RequestRecord]:
    """All records of a run. A last line that a kill cut short is left out; any other damage is an error."""
    path = folder / REQUESTS
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DraftwoodError(f"{path} cannot be read", got=error.strerror or error) from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(RequestRecord.from_json(line.decode("utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # no newline behind it: it was never finished
                break
            raise DraftwoodError(
                f"{path}, line {number} is no record",
                got=error,
                next_step="Delete that line: the run's own command measures it again.",
            ) from error
    return records


def drop_partial_line(folder: Path) -> None:
    """Cuts off a last line that was never finished, so that new ones can follow."""
    path = folder / REQUESTS
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with new_file(path) as temporary:
                temporary.write_bytes(whole)


def read_run(folder: str | Path) -> BenchRun:
    place = Path(folder)
    return BenchRun(place.resolve().name, read_manifest(place), read_records(place))


def read_runs(folders: Sequence[str | Path]) -> list[BenchRun]:
    """The runs in these folders; a folder of runs (a recipe's) stands for all of them."""
    found: list[BenchRun] = []
    for folder in map(Path, folders):
        inside = [] if (folder / MANIFEST).exists() else sorted(p.parent for p in folder.glob(f"*/{MANIFEST}"))
        found += [read_run(place) for place in inside or [folder]]
    return found
