"""Options shared by several commands. Defaults come from the library."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
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
    """Accepts options between the values of a list argument."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        lists = [action.dest for action in self._actions if not action.option_strings and action.nargs in ("*", "+")]
        if not lists:
            return found, rest
        more = list(takewhile(lambda text: not text.startswith("-"), rest))  # later ones may belong to an option
        setattr(found, lists[-1], [*getattr(found, lists[-1]), *more])
        return found, rest[len(more) :]


def format_examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_command(
    commands: Subparsers[Any], name: str, run: str, summary: str, *lines: str, details: str = ""
) -> argparse.ArgumentParser:
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
) -> argparse.ArgumentParser:
    text = f"{summary}.\n\n{details}" if details else f"{summary}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text, epilog=format_examples(*lines), formatter_class=HelpFormatter
    )
    return parser


def add_run_options(parser: argparse.ArgumentParser, *, own_trees: bool = False) -> None:
    """Add options to load and run a model. ``own_trees``: the command sets tree size and memory itself."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    if not own_trees:
        _add_draft_options(group)
    _add_sampling_options(parser)


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """Add the same options without sampling, which each request sets."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    _add_draft_options(group)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="prompt; if omitted or '-', read from standard input")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as text, without a chat template")


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
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    group.add_argument("--target", choices=TARGETS, default="auto", help="decoder backend (default: auto)")
    return group


def _add_drafter_options(group: Group) -> None:
    group.title = "model and drafter"
    group.add_argument(
        "--drafter",
        metavar="NAME",
        default=DEFAULT_DRAFTER,
        help=f"drafter, see: draftwood drafters (default: {DEFAULT_DRAFTER})",
    )
    group.add_argument(
        "--drafter-option", metavar="KEY=VALUE", action="append", default=[], help="option of the drafter; repeatable"
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


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: Callable[[str], object], text: str) -> None:
        default = _field_default(SamplingParams, name)
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag,
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
