"""Load a C library: prebuilt with the package, or compiled at first use and kept in the cache folder."""

import ctypes
import errno
import hashlib
import logging
import os
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.compiler import (
    COMMON_FLAGS,
    LIBRARIES,
    NATIVE_FLAGS,
    SHARED,
    CompileError,
    compile_library,
    describe_cpu,
    find_compiler,
    fitting_variants,
)
from draftwood.disk.store import cache_home

LOG = logging.getLogger(__name__)
PREBUILT = Path(__file__).parent / "prebuilt"  # in wheels only: a checkout compiles its sources, which may change


class _State(NamedTuple):
    library: ctypes.CDLL | None
    why: str


class Library:
    """A C file and the headers next to it, loaded once as a shared library.

    A prebuilt variant that fits the CPU comes first: it computes the same bits as a native build, as fast, and needs no
    compiler. DRAFTWOOD_CC asks for a native build with that compiler instead.
    """

    def __init__(self, name: str, source: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> None:
        """``kind``: ``ctypes.PyDLL`` where calls are too short to let other Python threads run meanwhile."""
        self._name = name
        self._source = source
        self._kind = kind
        self._lock = threading.Lock()
        self._state: _State | None = None

    def load(self) -> ctypes.CDLL | None:
        """The loaded library, or None if there is none; ``why_unavailable`` then returns the reason."""
        state = self._state
        if state is None:
            with self._lock:
                state = self._state = self._state or self._load()
        return state.library

    def why_unavailable(self) -> str:
        """Why ``load`` returned None, and what to do about it. Empty if the library is loaded."""
        self.load()
        return self._state.why if self._state is not None else ""

    def needs_build(self) -> bool:
        """Whether ``load`` is going to run the compiler, which takes several seconds."""
        if self._state is not None or os.environ.get("DRAFTWOOD_NO_KERNEL", "") not in ("", "0"):
            return False
        if not os.environ.get("DRAFTWOOD_CC") and self._find_prebuilt() is not None:
            return False
        compiler = find_compiler()
        return compiler is not None and not any(_kernels().glob(f"{self._built_name(compiler)}-*.so"))

    def _built_name(self, compiler: str) -> str:
        """The name of its file, before the digest of the content."""
        return f"{self._name}-{_fingerprint(self._source.parent, compiler)}"

    def _load(self) -> _State:
        if os.environ.get("DRAFTWOOD_NO_KERNEL", "") not in ("", "0"):
            return _State(None, "DRAFTWOOD_NO_KERNEL is set")
        prebuilt = None if os.environ.get("DRAFTWOOD_CC") else self._find_prebuilt()
        if prebuilt is not None:
            with suppress(OSError):  # built for another C library: a compiler may still help
                return _State(self._kind(str(prebuilt)), "")
        try:
            return _State(self._kind(str(self._build())), "")
        except CompileError as error:
            return _State(None, str(error))
        except (OSError, subprocess.SubprocessError) as error:
            advice = "; set DRAFTWOOD_HOME to a folder that you can write to" if is_unwritable(error) else ""
            return _State(None, f"the kernel could not be built or loaded: {error}{advice}")

    def _find_prebuilt(self) -> Path | None:
        paths = (PREBUILT / f"{self._name}-{variant}.so" for variant in fitting_variants())
        return next((path for path in paths if path.exists()), None)

    def _build(self) -> Path:
        """Compile for this machine, unless an earlier run did. Returns the path of the library."""
        compiler = find_compiler()
        if compiler is None:
            raise CompileError(
                "no prebuilt kernel fits this machine and no C compiler was found (cc, gcc, clang or DRAFTWOOD_CC); "
                "install a C compiler such as gcc or clang"
            )
        folder = _kernels()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _others_could_write(folder):
            raise CompileError(
                f"other users can write to {folder}, so libraries in it are not loaded; "
                "remove this folder or set DRAFTWOOD_HOME to a folder of your own"
            )
        name = self._built_name(compiler)
        for library in folder.glob(f"{name}-*.so"):
            if not _others_could_write(library) and library.stem == f"{name}-{_digest(library)}":
                return library
            # Loading a truncated library would end the process (SIGBUS).
            LOG.warning("%s is damaged, or others could have changed it; it is built again", library)
            library.unlink(missing_ok=True)
        # Compiled under a temporary name and then renamed, so processes that start together do not disturb each other.
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as work:
            built = Path(work) / "library.so"
            try:
                compile_library(compiler, self._source, built)
            except CompileError as error:
                raise CompileError(f"{compiler} could not compile the kernel: {error}") from error
            built.chmod(0o700)  # with a umask of 002 the group could write, and the next run would not load it
            library = folder / f"{name}-{_digest(built)}.so"
            built.replace(library)
        return library


def _kernels() -> Path:
    return cache_home() / "kernels"


def is_unwritable(error: BaseException) -> bool:
    """Whether a file could not be written, for lack of permission or space."""
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)


def _others_could_write(path: Path) -> bool:
    """Whether a user other than this one and root could have written ``path``: its code would run as this user."""
    if os.name != "posix":
        return False
    found = path.stat()
    return found.st_uid not in (0, os.geteuid()) or bool(found.st_mode & 0o022)


def _digest(library: Path) -> str:
    """A digest of the content, which is part of the file name."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:20]


def _fingerprint(folder: Path, compiler: str) -> str:
    """A digest of all that determines the library: sources, compiler, flags and CPU (homes are shared by machines)."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h"), *SHARED.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    for part in (compiler, version, repr(COMMON_FLAGS + LIBRARIES), repr(NATIVE_FLAGS), describe_cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]
