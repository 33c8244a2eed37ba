"""Parsers of the commands in this folder. Commands are imported when they run, so that --help stays fast."""

from __future__ import annotations

from typing import Any

from draftwood.cli.inspect.head_options import add_worth_options
from draftwood.cli.options import Subparsers, add_command, add_group, add_prompt_options, add_run_options

_INSPECT_EXAMPLES = (
    "draftwood inspect tree 'Say one two three, one two three.'",
    "draftwood inspect tree --skip 10 --cycles 5 'Explain recursion.'",
    "draftwood inspect tree --json --cycles 1 'Hello'",
)


_INSPECT_DETAILS = """\
One node per line: its token, draft source, draft probability, and a tick if it was accepted. An only
child is printed below its parent, siblings branch off. The last line is the bonus token of the
target."""


def register(commands: Subparsers[Any]) -> None:
    lines = (*_INSPECT_EXAMPLES[:2], _THEORY_EXAMPLES[0], _HEAD_EXAMPLES[0])
    views = add_group(commands, "inspect", "Show draft trees, chances, expected yields or a draft head", *lines)
    tree = add_command(
        views,
        "tree",
        "inspect.command:run",
        "Draw the draft trees of some cycles",
        *_INSPECT_EXAMPLES,
        details=_INSPECT_DETAILS,
    )
    add_prompt_options(tree)
    tree.add_argument("--cycles", type=int, default=3, metavar="N", help="cycles to show (default: 3)")
    tree.add_argument("--skip", type=int, default=0, metavar="K", help="cycles to skip first (default: 0)")
    tree.add_argument("--json", action="store_true", help="print one JSON object")
    add_run_options(tree)
    register_calibration(views)
    register_theory(views)
    register_head(views)


_CALIBRATION_EXAMPLES = (
    "draftwood inspect calibration --drafter blend",
    "draftwood inspect calibration --drafter goose --prompts p.jsonl --plot goose.svg",
)


_CALIBRATION_DETAILS = """\
Answers prompts and compares the chance that the drafter gave to each verified guess, if its parent
was accepted, with how often such guesses came true. The calibration error is the mean distance of
the two. Only `blend` learns its chances; the numbers of other drafters are their own scores."""


def register_calibration(views: Subparsers[Any]) -> None:
    parser = add_command(
        views,
        "calibration",
        "inspect.calibration:run",
        "Compare expected with real acceptance",
        *_CALIBRATION_EXAMPLES,
        details=_CALIBRATION_DETAILS,
    )
    parser.add_argument("--prompts", metavar="FILE", help="one prompt per line, or .jsonl (default: bundled ones)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="use the first N prompts (default: all of FILE, 2 of each bundled task)"
    )
    parser.add_argument(
        "--skip-tokens", type=int, default=0, metavar="N", help="leave out the first N tokens (default: 0)"
    )
    parser.add_argument("--plot", metavar="FILE", help="also write a plot to this .svg file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_run_options(parser)


_THEORY_EXAMPLES = (
    "draftwood inspect theory --ps 0.3 --pt 0.03 --budget 60",
    "draftwood inspect theory --ps 0.6 --pt 0.05 --budget 16 --json",
    "draftwood inspect theory --ps 0.3 --pt 0.03 --plot yield.svg",
)


_THEORY_DETAILS = """\
Copied tokens (the spine) are accepted with probability p_s, all others with p_t, independently.
Tokens per pass include the bonus token; nodes include the root. A branch is a chain whose nodes all
count, except in the row 'tails free', where only the first one counts. A node may have any number
of children, even more than a transition table holds."""


def register_theory(views: Subparsers[Any]) -> None:
    parser = add_command(
        views,
        "theory",
        "inspect.theory:run",
        "Compare the expected yield of trees",
        *_THEORY_EXAMPLES,
        details=_THEORY_DETAILS,
    )
    parser.add_argument("--ps", type=float, default=0.3, metavar="P", help="spine acceptance rate (default: 0.3)")
    parser.add_argument("--pt", type=float, default=0.03, metavar="P", help="acceptance rate elsewhere (default: 0.03)")
    parser.add_argument("--budget", type=int, default=60, metavar="N", help="nodes including the root (default: 60)")
    parser.add_argument(
        "--branch-depth", type=int, default=6, metavar="N", help="maximum nodes of a branch (default: 6)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", help="also write a plot to this .svg file")


SHIPPED = "smollm2-eagle3"


_HEAD_EXAMPLES = (
    "draftwood inspect head ./my-head",
    "draftwood inspect head ./my-head --model smollm2",
    "draftwood inspect head ./my-head --model smollm2 --texts data --limit 100",
    "draftwood inspect head smollm2-eagle3 --json",
)


_HEAD_DETAILS = """\
Reads a folder with config.json and the tensors of an EAGLE, EAGLE-3, Medusa or Hydra head, in the
layout of its authors, SGLang, vLLM, speculators or Draftwood. Hidden state i is the input of layer
i; the number of layers denotes the output of the last one.

With --model, check the head against that model. Only the configuration of the model is read, or
fetched from the hub. The exit code is 1 if they do not fit.

With --texts, run the model and measure tokens per pass with draft trees, the accuracy of the head
after the text and after its own drafts, and the expected calibration error. Results are too good on
texts from the training set. To use the held-out texts of a training run, set --limit to its
data.held_out, --seed to its run.seed and --max-length to its data.max_length, and pass the same
folders in the same order."""


def register_head(views: Subparsers[Any]) -> None:
    parser = add_command(
        views, "head", "inspect.head:run", "Describe a draft head", *_HEAD_EXAMPLES, details=_HEAD_DETAILS
    )
    about = f"folder of a head, or name of a shipped head (default: {SHIPPED})"
    parser.add_argument("path", metavar="PATH", nargs="?", default=SHIPPED, help=about)
    parser.add_argument("--model", help="check the fit to this model: name, folder, GGUF file or hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_worth_options(parser)
