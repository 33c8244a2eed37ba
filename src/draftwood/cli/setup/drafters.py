"""``draftwood drafters``: list the registered drafters with their options."""

import argparse
import json
from dataclasses import MISSING, fields
from typing import Any

from draftwood.cli.console import BOLD, DIM, Screen
from draftwood.config import DEFAULT_DRAFTER
from draftwood.drafters import Drafter, drafter_classes
from draftwood.heads import list_shipped_heads


def run(args: argparse.Namespace) -> int:
    classes = drafter_classes()
    if args.json:
        rows = {
            name: {
                "summary": _find_summary(cls),
                "guesses_from": cls.guesses_from,
                "tree_shape": cls.tree_shape,
                "copies_text": cls.copies_text,
                "options": _find_defaults(cls),
                "heads": [head.name for head in list_shipped_heads(name)],
            }
            for name, cls in classes.items()
        }
        print(json.dumps({"default": DEFAULT_DRAFTER, "drafters": rows}, default=str))
        return 0
    paint = Screen(args.color).out
    for name, cls in classes.items():
        default = paint("  (default)", DIM) if name == DEFAULT_DRAFTER else ""
        print(f"{paint(name, BOLD)}{default}\n  {_find_summary(cls)}")
        for title, value in (("guesses from", cls.guesses_from), ("tree", cls.tree_shape)):
            if value:
                print(f"  {title}: {value}")
        for head in list_shipped_heads(name):
            print(f"  ships with the head {head.title}")
        options = _find_defaults(cls)
        for option, value in options.items():
            print(f"    {option:{max(map(len, options))}}  {paint(str(value), DIM)}")
    return 0


def _find_summary(cls: type[Drafter]) -> str:
    """Return the summary, or the first line of the docstring for external drafters without one."""
    return cls.summary or (cls.__doc__ or "").strip().split("\n")[0]


def _find_defaults(cls: type[Drafter]) -> dict[str, Any]:
    """Return the default of each option."""
    defaults: dict[str, Any] = {}
    for option in fields(cls.Options):
        value = option.default_factory() if option.default_factory is not MISSING else "required"
        defaults[option.name] = option.default if option.default is not MISSING else value
    return defaults
