"""Where models are kept, and how they get there whole or not at all.

Everything is written under a temporary name beside its final one and renamed when it is complete. A lock per entry
keeps two processes from making the same thing twice; whoever holds it also sweeps up what crashed runs left behind.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftwood.display import readable_size
from draftwood.errors import ModelError
from draftwood.progress import Progress, report

_BLOCK = 1 << 22


class DiskFullError(ModelError):
    """The disk has no room for what was to be written: no other way of fetching it will do."""


def cache_home() -> Path:
    """The folder for everything Draftwood keeps: DRAFTWOOD_HOME, else ``~/.cache/draftwood``."""
    chosen = os.environ.get("DRAFTWOOD_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "draftwood"


def models_home() -> Path:
    return cache_home() / "models"


@contextmanager
def lock_entry(name: str, progress: Progress | None = None) -> Iterator[None]:
    """Holds the lock of a cache entry; says so through ``progress`` where another process has it."""
    folder = cache_home() / "locks"
    with _explained(folder):
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
    """A folder to fill, which becomes ``final`` when the block ends well and vanishes when it does not.

    Call it with the entry's lock held. ``needed`` is about how many bytes will be written.
    An older ``final`` is replaced.
    """
    temporary = _temporary(final)
    with _explained(final, needed):
        _sweep(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        _check_space(final, needed)
        try:
            temporary.mkdir()
            yield temporary
            _replace_folder(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a cache entry. It is renamed first, so that nobody finds half of it."""
    doomed = _temporary(folder)
    with _explained(folder):
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


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:12]}")


def _sweep(final: Path) -> None:
    """Removes what crashed runs left: with the lock held, no temporary name of this entry belongs to a living run."""
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
        raise _no_space(final, needed, free)


def _no_space(final: Path, needed: int, free: int) -> DiskFullError:
    return DiskFullError(
        f"The disk is too full to write {final.name}",
        got=f"{readable_size(free)} free in {final.parent}",
        allowed=f"at least {readable_size(needed)}",
        next_step="Free some space, or set DRAFTWOOD_HOME to a folder on another disk. Nothing was kept.",
    )


@contextmanager
def _explained(place: Path, needed: int = 0) -> Iterator[None]:
    """Turns what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            parent = next(folder for folder in place.parents if folder.is_dir())
            raise _no_space(place, needed, shutil.disk_usage(parent).free) from error
        raise ModelError(
            f"{place} cannot be written",
            got=error,
            next_step="Set DRAFTWOOD_HOME to a folder that you may write to.",
        ) from error
