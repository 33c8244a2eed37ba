"""``draftwood``: the commands under one name, and how they end.

Exit codes: 0 done, 1 a check found errors or the program has one, 2 the request makes no sense, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper

from draftwood import __version__
from draftwood.cli.bench import command as bench
from draftwood.cli.console import CommandParser, HelpFormatter, examples
from draftwood.cli.generation import chat, check, generate, serve
from draftwood.cli.inspect import command as inspect
from draftwood.cli.setup import datastore, drafters, models, tune
from draftwood.cli.train import command as train
from draftwood.cli.train import export
from draftwood.errors import DraftwoodError

COMMANDS = (generate, chat, serve, bench, inspect, check, models, drafters, datastore, export, train, tune)
BROKEN_PIPE = 141  # what a program gets that a closed pipe ended
ISSUES = "This is a mistake in draftwood, not in what you typed. Please report it with the lines above."


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="draftwood",
        description="Makes a language model generate faster, and its output stays the same.",
        epilog=examples(
            "draftwood generate 'Write a haiku about trees.'",
            "draftwood chat --model smollm2",
            "draftwood generate --help",
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"draftwood {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    _forgive_encodings()
    debug = os.environ.get("DRAFTWOOD_DEBUG", "0") not in ("", "0")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        args = build_parser().parse_args(given, argparse.Namespace(argv=given))
        debug = debug or args.debug
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DraftwoodError as error:
        if debug:
            traceback.print_exc()
        print(f"draftwood: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndraftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception:  # noqa: BLE001 - the last stop: whatever comes here is a bug
        traceback.print_exc()
        print(f"\ndraftwood: {ISSUES}", file=sys.stderr)
        return 1


def _forgive_encodings() -> None:
    """A letter the terminal cannot show is no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
