"""Compiles the kernel with the machine's own C compiler at first use, and keeps the result.

A wheel would have to serve every CPU; the compiler that is already here knows this one. Without a compiler there is no
kernel and the eager decoder runs instead.
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

from draftwood.target.store import cache_home

# No contraction: every multiply-add is written out, so that all inlined copies round alike. No early scheduling: the
# micro-kernels are written in the order they should run (GCC 12 on ARM; elsewhere it is off or unknown anyway).
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-schedule-insns", "-fPIC", "-shared")
# The first that the compiler takes. -march=native is the x86 spelling, -mcpu=native the one of ARM and POWER.
NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
LIBRARIES = ("-lm", "-pthread")
TIMEOUT_S = 300


class _State(NamedTuple):
    kernel: ctypes.CDLL | None
    why: str


_lock = threading.Lock()
_state: _State | None = None


def load_kernel() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is none; ``why_unavailable`` then says why."""
    global _state
    with _lock:
        if _state is None:
            _state = _load()
        return _state.kernel


def why_unavailable() -> str:
    """Why ``load_kernel`` returned None; empty if it did not."""
    load_kernel()
    return _state.why if _state is not None else ""


def _load() -> _State:
    if os.environ.get("DRAFTWOOD_NO_KERNEL", "") not in ("", "0"):
        return _State(None, "DRAFTWOOD_NO_KERNEL is set")
    compiler = _compiler()
    if compiler is None:
        return _State(None, "no C compiler found (cc, gcc or clang; DRAFTWOOD_CC names another)")
    try:
        return _State(ctypes.CDLL(str(_build(compiler))), "")
    except _CompileError as error:
        return _State(None, f"{compiler} could not compile the kernel: {error}")
    except (OSError, subprocess.SubprocessError) as error:
        return _State(None, f"the kernel could not be built or loaded: {error}")


def _compiler() -> str | None:
    chosen = os.environ.get("DRAFTWOOD_CC")
    candidates = (chosen,) if chosen else ("cc", "gcc", "clang")
    return next((found for name in candidates if (found := shutil.which(name))), None)


class _CompileError(Exception):
    pass


def _build(compiler: str) -> Path:
    """The path of the shared library, compiled now unless an earlier run did."""
    folder = Path(__file__).parent
    library = cache_home() / "kernels" / f"cpu-{_fingerprint(folder, compiler)}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built under a name of its own and renamed when complete: processes that start together do not disturb each other.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as work:
        built = Path(work) / "kernel.so"
        _compile(compiler, folder / "kernel.c", built)
        built.replace(library)
    return library


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
