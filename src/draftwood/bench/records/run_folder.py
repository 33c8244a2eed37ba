"""The folder of a benchmark run: a manifest, and one line of JSON per request.

``run.json`` holds the settings, the machine and the versions. ``requests.jsonl`` gets one line per finished request,
appended as it finishes, so a killed run keeps its results. Reports are computed from these two files alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from filelock import FileLock, Timeout

from draftwood.disk import cache_home, new_file, parse_json, write_json
from draftwood.errors import DraftwoodError

FORMAT, VERSION = "draftwood-bench", 1
MANIFEST, REQUESTS = "run.json", "requests.jsonl"

RecordT = TypeVar("RecordT")

IDENTICAL, TIE, ERROR, DIFFERENT = "identical", "tie", "error", "different"


def check_types(record: RecordT) -> RecordT:
    """Return the record; raise TypeError if a value that was read from a file has another type than its field."""
    for name, hint in get_type_hints(type(record)).items():
        if not _fits(value := getattr(record, name), hint):
            raise TypeError(f"{name}: {json.dumps(value, default=str)[:80]}")
    return record


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, each) for each in args)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, args[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, args[1]) for each in value.values())
    if hint is Any:
        return True
    return isinstance(value, (int, float) if hint is float else hint) and (hint is bool or type(value) is not bool)


class RequestKey(NamedTuple):
    """Identifies a request within a run."""

    method: str
    task: str
    prompt: str
    turn: int
    sample: int
    repeat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessVerdict:
    """Comparison of a greedy output with plain decoding of the same prompt."""

    # identical; tie: the two tokens have nearly equal logits; error: our output is wrong; different: a peer's output
    verdict: str
    position: int | None = None  # first difference
    gap: float | None = None  # logit of the best token minus that of the worse of the two


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One finished request, or one that failed (``error``)."""

    method: str  # label, as in the manifest
    task: str
    prompt: str  # the prompt's id within the task
    turn: int = 0  # turn of the conversation
    sample: int = 0  # index of the trajectory
    repeat: int = 0  # index of the repetition
    batch: str = ""  # id of the first prompt of its batch; empty if it ran alone
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_tokens: int = 0  # tokens generated during decode_seconds; speed is their ratio
    decode_seconds: float = 0.0  # without prefill; in a batch the request's share
    total_seconds: float = 0.0  # from submission to the last token; in a batch the request's share
    first_token_seconds: float | None = None
    peak_bytes: int | None = None  # peak memory during the request: of the GPU if used, else of the process
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    lossless: LosslessVerdict | None = None  # None: sampled, or plain decoding did not run
    stats: dict[str, Any] | None = None  # RequestStats.as_dict(); for a peer what it reports, or None
    error: str | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.method, self.task, self.prompt, self.turn, self.sample, self.repeat)

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        content = parse_json(line)
        known = {f.name for f in fields(cls)}
        values = {name: content[name] for name in content if name in known}  # a later version may write more
        if values.get("lossless") is not None:
            values["lossless"] = check_types(LosslessVerdict(**values["lossless"]))
        return check_types(cls(**values))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunManifest:
    """Description of a run. A run resumes only with equal settings, prompts, machine and versions."""

    settings: dict[str, Any]  # BenchSettings.as_dict()
    methods: list[dict[str, Any]]  # BenchMethod.as_dict()
    tasks: dict[str, dict[str, Any]]  # by name: number of prompts, source, sha256 of the prompts
    model: dict[str, Any]  # describe_model()
    machine: dict[str, Any]  # describe_machine()
    software: dict[str, str]  # versions
    command: str
    started: str  # UTC, ISO 8601
    finished: str | None = None
    failed: dict[str, str] = field(default_factory=dict)  # disabled methods and the reason
    absent: dict[str, str] = field(default_factory=dict)  # unavailable peers and how to install them
    other_load: float | None = None  # share of the cores that other processes used; None: unknown
    recipe: str | None = None
    paper: list[dict[str, Any]] = field(default_factory=list)  # figures of the paper: method, task, metric, value


class BenchRun(NamedTuple):
    name: str
    manifest: RunManifest
    records: list[RequestRecord]


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run against other writers. The lock file is in the cache, so the run folder holds only results."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    path = cache_home() / "locks" / f"bench-{name}.lock"
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DraftwoodError(
            "Another process is writing to the results folder",
            got=str(folder),
            next_step="Wait until it ends, or choose a new folder.",
        ) from error
    except OSError as error:
        raise DraftwoodError(
            f"{path} cannot be written", got=error, next_step="Set DRAFTWOOD_HOME to a writable folder."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # lock files would accumulate: each run has its own
            path.unlink()
        lock.release()


def write_manifest(folder: Path, manifest: RunManifest) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> RunManifest:
    path = folder / MANIFEST
    try:
        content: Mapping[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"{content['format']} {content['version']}")
        return check_types(RunManifest(**{f.name: content[f.name] for f in fields(RunManifest) if f.name in content}))
    except FileNotFoundError as error:
        raise DraftwoodError(
            f"{folder} is not a benchmark run",
            got=f"no {MANIFEST} in it",
            next_step="Give a folder that draftwood bench --out created.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftwoodError(
            f"{path} cannot be read",
            got=error,
            allowed=f"{FORMAT} {VERSION}",
            next_step="The file is damaged or from another version: start a run in a new folder.",
        ) from error


def append_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Append lines to requests.jsonl and flush them to disk."""
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
            next_step="Free some space, then run the same command again: it resumes here.",
        ) from error


def write_records(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Replace requests.jsonl."""
    with new_file(folder / REQUESTS) as temporary:
        temporary.write_text("".join(record.as_json() + "\n" for record in records), encoding="utf-8")


def read_records(folder: Path) -> list[RequestRecord]:
    """Read all records of a run. An incomplete last line is ignored; any other damage is an error."""
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
            if number == len(lines):  # no newline after it: writing was interrupted
                break
            raise DraftwoodError(
                f"{path}, line {number} is not a valid record",
                got=error,
                next_step="Delete that line and run the same command again: it repeats the request.",
            ) from error
    return records


def drop_partial_line(folder: Path) -> None:
    """Remove an incomplete last line, so that new lines can be appended."""
    path = folder / REQUESTS
    if path.exists():
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            with new_file(path) as temporary:
                temporary.write_bytes(complete)


def read_run(folder: str | Path) -> BenchRun:
    place = Path(folder)
    return BenchRun(place.resolve().name, read_manifest(place), read_records(place))


def read_runs(folders: Sequence[str | Path]) -> list[BenchRun]:
    """Read the runs in these folders; a folder of runs, such as a recipe's, stands for all of them."""
    found: list[BenchRun] = []
    for folder in map(Path, folders):
        inside = [] if (folder / MANIFEST).exists() else sorted(p.parent for p in folder.glob(f"*/{MANIFEST}"))
        found += [read_run(place) for place in inside or [folder]]
    return found
