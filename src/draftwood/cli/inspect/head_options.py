"""Options of ``draftwood inspect head --texts``. Defaults are those of validation during training."""

import argparse
from collections.abc import Callable

from draftwood.cli.bench import words
from draftwood.config import DTYPES
from draftwood.errors import OptionError

# Copies of the defaults of ValidateSection, for help texts without importing torch.
SECTION = {"limit": "texts", "growth": "growths"}  # options with another field name
DEFAULTS = {"limit": 64, "prompts": 16, "max_tokens": 128, "budget": 60, "positions": 8}
DEFAULT_GROWTHS = ("beam", "optimal", "salf")
MAX_LENGTH = 2048  # as data.max_length
_OPTIONS = (*DEFAULTS, "growth", "seed", "max_length", "dtype", "device")  # only valid with --texts


def add_worth_options(parser: argparse.ArgumentParser) -> None:
    """Add options without defaults: None if not given."""
    group = parser.add_argument_group("evaluation on texts that the model generated")
    about = "folders written by draftwood train data with this model; repeatable"
    group.add_argument("--texts", nargs="+", action="extend", metavar="FOLDER", help=about)

    def add(name: str, low: int, text: str, default: int) -> None:
        group.add_argument(_flag(name), type=_int_parser(low), metavar="N", help=f"{text} (default: {default})")

    add("limit", 1, "maximum number of texts, chosen at random", DEFAULTS["limit"])
    add("seed", 0, "random seed for the choice of texts", 0)
    add("max_length", 8, "maximum tokens per text", MAX_LENGTH)
    add("prompts", 0, "number of prompts to answer with draft trees", DEFAULTS["prompts"])
    add("max_tokens", 1, "maximum tokens per answer", DEFAULTS["max_tokens"])
    add("budget", 2, "maximum nodes per draft tree", DEFAULTS["budget"])
    about = f"growth methods of the trees, separated by commas (default: {','.join(DEFAULT_GROWTHS)})"
    group.add_argument("--growth", type=_parse_growths, metavar="LIST", help=about)
    add("positions", 0, "positions per text where the head is evaluated after its own drafts", DEFAULTS["positions"])
    group.add_argument("--dtype", choices=DTYPES, help="dtype of the model (default: auto, float32 on a CPU)")
    group.add_argument("--device", help="auto, cpu, cuda, cuda:1, ... (default: auto)")


def check_worth_options(args: argparse.Namespace) -> None:
    """Reject conflicting options before anything is loaded."""
    given = [_flag(name) for name in _OPTIONS if getattr(args, name) is not None]
    if given and not args.texts:
        raise OptionError("These options need texts", got=", ".join(given), next_step="Add --texts FOLDER.")
    if args.texts and not args.model:
        raise OptionError(
            "--texts needs the model of the head", next_step="Add --model MODEL, the model that generated the texts."
        )
    if args.prompts == args.positions == 0:
        raise OptionError("There is nothing to measure", got="--prompts 0 --positions 0")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _int_parser(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
        return int(text)

    return parse


def _parse_growths(text: str) -> tuple[str, ...]:
    from draftwood.growth.neural import GROWTHS  # slow to import

    for name in words(text):
        if name not in GROWTHS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(GROWTHS)}")
    return tuple(dict.fromkeys(words(text)))
