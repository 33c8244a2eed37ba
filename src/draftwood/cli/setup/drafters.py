"""``draftwood drafters``: which there are and what they can be told."""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from draftwood.cli.console import BOLD, DIM, Screen, Subparsers, add_command
from draftwood.config import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from draftwood.drafters import Drafter


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "drafters",
        run,
        "List the drafters with their options and defaults",
        "draftwood drafters",
        "draftwood drafters --json",
        "draftwood generate --drafter goose --drafter-option bypass=copied 'Count to ten, twice.'",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    from draftwood.drafters import drafter_class, drafter_names
    from draftwood.heads import list_shipped_heads

    found = {name: drafter_class(name) for name in drafter_names()}
    if args.json:
        listed = {
            name: {
                "summary": _summary(cls),
                "options": _options(cls),
                "heads": [head.name for head in list_shipped_heads(name)],
            }
            for name, cls in found.items()
        }
        print(json.dumps({"default": DEFAULT_DRAFTER, "drafters": listed}, default=str))
        return 0
    paint = Screen(args.color).out
    for name, cls in found.items():
        default = paint("  (default)", DIM) if name == DEFAULT_DRAFTER else ""
        print(f"{paint(name, BOLD)}{default}\n  {_summary(cls)}")
        for head in list_shipped_heads(name):
            print(f"  ships with the head {head.title}")
        options = _options(cls)
        for option, value in options.items():
            print(f"    {option:{max(map(len, options))}}  {paint(str(value), DIM)}")
    return 0


def _summary(cls: type[Drafter]) -> str:
    """The first line of the class's description, without the name it opens with."""
    line = (cls.__doc__ or "").strip().split("\n")[0]
    return line.removeprefix(f"`{cls.name}`: ")


def _options(cls: type[Drafter]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for option in fields(cls.Options):
        made = option.default_factory() if option.default_factory is not MISSING else "required"
        defaults[option.name] = option.default if option.default is not MISSING else made
    return defaults
