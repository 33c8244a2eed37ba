"""The file of a recipe, read strictly: what is not expected is an error that names the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from draftwood.disk import read_toml
from draftwood.errors import OptionError


class RecipeFile:
    """The content of a TOML file, and what may be asked of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_toml(path, "recipe")

    def text(self, name: str) -> str:
        value = self.content.get(name)
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"{name!r} is a text", repr(value))
        return value.strip()

    def listed(self, name: str, kind: type[int] | type[str]) -> tuple[Any, ...]:
        """A list of numbers or texts; empty where there is none."""
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.refuse(f"{name!r} is a list", repr(value), "[1, 2]" if kind is int else '["...", "..."]')
        return tuple(value)

    def table(self, holder: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = holder.get(name, {})
        if not isinstance(value, dict):
            self.refuse(f"{name!r} is a table", repr(value), f"[{name}]")
        return dict(value)

    def tables(self, name: str) -> list[dict[str, Any]]:
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.refuse(f"{name!r} is a list of tables", repr(value), f"[[{name}]]")
        return list(value)

    def only(self, values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        unknown = sorted(set(values) - set(known))
        if unknown:
            self.refuse(f"{where} has no key {', '.join(map(repr, unknown))}", allowed=known)

    def refuse(self, what: str, got: object = None, allowed: object = None) -> NoReturn:
        raise OptionError(f"The recipe {self.path} is not as it should be: {what}", got=got, allowed=allowed)
