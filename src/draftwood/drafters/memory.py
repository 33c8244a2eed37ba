"""Memories: what drafters learn, how long it is kept, and how it is saved to disk.

A *memory* holds tables that a drafter fills while it runs. Its scope sets which requests share one:

    request   every request starts with an empty memory
    prompt    the samples of one prompt (``SamplingParams(n=...)``) share one
    process   all requests of this LLM and owner (a client of the server) share one
    a file    all requests share one, loaded from the file at the start and saved to it

Memories change what is guessed, never what is emitted.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftwood.disk import new_file
from draftwood.errors import DraftwoodError, OptionError
from draftwood.targets import TargetInfo

SCOPES = ("request", "prompt", "process")
FORMAT, VERSION = "draftwood-memory", "1"
NEW_FILE = "To start with an empty memory, use another file name; this file is not changed."
MAX_OWNERS = 16  # whose memories are kept in a process
SECONDS_BETWEEN_SAVES = 60.0  # a crash loses at most this much

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Memory(Protocol):
    """Tables of bounded size that can be saved."""

    @property
    def layout(self) -> str:
        """Describes the arrays; a memory can only restore arrays of its own layout."""

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]: ...

    def restore(self, arrays: Arrays) -> None: ...


class MemoryConfig(NamedTuple):
    """The scope of a memory, and its file if it has one."""

    scope: str
    path: Path | None = None


def parse_memory(memory: object) -> MemoryConfig:
    """Parse the user's value: the name of a scope, or a file name. A file name must contain a dot or a slash, so that
    a misspelt scope does not create a file."""
    if isinstance(memory, str) and memory in SCOPES:
        return MemoryConfig(memory)
    if isinstance(memory, Path) or (isinstance(memory, str) and any(mark in memory for mark in "./\\")):
        return MemoryConfig("process", _check_path(memory))
    raise OptionError(
        "memory is not a scope or a file name", got=repr(memory), allowed=[*SCOPES, "a file as in tables.memory"]
    )


def _check_path(name: str | Path) -> Path:
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:
        raise OptionError("Invalid file name for the memory", got=f"{name}: {error}") from error
    if is_folder:
        raise OptionError("The memory must be a file, not a folder", got=str(path))
    return path


class MemoryKeeper:
    """Provides the memory of each request according to the scope."""

    def __init__(self, new: Callable[[], Memory | None], plan: MemoryConfig, target: TargetInfo) -> None:
        self._new = new
        self._plan = plan
        self._model = model_fingerprint(target)
        self._by_prompt: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._by_owner: dict[str, Memory | None] = {}  # least recently used first
        self._shared: Memory | None = None  # of the file
        self._last_save = time.monotonic()
        if plan.path is not None:
            self._shared = self._open(plan.path)

    def get(self, group: int, owner: str = "") -> Memory | None:
        """Return the memory of a request; the samples of one prompt have the same ``group``."""
        if self._plan.scope == "request":
            return self._new()
        if self._shared is not None:
            return self._shared
        if self._plan.scope == "process":
            self._by_owner[owner] = memory = self._by_owner.pop(owner) if owner in self._by_owner else self._new()
            if len(self._by_owner) > MAX_OWNERS:
                del self._by_owner[next(iter(self._by_owner))]
            return memory
        memory = self._by_prompt.get(group)
        if memory is None:
            memory = self._new()
            if memory is not None:
                self._by_prompt[group] = memory
        return memory

    def save(self, *, at_once: bool = True) -> None:
        """Write the file, if there is one; with ``at_once=False`` only if the last save is long ago.

        Errors of such intermediate saves are ignored, so that no request fails; the final save reports them.
        """
        due = at_once or time.monotonic() - self._last_save > SECONDS_BETWEEN_SAVES
        if self._plan.path is not None and self._shared is not None and due:
            self._last_save = time.monotonic()
            try:
                save_memory(self._plan.path, self._shared, self._model)
            except DraftwoodError:
                if at_once:
                    raise

    def _open(self, path: Path) -> Memory:
        memory = self._new()
        if memory is None:
            raise OptionError("This drafter learns nothing, so it has no memory to save", got=str(path))
        if path.exists():
            load_memory(path, memory, self._model)
        elif not path.parent.is_dir():
            raise OptionError("The folder for the memory does not exist", got=str(path.parent))
        return memory


def model_fingerprint(target: TargetInfo) -> str:
    """Identify the model of a memory: token ids of one model mean nothing to another."""
    sizes = f"{target.vocab_size}x{target.hidden_size}x{target.num_layers}"
    return f"{target.name} ({target.architecture} {sizes}, {target.num_parameters} parameters)"


def save_memory(path: Path, memory: Memory, model: str) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in memory.arrays().items()}
    metadata = {"format": FORMAT, "version": VERSION, "layout": memory.layout, "model": model}
    with new_file(path) as temporary:
        save_file(arrays, temporary, metadata)


def load_memory(path: Path, memory: Memory, model: str) -> None:
    """Fill a new memory from a file; raise if its format, version, model or layout differs."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_metadata(path, metadata, memory.layout, model)
            memory.restore({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, KeyError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, DraftwoodError):
            raise
        raise DraftwoodError(
            f"{path} cannot be read as a memory",
            got=error,
            next_step=f"It may be damaged or not a memory file. {NEW_FILE}",
        ) from error


def _check_metadata(path: Path, metadata: Mapping[str, str], layout: str, model: str) -> None:
    for what, got, wanted in (
        ("is not a Draftwood memory", metadata.get("format"), FORMAT),
        ("is a memory of another version", metadata.get("version"), VERSION),
        ("belongs to another model", metadata.get("model"), model),
        ("was filled by a drafter with other tables", metadata.get("layout"), layout),
    ):
        if got != wanted:
            raise DraftwoodError(f"{path} {what}", got=got, allowed=wanted, next_step=NEW_FILE)
