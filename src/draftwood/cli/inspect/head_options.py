"""The options of ``draftwood inspect head --texts``, whose defaults are those of a training run's validation."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from draftwood.cli.bench import words
from draftwood.config import DTYPES
from draftwood.errors import OptionError

# Fields of ValidateSection, told here without loading torch: the section itself has them where nothing is given.
SECTION = {"limit": "texts", "growth": "growths"}  # by option, where the name is another
DEFAULTS = {"limit": 64, "prompts": 16, "max_tokens": 128, "budget": 60, "positions": 8}
DEFAULT_GROWTHS = ("beam", "optimal", "salf")
MAX_LENGTH = 2048  # as data.max_length
_OPTIONS = (*DEFAULTS, "growth", "seed", "max_length", "dtype", "device")  # that say nothing where there are no texts


def add_worth_options(parser: argparse.ArgumentParser) -> None:
    """What is not given is None."""
    group = parser.add_argument_group("what it is worth on texts that the model wrote")
    about = "folders that draftwood train data made with this model; repeatable"
    group.add_argument("--texts", nargs="+", action="extend", metavar="FOLDER", help=about)

    def add(name: str, low: int, text: str, default: int) -> None:
        group.add_argument(_flag(name), type=_at_least(low), metavar="N", help=f"{text} (default: {default})")

    add("limit", 1, "texts at most, taken at random", DEFAULTS["limit"])
    add("seed", 0, "same seed, same texts", 0)
    add("max_length", 8, "tokens of a text that are read", MAX_LENGTH)
    add("prompts", 0, "prompts of these texts that are answered with draft trees", DEFAULTS["prompts"])
    add("max_tokens", 1, "tokens of an answer at most", DEFAULTS["max_tokens"])
    add("budget", 2, "nodes of a draft tree at most", DEFAULTS["budget"])
    about = f"how the trees grow, between commas (default: {','.join(DEFAULT_GROWTHS)})"
    group.add_argument("--growth", type=_growths, metavar="LIST", help=about)
    add("positions", 0, "places of a text where it is looked below the head's guesses", DEFAULTS["positions"])
    group.add_argument("--dtype", choices=DTYPES, help="number format of the model (default: auto, float32 on a CPU)")
    group.add_argument("--device", help="auto, cpu, cuda, cuda:1, ... (default: auto)")


def check_worth_options(args: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, what cannot be measured."""
    given = [_flag(name) for name in _OPTIONS if getattr(args, name) is not None]
    if given and not args.texts:
        raise OptionError("There are no texts to measure on", got=", ".join(given), next_step="Add --texts FOLDER.")
    if args.texts and not args.model:
        raise OptionError(
            "What a head is worth is measured with its model",
            got="--texts without --model",
            next_step="Add --model MODEL, the one that wrote the texts.",
        )
    if args.prompts == args.positions == 0:
        raise OptionError("There is nothing to measure", got="--prompts 0 --positions 0")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number, {low} or more")
        return int(text)

    return number


def _growths(text: str) -> tuple[str, ...]:
    from draftwood.growth.neural import GROWTHS  # slow to import, and seldom needed

    for name in words(text):
        if name not in GROWTHS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GROWTHS)}")
    return tuple(dict.fromkeys(words(text)))
