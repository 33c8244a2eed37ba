"""Options shared by several commands. Defaults come from the library."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from itertools import takewhile
from typing import Any

from draftwood.config import (
    DEFAULT_DRAFTER,
    DEFAULT_MEMORY,
    DEFAULT_MODEL,
    DTYPES,
    QUANTIZE,
    TARGETS,
    EngineOptions,
    ModelOptions,
    SamplingParams,
    parse_value,
)
from draftwood.errors import OptionError

# argparse has no public names for these return types.
Subparsers = argparse._SubParsersAction
Group = argparse._ArgumentGroup
HelpFormatter = argparse.RawDescriptionHelpFormatter


class CommandParser(argparse.ArgumentParser):
    """Accepts options between the values of a list argument.

    ``more_help``, a function by "module:function", returns text for --help that is slow to make.
    """

    more_help = ""

    def format_help(self) -> str:
        text = super().format_help()
        return f"{text}\n{load_function(self.more_help)()}" if self.more_help else text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        lists = [action.dest for action in self._actions if not action.option_strings and action.nargs in ("*", "+")]
        if not lists:
            return found, rest
        more = list(takewhile(lambda text: not text.startswith("-"), rest))  # later ones may belong to an option
        setattr(found, lists[-1], [*getattr(found, lists[-1]), *more])
        return found, rest[len(more) :]


def load_function(name: str) -> Callable[..., Any]:
    """Import "module:function", relative to this package."""
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(import_module(f"draftwood.cli.{module}"), function)
    return found


def format_examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_command(
    commands: Subparsers[Any], name: str, run: str, summary: str, *lines: str, details: str = ""
) -> CommandParser:
    """Add a command with the options that all commands share.

    ``run`` is "module:function" in this package. The module is imported when the command runs, so that --help does
    not import torch. ``lines`` are examples.
    """
    parser = _add_parser(commands, name, summary, details, lines)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours (default: auto)")
    parser.add_argument("--debug", action="store_true", help="print the stack trace of errors")
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Subparsers[Any], name: str, summary: str, *lines: str) -> Subparsers[Any]:
    """Add a command that has subcommands."""
    return _add_parser(commands, name, summary, "", lines).add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )


def _add_parser(
    commands: Subparsers[Any], name: str, summary: str, details: str, lines: tuple[str, ...]
) -> CommandParser:
    text = f"{summary}.\n\n{details}" if details else f"{summary}."
    parser: CommandParser = commands.add_parser(
        name, help=summary, description=text, epilog=format_examples(*lines), formatter_class=HelpFormatter
    )
    return parser


def add_run_options(parser: argparse.ArgumentParser, *, own_trees: bool = False, max_tokens: int | None = None) -> None:
    """Add options to load and run a model. ``own_trees``: the command sets tree size and memory itself.
    ``max_tokens``: another default."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    if not own_trees:
        _add_draft_options(group)
    _add_sampling_options(parser, {} if max_tokens is None else {"max_tokens": max_tokens})


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """Add the same options without sampling, which each request sets."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    _add_draft_options(group)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="prompt; text piped to standard input is added after it")
    parser.add_argument("--file", metavar="F", help="add the text of this file to the prompt")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as text, without a chat template")


def add_stats_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--stats", action="store_true", help="print all statistics of an answer, not only its speed")
    group.add_argument("--quiet", action="store_true", help="print nothing but the answer and errors")


def add_model_options(parser: argparse.ArgumentParser) -> Group:
    """Add options to load a model. Return their argument group."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"model name, folder, GGUF file or hub id, see: draftwood models list (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: auto)")
    group.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="quantize the weights: less memory, different outputs; fp8 and int8 on GPUs, as in --device cuda "
        "--quantize fp8, the others on CPUs",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="GPUs: compute a token with the same bits in every pass, so that outputs equal plain decoding; slower "
        "(CPU decoders always do)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    group.add_argument("--target", choices=TARGETS, default="auto", help="decoder backend (default: auto)")
    return group


