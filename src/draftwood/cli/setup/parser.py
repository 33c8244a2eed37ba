"""Parsers of the commands in this folder. Commands are imported when they run, so that --help stays fast."""

from __future__ import annotations

from typing import Any

from draftwood.cli.options import Subparsers, add_command, add_group, add_run_options
from draftwood.config import DEFAULT_MODEL

_MODELS_EXAMPLES = ("draftwood models list", "draftwood models get smollm2", "draftwood models show ./my-model --json")


def register_models(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "models", "List, fetch, name, describe and remove models", *_MODELS_EXAMPLES)
    for name, run, summary in (
        ("list", "setup.models:_list", "List known and downloaded models"),
        ("get", "setup.models:_get", "Download or convert a model, unless it is on disk"),
        ("path", "setup.models:_print_path", "Print the folder or file of a model on this disk"),
        ("rm", "setup.models:_remove", "Remove a downloaded model from disk, or a name that you gave"),
        ("show", "setup.models:_show", "Describe a model: size, shape, memory and origin"),
    ):
        operand = "" if name == "list" else " smollm2"
        line = f"draftwood models {name}{operand}"
        action = add_command(actions, name, run, summary, line, f"{line} --json")
        if operand:
            local = name == "rm"
            source = "name, see: draftwood models list" if local else "model name, folder, GGUF file or hub id"
            action.add_argument("name", help=source)
        action.add_argument("--json", action="store_true", help="print one JSON object")
    add = add_command(
        actions,
        "add",
        "setup.models:_add",
        "Give a name to a folder or a GGUF file",
        "draftwood models add coder ~/models/coder-q4_k_m.gguf",
        "draftwood generate --model coder 'Write a function that adds two numbers.'",
    )
    add.add_argument("name", help="the new name")
    add.add_argument("path", help="folder or GGUF file")
    add.add_argument("--json", action="store_true", help="print one JSON object")


def register_drafters(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "drafters",
        "setup.drafters:run",
        "List the drafters, or explain the options of one",
        "draftwood drafters",
        "draftwood drafters goose",
        "draftwood generate --drafter goose --drafter-option bypass=copied 'Count to ten, twice.'",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="explain this drafter: a name, or FILE.py:CLASS")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


_DATASTORE_BUILD = (
    "draftwood datastore build notes.txt docs/ --out my.draftwood-datastore",
    "draftwood datastore build answers.jsonl --field completion --out answers.store --model ./my-model",
)


_DATASTORE_SHOW = ("draftwood datastore show my.draftwood-datastore",)


_DATASTORE_USE = "draftwood generate --drafter rest --drafter-option datastore=my.draftwood-datastore 'Hello'"


_DATASTORE_DETAILS = """\
Each text file and each line of a .jsonl file is one document. Folders are searched for *.txt, *.md,
*.py and *.jsonl. The datastore works with every model that has the same tokenizer."""


def register_datastore(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "datastore", "Build or describe a datastore", *_DATASTORE_BUILD, _DATASTORE_USE)
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
    build.add_argument("--out", required=True, metavar="FILE", help="output file")
    build.add_argument("--model", default=DEFAULT_MODEL, help=f"model of the tokenizer (default: {DEFAULT_MODEL})")
    build.add_argument("--field", metavar="NAME", help="field of the text in .jsonl files (default: the usual names)")
    build.add_argument("--force", action="store_true", help="replace an existing file")
    facts = add_command(
        actions,
        "show",
        "setup.datastore:_show",
        "Describe a datastore",
        *_DATASTORE_SHOW,
        f"{_DATASTORE_SHOW[0]} --json",
    )
    facts.add_argument("file", help="datastore file")
    for action in (build, facts):
        action.add_argument("--json", action="store_true", help="print one JSON object")


_TUNE_DETAILS = """\
Without --static-tree: measure the time of passes over 1 to 64 positions at several context lengths
(with CUDA graphs: over the sizes of the graphs, up to 512), which --budget auto uses to choose tree
sizes. Also build the table of likely successors of each token, the initial state of drafters with a
transition table. Both are stored in the cache folder.

With --static-tree: answer prompts with a tree of 625 nodes and keep the nodes accepted most often.
Use the file with --drafter-option tree=FILE of stand, recycling and sequoia.

With --priors: answer prompts with blend and fit what it believes about its sources at first. Without
FILE the result is kept in the cache folder, and blend uses it from then on.

With --explain: decode prompts plainly, with chains (sam), trees (blend) and, where a head ships,
trees and head, at equal budgets and with --budget auto: does a tree pay here?"""


def register_tune(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "tune",
        "setup.tune:run",
        "Measure a model on this machine once for later runs",
        "draftwood tune",
        "draftwood tune --explain --plot pays.svg",
        "draftwood tune --static-tree t.json --prompts p.jsonl --drafter stand --temperature 0.6",
        details=_TUNE_DETAILS,
    )
    parser.add_argument("--no-successors", action="store_true", help="do not build the successor table")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--priors", nargs="?", const="", metavar="FILE", help="measure the first beliefs of blend, on prompts"
    )
    parser.add_argument("--explain", action="store_true", help="compare plain decoding, chains and trees on prompts")
    parser.add_argument("--plot", metavar="FILE", help="--explain: also write a plot to this .svg file")
    tree = parser.add_argument_group("static tree, priors, explain")
    tree.add_argument("--static-tree", metavar="FILE", help="optimise a static tree and write it to this file")
    tree.add_argument("--prompts", metavar="FILE", help="prompts to measure on: one per line, or .jsonl")
    tree.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    tree.add_argument("--samples", type=int, default=1, metavar="N", help="samples per prompt (default: 1)")
    tree.add_argument("--size", type=int, default=80, metavar="N", help="nodes to keep, with the root (default: 80)")
    tree.add_argument("--force", action="store_true", help="replace an existing file")
    add_run_options(parser, own_trees=True)


def register(commands: Subparsers[Any]) -> None:
    for register_command in (register_models, register_drafters, register_datastore, register_tune):
        register_command(commands)
