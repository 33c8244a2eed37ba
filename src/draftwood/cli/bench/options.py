"""Options of the benchmark commands: defaults come from ``BenchSettings``, lists are comma-separated."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from draftwood.bench import BenchSettings

DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(BenchSettings)}


def add_setting(
    parser: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], object],
    metavar: str,
    text: str,
    nothing: str = "none",
    **more: Any,
) -> None:
    """Add an option for a field of BenchSettings. ``nothing`` describes an empty default.

    An option that is not given is None, so that a recipe can set it; ``more`` may override this.
    """
    default = _format_default(DEFAULTS[name]) or nothing
    flag = "--" + name.replace("_", "-")
    parser.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default: {default})", **more)


def add_prompt_settings(parser: argparse._ActionsContainer) -> None:
    add_setting(parser, "tasks", words, "LIST", "comma-separated tasks", "all")
    add_setting(parser, "data", str, "PLACE", "prompts: a folder, a file, hub or hub:ORG/NAME", "bundled")
    add_setting(parser, "limit", int, "N", "prompts per task", "all")


def typed_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the user gave, by field of BenchSettings."""
    given = {name: getattr(args, name, None) for name in DEFAULTS}
    return {name: value for name, value in given.items() if value is not None}


def words(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
    return found


def numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers, as in 1,4,8,16") from None


def budgets(text: str) -> list[int | str]:
    try:
        return [word if word == "auto" else int(word) for word in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of budgets, as in auto or 8,16,60") from None


def _format_default(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