def _add_drafter_options(group: Group) -> None:
    group.title = "model and drafter"
    group.add_argument(
        "--drafter",
        metavar="NAME",
        default=DEFAULT_DRAFTER,
        help=f"drafter, see: draftwood drafters; or FILE.py:CLASS (default: {DEFAULT_DRAFTER})",
    )
    group.add_argument(
        "--drafter-option", metavar="KEY=VALUE", action="append", default=[], help="option of the drafter; repeatable"
    )
    group.add_argument(
        "--sources",
        metavar="A+B",
        dest="drafter_option",
        type="sources={}".format,
        action="append",
        default=argparse.SUPPRESS,
        help="sources of the drafter blend, for example context+transition+head: the same as "
        "--drafter-option sources=A+B",
    )


def _add_draft_options(group: Group) -> None:
    group.add_argument(
        "--memory",
        metavar="SCOPE|FILE",
        default=DEFAULT_MEMORY,
        help="scope of the drafter state: request, prompt, process, or a file to keep it "
        f"(default: {DEFAULT_MEMORY}; chat, serve: process)",
    )
    budget = _field_default(EngineOptions, "budget")
    group.add_argument(
        "--budget",
        type=parse_value,
        default=budget,
        help=f"positions per verification pass, or auto (default: {budget})",
    )


def _add_sampling_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: Callable[[str], object], text: str) -> None:
        default = defaults.get(name, _field_default(SamplingParams, name))
        group.add_argument(
            _flag(name),
            type=kind,
            default=default,
            metavar="N",
            help=f"{text} (default: {'none' if default is None else default})",
        )

    add("max_tokens", int, "maximum number of output tokens")
    add("temperature", float, "0 is greedy, higher is more varied")
    add("top_k", int, "sample from the N most likely tokens, 0: all")
    add("top_p", float, "sample from the top tokens with this total probability")
    add("min_p", float, "minimum probability, relative to the most likely token")
    add("repetition_penalty", float, "penalty for tokens in prompt or output, 1: none")
    add("presence_penalty", float, "penalty for tokens in the output, 0: none")
    add("frequency_penalty", float, "penalty per occurrence in the output, 0: none")
    add("seed", int, "random seed")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="stop before this text; repeatable")


def model_options(args: argparse.Namespace, **more: Any) -> ModelOptions:
    given = {f.name: getattr(args, f.name) for f in fields(ModelOptions) if hasattr(args, f.name)}
    return ModelOptions(**{**given, **more})


def sampling_params(args: argparse.Namespace, **more: Any) -> SamplingParams:
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}
    return SamplingParams(**{**given, **more})


def name_flags(text: str, param: str | None, args: argparse.Namespace | None) -> str:
    """Replace option names of the library by the flags of the command, as in ``max_tokens`` and ``device='cpu'``."""
    names = {f.name for record in (SamplingParams, ModelOptions, EngineOptions) for f in fields(record)}
    names = {name for name in names if args is None or hasattr(args, name)}
    if param in names and text.startswith(f"{param} "):
        text = f"{_flag(param)}{text.removeprefix(param)}"
    options = "|".join(sorted(names)) or "(?!)"
    text = re.sub(
        rf"(?<![\w.-])(?<!--drafter-option )({options})=('?)([\w-]+)\2",
        lambda found: f"{_flag(found[1])} {found[3]}",
        text,
    )
    composed = "|".join(sorted(name for name in names if "_" in name)) or "(?!)"
    return re.sub(rf"(?<![\w.'-])({composed})(?![\w='])", lambda found: _flag(found[1]), text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def drafter_options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise OptionError("Invalid drafter option", got=pair, allowed="KEY=VALUE")
        options[key.strip().replace("-", "_")] = parse_value(value)
    return options


def _field_default(record: type, name: str) -> Any:
    return next(f.default for f in fields(record) if f.name == name)
