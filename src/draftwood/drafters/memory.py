"""What drafters learn, how long that lives, and how it gets to disk and back.

A *memory* holds tables that a drafter fills while it runs. Its scope says who shares one:

    request   every request starts from nothing
    prompt    the samples of one prompt (``SamplingParams(n=...)``) share one
    process   all requests of this LLM share one
    a file    as ``process``, and it begins with what the file holds and is saved there

Memories only change what is guessed, never what is emitted.
"""

from __future__ import annotations

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
AFRESH = "Name another file to start afresh; this one is left alone."
SECONDS_BETWEEN_SAVES = 60.0  # a crash loses no more than that

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Memory(Protocol):
    """Tables of bounded size that can be written down."""

    @property
    def layout(self) -> str:
        """What the arrays are; a memory can take over those of its own layout alone."""

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]: ...

    def restore(self, arrays: Arrays) -> None: ...


class MemoryConfig(NamedTuple):
    """Who shares a memory, and the file it is kept in, if any."""

    scope: str
    path: Path | None = None


def parse_memory(memory: object) -> MemoryConfig:
    """From what a user gave: a scope's name, or a file. A file's name has a dot or a slash in it, so that a scope
    that is misspelt makes no file."""
    if isinstance(memory, str) and memory in SCOPES:
        return MemoryConfig(memory)
    if isinstance(memory, Path) or (isinstance(memory, str) and any(mark in memory for mark in "./\\")):
        return MemoryConfig("process", _file(memory))
    raise OptionError(
        "memory is no scope and no file", got=repr(memory), allowed=[*SCOPES, "a file as in tables.memory"]
    )


def _file(name: str | Path) -> Path:
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:
        raise OptionError("There can be no file of that name for the memory", got=f"{name}: {error}") from error
    if is_folder:
        raise OptionError("A memory is kept in a file, and this is a folder", got=str(path))
    return path


class MemoryKeeper:
    """Gives every request the memory that its scope says."""

    def __init__(self, new: Callable[[], Memory | None], plan: MemoryConfig, target: TargetInfo) -> None:
        self._new = new
        self._plan = plan
        self._model = model_fingerprint(target)
        self._of_prompt: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._of_process: Memory | None = None
        self._saved = time.monotonic()
        if plan.path is not None:
            self._of_process = self._opened(plan.path)

    def get(self, group: int) -> Memory | None:
        """The memory of a request; ``group`` is the same for the samples of one prompt."""
        if self._plan.scope == "request":
            return self._new()
        if self._plan.scope == "process":
            if self._of_process is None:
                self._of_process = self._new()
            return self._of_process
        memory = self._of_prompt.get(group)
        if memory is None:
            memory = self._new()
            if memory is not None:
                self._of_prompt[group] = memory
        return memory

    def save(self, *, at_once: bool = True) -> None:
        """Writes the file, if there is one; with ``at_once=False`` only where the last time is long ago.

        In between a file that cannot be written costs nobody an answer: the last save will say so.
        """
        due = at_once or time.monotonic() - self._saved > SECONDS_BETWEEN_SAVES
        if self._plan.path is not None and self._of_process is not None and due:
            self._saved = time.monotonic()
            try:
                save_memory(self._plan.path, self._of_process, self._model)
            except DraftwoodError:
                if at_once:
                    raise

    def _opened(self, path: Path) -> Memory:
        memory = self._new()
        if memory is None:
            raise OptionError("This drafter learns nothing, so there is nothing to keep in a file", got=str(path))
        if path.exists():
            load_memory(path, memory, self._model)
        elif not path.parent.is_dir():
            raise OptionError("The folder for the memory does not exist", got=str(path.parent))
        return memory


def model_fingerprint(target: TargetInfo) -> str:
    """Which model a memory belongs to: token ids of one mean nothing to another."""
    sizes = f"{target.vocab_size}x{target.hidden_size}x{target.num_layers}"
    return f"{target.name} ({target.architecture} {sizes}, {target.num_parameters} parameters)"


def save_memory(path: Path, memory: Memory, model: str) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in memory.arrays().items()}
    about = {"format": FORMAT, "version": VERSION, "layout": memory.layout, "model": model}
    with new_file(path) as temporary:
        save_file(arrays, temporary, about)


def load_memory(path: Path, memory: Memory, model: str) -> None:
    """Fills a new memory from a file; refuses one of another format, version, model or layout."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            _check_about(path, about, memory.layout, model)
            memory.restore({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, KeyError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, DraftwoodError):
            raise
        raise DraftwoodError(
            f"{path} cannot be read as a memory",
            got=error,
            next_step=f"It may be damaged, or no memory at all. {AFRESH}",
        ) from error


def _check_about(path: Path, about: Mapping[str, str], layout: str, model: str) -> None:
    for what, got, wanted in (
        ("is no memory of Draftwood", about.get("format"), FORMAT),
        ("is a memory of another version", about.get("version"), VERSION),
        ("belongs to another model", about.get("model"), model),
        ("was filled by a drafter with other tables", about.get("layout"), layout),
    ):
        if got != wanted:
            raise DraftwoodError(
                f"{path} {what}",
                got=got,
                allowed=wanted,
                next_step=AFRESH,
            )
