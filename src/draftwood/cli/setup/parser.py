"""Parsers of the commands in this folder. Light to import: the commands themselves are loaded when they run."""

from __future__ import annotations

from typing import Any

from draftwood.cli.options import Subparsers, add_command, add_group, add_run_options
from draftwood.config import DEFAULT_MODEL

_MODELS_EXAMPLES = ("draftwood models list", "draftwood models get smollm2", "draftwood models show ./my-model --json")


def register_models(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "models", "List, fetch, describe and remove models", *_MODELS_EXAMPLES)
    for name, run, summary in (
        ("list", "setup.models:_list", "List the models that are known or kept on this disk"),
        ("get", "setup.models:_get", "Fetch or convert a model, unless it is here already"),
        ("path", "setup.models:_path", "Print the folder a kept model lies in"),
        ("rm", "setup.models:_remove", "Remove a kept model from this disk"),
        ("show", "setup.models:_show", "State a model's size, shape, memory and origin"),
    ):
        operand = "" if name == "list" else " smollm2"
        line = f"draftwood models {name}{operand}"
        action = add_command(actions, name, run, summary, line, f"{line} --json")
        if operand:
            kept = name in ("path", "rm")
            source = "as models list shows it" if kept else "a known name, a folder, a GGUF file or a hub id"
            action.add_argument("name", help=source)
        action.add_argument("--json", action="store_true", help="one JSON object on stdout")


def register_drafters(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "drafters",
        "setup.drafters:run",
        "List the drafters with their options and defaults",
        "draftwood drafters",
        "draftwood drafters --json",
        "draftwood generate --drafter goose --drafter-option bypass=copied 'Count to ten, twice.'",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


_DATASTORE_BUILD = (
    "draftwood datastore build notes.txt docs/ --output my.draftwood-datastore",
    "draftwood datastore build answers.jsonl --field completion --output answers.store --model ./my-model",
)


_DATASTORE_SHOW = ("draftwood datastore show my.draftwood-datastore",)


_DATASTORE_USE = "draftwood generate --drafter rest --drafter-option datastore=my.draftwood-datastore 'Hello'"


_DATASTORE_DETAILS = """\
A text file is one document, a line of a .jsonl file another; folders are searched for *.txt, *.md,
*.py and *.jsonl. The datastore serves every model with the same tokenizer."""


def register_datastore(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "datastore", "Make texts ready to draft from", *_DATASTORE_BUILD, _DATASTORE_USE)
    build = add_command(
        actions,
        "build",
        "setup.datastore:_build",
        "Build a datastore from texts",
        *_DATASTORE_BUILD,
        _DATASTORE_USE,
        details=_DATASTORE_DETAILS,
    )
    build.add_argument("files", nargs="+", metavar="FILES", help="text files, .jsonl files or folders")
    build.add_argument("--output", required=True, metavar="NAME", help="the file to write")
    build.add_argument("--model", default=DEFAULT_MODEL, help=f"whose tokenizer to use (default: {DEFAULT_MODEL})")
    build.add_argument("--field", metavar="NAME", help="where .jsonl files keep the text (default: the usual names)")
    build.add_argument("--force", action="store_true", help="replace the output where it exists")
    facts = add_command(
        actions,
        "show",
        "setup.datastore:_show",
        "State what a datastore holds",
        *_DATASTORE_SHOW,
        f"{_DATASTORE_SHOW[0]} --json",
    )
    facts.add_argument("file", help="the datastore")
    for action in (build, facts):
        action.add_argument("--json", action="store_true", help="one JSON object on stdout")


_TUNE_DETAILS = """\
Without --static-tree: times passes over 1 to 64 positions (where the decoder has a CUDA graph for
each of certain sizes: over those, up to 512) at a few lengths of context, from which --budget auto
takes the size of its trees, and makes the table of what follows each token of the vocabulary, from
which drafters over transitions start. Both are kept in the cache.

With --static-tree: answers prompts with a tree of 625 nodes and keeps those that were accepted
most. The file is for --drafter-option tree=FILE of stand, recycling and sequoia."""


def register_tune(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "tune",
        "setup.tune:run",
        "Measure this machine and model once, for all later runs",
        "draftwood tune",
        "draftwood tune --model smollm2 --no-successors",
        "draftwood tune --static-tree t.json --prompts p.jsonl --drafter stand --temperature 0.6",
        details=_TUNE_DETAILS,
    )
    parser.add_argument("--no-successors", action="store_true", help="leave the successor table as it is")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    tree = parser.add_argument_group("static tree")
    tree.add_argument("--static-tree", metavar="FILE", help="measure a static tree and write it there")
    tree.add_argument("--prompts", metavar="FILE", help="what it is measured on; one a line, or .jsonl")
    tree.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    tree.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    tree.add_argument("--size", type=int, default=80, metavar="N", help="nodes to keep, root included (default: 80)")
    tree.add_argument("--force", action="store_true", help="replace the tree's file")
    add_run_options(parser, own_trees=True)


def register(commands: Subparsers[Any]) -> None:
    for register_command in (register_models, register_drafters, register_datastore, register_tune):
        register_command(commands)
