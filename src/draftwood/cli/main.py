"""The ``draftwood`` command: parses arguments, runs the command, maps errors to exit codes.

Exit codes: 0 success, 1 failed check or internal error, 2 invalid arguments or input, 130 interrupted.
"""

import argparse
import os
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper

from draftwood import __version__
from draftwood.cli import bench, generation, inspect, setup, train
from draftwood.cli.options import CommandParser, HelpFormatter, format_examples, load_function, name_flags
from draftwood.errors import DraftwoodError, OptionError, did_you_mean

GROUPS = (generation, bench, inspect, setup, train)
OUT_ALIAS = re.compile(r"^--output(?==|$)")  # other programs' name for --out
STARTING_SECONDS = 0.5
BROKEN_PIPE = 141  # exit code of a process killed by SIGPIPE
ISSUES = "This is a bug in draftwood, not in your input. Please report it with the lines above."


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="draftwood",
        description="Speculative decoding: faster generation with unchanged output.",
        epilog=format_examples(
            "draftwood 'Write a haiku about trees.'", "draftwood chat --model smollm2", "draftwood generate --help"
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"draftwood {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in GROUPS:
        group.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    _replace_unencodable()
    debug = os.environ.get("DRAFTWOOD_DEBUG", "0") not in ("", "0")
    given = sys.argv[1:] if argv is None else list(argv)
    args = None
    try:
        args = parse(given)
        debug = debug or args.debug
        with _starting(args):
            run = load_function(args.run)
        code: int = run(args)
        sys.stdout.flush()
        return code
    except DraftwoodError as error:
        if debug:
            traceback.print_exc()
        print(f"draftwood: error: {name_flags(str(error), error.param, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndraftwood: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Redirect stdout, so that the flush at exit does not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception:  # noqa: BLE001 - any other exception is a bug
        traceback.print_exc()
        print(f"\ndraftwood: {ISSUES}", file=sys.stderr)
        return 1


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. A prompt alone is a request to generate."""
    parser = build_parser()
    known = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    given = complete_command([OUT_ALIAS.sub("--out", word) for word in given], list(known))
    args, rest = parser.parse_known_args(given, argparse.Namespace(argv=given))
    if rest and getattr(args, "prompt", None) and not any(word.startswith("-") for word in rest):
        prompt = " ".join([args.prompt, *rest])
        raise OptionError(
            "The prompt must be one argument",
            got=prompt,
            next_step=f"Put it in quotes: draftwood {given[0]} {shlex.quote(prompt)}",
        )
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def complete_command(given: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Add what may be left out: ``draftwood`` prints help, ``draftwood "a prompt"`` generates."""
    if not given:
        return ["--help"]
    first = given[0]
    if first in commands or first in ("-h", "--help", "--version"):
        return list(given)
    if len(first.split()) > 1 or (first.startswith("-") and any(len(part.split()) > 1 for part in given)):
        return ["generate", *given]
    if first.startswith("-"):
        return list(given)  # argparse explains what is missing
    words = " ".join(part for part in given if not part.startswith("-"))
    raise OptionError(
        f"There is no command {first!r}",
        allowed=commands,
        next_step=did_you_mean(first, commands) or f"If it is a prompt: draftwood generate {shlex.quote(words)}",
    )


@contextmanager
def _starting(args: argparse.Namespace) -> Iterator[None]:
    """On a terminal, tell that the program starts if importing takes long: on a slow disk it is many seconds."""
    if not sys.stderr.isatty() or getattr(args, "quiet", False):
        yield
        return
    told = threading.Event()

    def tell() -> None:
        told.set()
        sys.stderr.write("starting ...")
        sys.stderr.flush()

    timer = threading.Timer(STARTING_SECONDS, tell)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if told.is_set():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _replace_unencodable() -> None:
    """Print a replacement for characters that the output encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
