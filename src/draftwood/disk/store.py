"""The cache folder and atomic writes of its entries.

An entry is written under a temporary name in the same folder and renamed when complete. A lock per entry keeps two
processes from building it twice; the process that holds the lock also removes the leftovers of crashed runs.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftwood.disk.files import temporary_path
from draftwood.display import readable_size
from draftwood.errors import ModelError
from draftwood.progress import Progress, report

_BLOCK = 1 << 22


class DiskFullError(ModelError):
    """The disk is too full to write an entry. Fetching it from another source would fail too."""


def cache_home() -> Path:
    """The cache folder: DRAFTWOOD_HOME, else ``~/.cache/draftwood``."""
    chosen = os.environ.get("DRAFTWOOD_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "draftwood"


def models_home() -> Path:
    return cache_home() / "models"


@contextmanager
def lock_entry(name: str, progress: Progress | None = None) -> Iterator[None]:
    """Hold the lock of a cache entry. Report through ``progress`` if another process holds it."""
    folder = cache_home() / "locks"
    with _explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(progress, f"waiting for another process that prepares {name}", 0, 1)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_folder(final: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary folder to fill. It is renamed to ``final`` if the block succeeds and removed if it fails.

    The caller holds the entry's lock. ``needed`` is the approximate number of bytes to write.
    An existing ``final`` is replaced.
    """
    temporary = temporary_path(final)
    with _explain_disk_errors(final, needed):
        _remove_leftovers(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        _check_space(final, needed)
        try:
            temporary.mkdir()
            yield temporary
            _replace_folder(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_entry_file(final: Path, needed: int) -> Iterator[Path]:
    """Like ``new_folder``, for a large file in an entry."""
    temporary = temporary_path(final)
    with _explain_disk_errors(final, needed):
        for leftover in final.parent.glob(f".{final.name}.partial-*"):
            leftover.unlink()
        _check_space(final, needed)
        try:
            yield temporary
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a cache entry. It is renamed first, so that no process finds half of it."""
    doomed = temporary_path(folder)
    with _explain_disk_errors(folder):
        folder.rename(doomed)
        shutil.rmtree(doomed)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
            done += len(block)
            report(progress, f"checking {path.name}", done, total)
    return digest.hexdigest()


def _remove_leftovers(final: Path) -> None:
    """Remove the temporary folders of crashed runs. While the lock is held, no running process owns one of them."""
    if final.parent.is_dir():
        for leftover in final.parent.glob(f".{final.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _replace_folder(temporary: Path, final: Path) -> None:
    if final.exists():
        remove_folder(final)
    temporary.rename(final)


def _check_space(final: Path, needed: int) -> None:
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise _disk_full_error(final, needed, free)


def _disk_full_error(final: Path, needed: int, free: int) -> DiskFullError:
    return DiskFullError(
        f"The disk is too full to write {final.name}",
        got=f"{readable_size(free)} free in {final.parent}",
        allowed=f"at least {readable_size(needed)}",
        next_step="Free some space, or set DRAFTWOOD_HOME to a folder on another disk. Nothing was kept.",
    )


@contextmanager
def _explain_disk_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an ``OSError`` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            parent = next(folder for folder in path.parents if folder.is_dir())
            raise _disk_full_error(path, needed, shutil.disk_usage(parent).free) from error
        raise ModelError(
            f"{path} cannot be written", got=error, next_step="Set DRAFTWOOD_HOME to a folder that you can write to."
        ) from error
