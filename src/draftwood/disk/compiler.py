"""C sources that the machine's own compiler builds at first use; the result is kept.

A wheel would have to serve every CPU; the compiler that is already here knows this one. Without a compiler there is no
library, and whoever asked for it does the same in Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.store import cache_home

# No contraction: every multiply-add is written out, so that all inlined copies round alike. No early scheduling: the
# micro-kernels are written in the order they should run (GCC 12 on ARM; elsewhere it is off or unknown anyway).
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-schedule-insns", "-fPIC", "-shared")
# The first that the compiler takes. -march=native is the x86 spelling, -mcpu=native the one of ARM and POWER.
NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
LIBRARIES = ("-lm", "-pthread")
TIMEOUT_S = 300


class _State(NamedTuple):
    library: ctypes.CDLL | None
    why: str


class Library:
    """A C file with the headers beside it, as a library that is compiled and loaded once."""

    def __init__(self, name: str, source: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> None:
        """``kind``: ``ctypes.PyDLL`` where calls are too short to let other threads of Python run meanwhile."""
        self._name = name
        self._source = source
        self._kind = kind
        self._lock = threading.Lock()
        self._state: _State | None = None

    def load(self) -> ctypes.CDLL | None:
        """The loaded library, or None where there is none; ``why_unavailable`` then says why."""
        state = self._state
        if state is None:
            with self._lock:
                state = self._state = self._state or self._load()
        return state.library

    def why_unavailable(self) -> str:
        """Why ``load`` returned None; empty if it did not."""
        self.load()
        return self._state.why if self._state is not None else ""

    def _load(self) -> _State:
        if os.environ.get("DRAFTWOOD_NO_KERNEL", "") not in ("", "0"):
            return _State(None, "DRAFTWOOD_NO_KERNEL is set")
        compiler = _compiler()
        if compiler is None:
            return _State(None, "no C compiler found (cc, gcc or clang; DRAFTWOOD_CC names another)")
        try:
            return _State(self._kind(str(self._built(compiler))), "")
        except _CompileError as error:
            return _State(None, f"{compiler} could not compile the kernel: {error}")
        except (OSError, subprocess.SubprocessError) as error:
            return _State(None, f"the kernel could not be built or loaded: {error}")

    def _built(self, compiler: str) -> Path:
        """The path of the shared library, compiled now unless an earlier run did."""
        library = cache_home() / "kernels" / f"{self._name}-{_fingerprint(self._source.parent, compiler)}.so"
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        # Built under a name of its own and renamed when complete: processes that start together do not disturb each
        # other.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as work:
            built = Path(work) / "library.so"
            _compile(compiler, self._source, built)
            built.replace(library)
        return library


def _compiler() -> str | None:
    chosen = os.environ.get("DRAFTWOOD_CC")
    candidates = (chosen,) if chosen else ("cc", "gcc", "clang")
    return next((found for name in candidates if (found := shutil.which(name))), None)


class _CompileError(Exception):
    pass


def _compile(compiler: str, source: Path, to: Path) -> None:
    complaint = ""
    for native in NATIVE_FLAGS:
        command = [compiler, *COMMON_FLAGS, *native, str(source), "-o", str(to), *LIBRARIES]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if result.returncode == 0:
            return
        complaint = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
    raise _CompileError(complaint or "it gave no reason")


def _fingerprint(folder: Path, compiler: str) -> str:
    """Changes with anything that changes the library: sources, compiler, flags, CPU."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    for part in (compiler, version, repr(COMMON_FLAGS + LIBRARIES), repr(NATIVE_FLAGS), _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What tells this CPU's instructions from another's: a home folder may be shared between machines."""
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(fields)}))
