"""Files in TOML, read alike everywhere."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from draftwood.errors import DraftwoodError, OptionError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The content of a file; errors call it ``what``, as in "recipe"."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(f"There is no such {what}", got=str(path)) from error
    except (OSError, ValueError) as error:  # a TOML error is a ValueError
        raise DraftwoodError(f"The {what} {path} cannot be read", got=error) from error


def parse_toml(text: str) -> dict[str, Any]:
    """By the standard library's reader, which Python 3.10 does not have yet; tomli is the same one."""
    try:
        reader: Any = import_module("tomllib")
    except ModuleNotFoundError:
        reader = import_module("tomli")
    content: dict[str, Any] = reader.loads(text)
    return content
