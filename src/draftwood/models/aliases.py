"""Names that the user gave to models on this disk: ``draftwood models add NAME PATH``."""

from __future__ import annotations

import json
from pathlib import Path

from draftwood.disk import cache_home, lock_entry, write_json
from draftwood.errors import ModelError

_FILE = "aliases.json"


def read_aliases() -> dict[str, Path]:
    """The folder or GGUF file of each name. Empty if there is no file, or if it is damaged."""
    try:
        content = json.loads((cache_home() / _FILE).read_text(encoding="utf-8"))
        return {str(name): Path(path) for name, path in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def add_alias(name: str, path: Path, taken: set[str]) -> None:
    """Names a folder or a GGUF file. ``taken`` are the names of other models."""
    if not name or Path(name).name != name or name.startswith((".", "-")) or name.endswith(".gguf") or name in taken:
        raise ModelError(
            "This name cannot be given",
            got=repr(name),
            allowed="letters, digits, '-', '_' and '.', and no name that 'draftwood models list' shows",
        )
    with lock_entry(_FILE):
        write_json(cache_home() / _FILE, {**_as_texts(read_aliases()), name: str(path)})


def remove_alias(name: str) -> None:
    with lock_entry(_FILE):
        write_json(cache_home() / _FILE, {key: path for key, path in _as_texts(read_aliases()).items() if key != name})


def _as_texts(aliases: dict[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in aliases.items()}
