"""Strict reading of a recipe's TOML file: anything unexpected is an error that names the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from draftwood.disk import read_toml
from draftwood.errors import OptionError


class RecipeFile:
    """The content of a TOML file with checked access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_toml(path, "recipe")

    def get_text(self, name: str) -> str:
        value = self.content.get(name)
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"{name!r} must be a string", repr(value))
        return value.strip()

    def get_list(self, name: str, kind: type[int] | type[str]) -> tuple[Any, ...]:
        """Get a list of integers or strings; empty if missing."""
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.refuse(f"{name!r} must be a list", repr(value), "[1, 2]" if kind is int else '["...", "..."]')
        return tuple(value)

    def get_table(self, holder: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = holder.get(name, {})
        if not isinstance(value, dict):
            self.refuse(f"{name!r} must be a table", repr(value), f"[{name}]")
        return dict(value)

    def get_tables(self, name: str) -> list[dict[str, Any]]:
        value = self.content.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.refuse(f"{name!r} must be a list of tables", repr(value), f"[[{name}]]")
        return list(value)

    def check_keys(self, values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        unknown = sorted(set(values) - set(known))
        if unknown:
            self.refuse(f"{where} has no key {', '.join(map(repr, unknown))}", allowed=known)

    def refuse(self, what: str, got: object = None, allowed: object = None) -> NoReturn:
        raise OptionError(f"The recipe {self.path} is invalid: {what}", got=got, allowed=allowed)
