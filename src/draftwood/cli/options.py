"""The options that commands share: spelled and explained in one place, their defaults read off the library's own."""

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

# The types of what add_subparsers and add_argument_group return have no public names.
Subparsers = argparse._SubParsersAction
Group = argparse._ArgumentGroup
HelpFormatter = argparse.RawDescriptionHelpFormatter


class CommandParser(argparse.ArgumentParser):
    """Takes a list of arguments in several groups too, with options between them."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        lists = [action.dest for action in self._actions if not action.option_strings and action.nargs in ("*", "+")]
        if not lists:
            return found, rest
        more = list(takewhile(lambda text: not text.startswith("-"), rest))  # the others may belong to an option
        setattr(found, lists[-1], [*getattr(found, lists[-1]), *more])
        return found, rest[len(more) :]


def examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_command(
    commands: Subparsers[Any],
    name: str,
    run: str,
    summary: str,
    *lines: str,
    details: str = "",
) -> argparse.ArgumentParser:
    """A command's parser with the options that all commands share.

    ``run`` is "module:function" inside this package: the module is imported when the command runs, so that help texts
    do not wait for torch. ``lines`` are examples.
    """
    parser = _parser(commands, name, summary, details, lines)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours (default: auto)")
    parser.add_argument("--debug", action="store_true", help="show where in the program an error arose")
    parser.set_defaults(run=run)
    return parser


def add_group(commands: Subparsers[Any], name: str, summary: str, *lines: str) -> Subparsers[Any]:
    """A name that other commands stand under."""
    return _parser(commands, name, summary, "", lines).add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )


def _parser(
    commands: Subparsers[Any], name: str, summary: str, details: str, lines: tuple[str, ...]
) -> argparse.ArgumentParser:
    text = f"{summary}.\n\n{details}" if details else f"{summary}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text, epilog=examples(*lines), formatter_class=HelpFormatter
    )
    return parser


def add_run_options(parser: argparse.ArgumentParser, *, own_trees: bool = False) -> None:
    """What every command takes that runs a model. With ``own_trees`` the size of trees and the memory are its own."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    if not own_trees:
        _add_draft_options(group)
    _add_sampling_options(parser)


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """The same without how answers are sampled: each request says that for itself."""
    group = add_model_options(parser)
    _add_drafter_options(group)
    _add_draft_options(group)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or nothing reads it from standard input")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")


def add_model_options(parser: argparse.ArgumentParser) -> Group:
    """Which model, and how it runs; returns the group they stand in."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"a known name, a folder, a GGUF file or a hub id, see: draftwood models list (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="number format (default: auto)")
    group.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="hold the weights in 8 bits: half the memory, and another model; GPUs only, as in --device cuda "
        "--quantize fp8",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    group.add_argument("--target", choices=TARGETS, default="auto", help="which decoder runs it (default: auto)")
    return group


def _add_drafter_options(group: Group) -> None:
    group.title = "model and drafter"
    group.add_argument(
        "--drafter",
        metavar="NAME",
        default=DEFAULT_DRAFTER,
        help=f"where the guesses come from, see: draftwood drafters (default: {DEFAULT_DRAFTER})",
    )
    group.add_argument(
        "--drafter-option", metavar="KEY=VALUE", action="append", default=[], help="one of its options; repeatable"
    )


def _add_draft_options(group: Group) -> None:
    group.add_argument(
        "--memory",
        metavar="SCOPE|FILE",
        default=DEFAULT_MEMORY,
        help="who shares what the drafter learns: request, prompt, process, or a file that keeps it "
        f"(default: {DEFAULT_MEMORY}; chat, serve: process)",
    )
    budget = _default(EngineOptions, "budget")
    group.add_argument(
        "--budget",
        type=parse_value,
        default=budget,
        help=f"positions per verification pass, or auto (default: {budget})",
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")

    def add(name: str, kind: Callable[[str], object], text: str) -> None:
        default = _default(SamplingParams, name)
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag,
            type=kind,
            default=default,
            metavar="N",
            help=f"{text} (default: {'none' if default is None else default})",
        )

    add("max_tokens", int, "tokens of output at most")
    add("temperature", float, "0 is greedy, higher is more varied")
    add("top_k", int, "only the N likeliest tokens, 0: all")
    add("top_p", float, "only the likeliest tokens that share this much probability")
    add("min_p", float, "only tokens with this share of the likeliest one's probability")
    add("repetition_penalty", float, "against tokens of prompt and output, 1: none")
    add("presence_penalty", float, "against tokens of the output, once each, 0: none")
    add("frequency_penalty", float, "against tokens of the output, by their count, 0: none")
    add("seed", int, "same seed, same draws")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")


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
            raise OptionError("A drafter option is a name and a value", got=repr(pair), allowed="KEY=VALUE")
        options[key.strip().replace("-", "_")] = parse_value(value)
    return options


def _default(record: type, name: str) -> Any:
    return next(f.default for f in fields(record) if f.name == name)
