"""Files that are whole or not there: written under a temporary name beside their final one, renamed when complete."""

from __future__ import annotations

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

_UMASK = os.umask(0o077)  # there is no way to read it without setting it
os.umask(_UMASK)


def check_output(path: Path, *, force: bool) -> None:
    """Refuses a file that could not be written or that is there already; with ``force`` it may be replaced.

    For results that take long: after an hour would be late to hear of it.
    """
    if path.is_dir():
        raise OptionError("The result goes into a file, and this is a folder", got=str(path))
    if path.exists() and not force:
        raise OptionError(f"{path} exists", next_step="Name another file, or replace it with --force.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written", got=error, next_step="Choose another place.") from error


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A name to write to, which becomes ``final`` when the block ends well and vanishes when it does not.

    An older ``final`` is replaced in one step: whoever reads it meanwhile sees the old one or the new one.
    """
    temporary = final.with_name(f".{final.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if temporary.is_file():
            apply_umask(temporary)
        temporary.replace(final)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with an error of its own
        raise DraftwoodError(
            f"{final} cannot be written",
            got=error,
            next_step="Choose a place that you may write to and that has room. Nothing was changed there.",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def apply_umask(path: Path) -> None:
    """That of every new file of this user; safetensors writes files which nobody else may read."""
    with suppress(OSError):  # some file systems know no modes
        path.chmod(0o666 & ~_UMASK)


def write_json(final: Path, content: Any) -> None:
    """For people too: an entry a line."""
    with new_file(final) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
