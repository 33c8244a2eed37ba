"""Read TOML files."""

import tomllib
from pathlib import Path
from typing import Any

from draftwood.errors import DraftwoodError, OptionError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Parse a file. Error messages call it ``what``, for example "recipe"."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(f"There is no such {what}", got=str(path)) from error
    except (OSError, ValueError) as error:  # a TOML error is a ValueError
        raise DraftwoodError(f"The {what} {path} cannot be read", got=error) from error
