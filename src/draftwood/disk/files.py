"""Atomic file writes: a file is written under a temporary name in the same folder and renamed when complete."""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError

from draftwood.errors import DraftwoodError, OptionError

_UMASK = os.umask(0o077)  # it cannot be read without setting it
os.umask(_UMASK)


def check_output(path: Path, *, force: bool) -> None:
    """Raise if ``path`` cannot be written, or if it exists and ``force`` is not set.

    Commands that run for long call this first, so that they do not fail at the end.
    """
    if path.is_dir():
        raise OptionError("The output path must be a file, not a folder", got=str(path))
    if path.exists() and not force:
        raise OptionError(f"{path} exists", next_step="Choose another file, or replace it with --force.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written", got=error, next_step="Choose another path.") from error


def temporary_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:12]}")


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is renamed to ``final`` if the block succeeds and removed if it fails.

    An existing ``final`` is replaced in one step: readers see either the old file or the new one.
    """
    temporary = temporary_path(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_file():
            apply_umask(temporary)
        temporary.replace(final)
    except (OSError, SafetensorError) as error:  # safetensors has its own error type for a full disk
        raise DraftwoodError(
            f"{final} cannot be written",
            got=error,
            next_step="Choose a folder that you can write to and that has free space. Nothing was changed there.",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def apply_umask(path: Path) -> None:
    """Give a file the mode of any new file of this user; safetensors creates files that only the owner can read."""
    with suppress(OSError):  # some file systems have no modes
        path.chmod(0o666 & ~_UMASK)


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``, but whatever is wrong with the text is a ``ValueError``: also lists nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_json(final: Path, content: Any) -> None:
    """Write indented JSON, one entry per line, so that people can read it too."""
    with new_file(final) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
