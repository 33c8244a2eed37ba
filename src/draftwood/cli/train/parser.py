"""Parsers of the commands in this folder. Light to import: the commands themselves are loaded when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from draftwood.cli.options import Subparsers, add_command, add_group, add_model_options
from draftwood.config import DTYPES
from draftwood.train import NAMES, DataSettings, add_arguments

_TRAIN_EXAMPLES = (
    "draftwood train data prompts.jsonl --out data",
    "draftwood train head --method eagle3 data.folder=data run.out=runs/first optim.epochs=2",
)


_TRAIN_HEAD_EXAMPLES = (
    "draftwood train head --method eagle3 --config my.toml",
    "draftwood train head --method eagle3 --config my.toml --plan",
    "draftwood train head --method eagle3 data.folder=data run.out=runs/first optim.epochs=2",
    "draftwood train head --method gto --config my.toml head.start=runs/first/best run.out=runs/gto optim.lr=5e-6",
    "draftwood train head --method eagle3 --config my.toml --resume",
    "torchrun --nproc-per-node 4 -m draftwood.train --method eagle3 --config my.toml run.strategy=fsdp",
)


_TRAIN_DETAILS = """\
The configuration has the tables [model], [data], [head], [method], [optim], [validate] and [run].
Every key can be set on the command line. Required: data.folder, run.out and one of optim.steps,
optim.epochs and optim.minutes. The folder of the run gets the resolved configuration, log.jsonl,
recent checkpoints, the best head, the final head and a plot.

eagle, hass   EAGLE heads; talf and griffin too, and those train EAGLE-3 heads as well
eagle3        EAGLE-3 heads: training-time test
gto, reach    train a trained head (head.start) further on its own draft trees
medusa, hydra heads that predict several tokens ahead"""


def register_train(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "train", "Train a draft head for a model", *_TRAIN_EXAMPLES)
    register_data(actions)
    head = add_command(
        actions,
        "head",
        "train.command:_train_head",
        "Train a draft head",
        *_TRAIN_HEAD_EXAMPLES,
        details=_TRAIN_DETAILS,
    )
    add_arguments(head)
    head.add_argument("--json", action="store_true", help="print one JSON object")
    head.more_help = "train.configuration:describe_keys"
    config = add_command(
        actions,
        "config",
        "train.configuration:run",
        "Print a configuration file with every key, its default and its meaning",
        "draftwood train config --method eagle3 --out my.toml",
        "draftwood train head --config my.toml",
    )
    config.add_argument("--method", choices=NAMES, default="", help="list the options of this training method")
    config.add_argument("--out", metavar="FILE", help="write it to a new file instead of printing it")


_DATA_DETAILS = """\
Prompts are .jsonl files with {"turns": [...]}, {"messages": [...]} or ShareGPT's {"conversations":
[...]} per line, .json files with a list of those, or text with one prompt per line. Answers in the
files are ignored: the target generates its own. With --self it generates prompts too.

Run the same command with the same --out again to continue an interrupted run. Several processes can
share the work: give each its --part, on machines that share the folder, or start them by torchrun."""


_DATA_EXAMPLES = (
    "draftwood train data prompts.jsonl --out data",
    "draftwood train data chats.jsonl questions.txt --self 2000 --temperature 0.7 --batch 256 --out data",
    "draftwood train data --self 5000 --model ./my-model --out data",
    "draftwood train data prompts.jsonl --shard-size 256 --part 2/4 --out data",
)


def register_data(group: Subparsers[Any]) -> None:
    summary = "Let the model answer prompts, to train a head on the answers"
    parser = add_command(group, "data", "train.data:run", summary, *_DATA_EXAMPLES, details=_DATA_DETAILS)
    parser.add_argument("files", nargs="*", metavar="FILES", help="files of prompts, see above")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    _add_option(parser, "self_made", int, "number of prompts that the model generates", flag="--self")
    _add_option(parser, "limit", int, "use only the first N prompts of the files")
    parser.add_argument("--keep-answers", action="store_true", help="keep the files' answers (by this model)")
    _add_option(parser, "shard_size", int, "prompts per shard; an interrupted run loses at most one shard")
    parser.add_argument(
        "--part", metavar="I/N", help="make every N-th shard only, from the I-th on (default: as torchrun says, or all)"
    )
    parser.add_argument("--licence", metavar="TEXT", default="", help="licence note for the data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    answers = parser.add_argument_group("answers")
    _add_option(answers, "max_tokens", int, "maximum tokens per answer")
    _add_option(answers, "max_length", int, "maximum tokens per text (prompt and answers)")
    _add_option(answers, "temperature", float, "0 is greedy, higher is more varied")
    _add_option(answers, "top_p", float, "sample from the top tokens with this total probability")
    _add_option(answers, "seed", int, "random seed")
    _add_option(answers, "batch", int, "answers that are generated at once")
    answers.add_argument(
        "--cache-tokens", type=int, metavar="N", help="KV cache capacity in tokens (default: up to 65536)"
    )
    _add_option(answers, "drafter", str, "drafter, see: draftwood drafters", metavar="NAME")
    prompts = parser.add_argument_group("self-made prompts")
    _add_option(prompts, "prompt_tokens", int, "maximum tokens")
    _add_option(prompts, "prompt_temperature", float, "above 0; higher is more varied")
    _add_option(prompts, "prompt_top_p", float, "sample from the top tokens with this total probability")


def _add_option(
    parser: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], object],
    text: str,
    flag: str = "",
    metavar: str = "N",
) -> None:
    """Add an option with the default of `DataSettings`."""
    default = next(f.default for f in fields(DataSettings) if f.name == name)
    shown = {"limit": "all", "max_length": "the context of the model"}.get(name, default)
    flag = flag or "--" + name.replace("_", "-")
    parser.add_argument(flag, dest=name, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")


LAYOUTS = ("eagle", "sglang", "vllm", "speculators", "medusa", "hydra", "draftwood")


_EXPORT_DETAILS = """\
eagle       original layout of EAGLE-1/2 and EAGLE-3
sglang      EAGLE-3 for SGLang
vllm        EAGLE-3 for vLLM
speculators EAGLE-3 for the speculators library and vLLM; needs --model
medusa      original layout of Medusa
hydra       original layout of Hydra
draftwood   our own layout, for every head

If a layout cannot represent a head, the error names the layouts that can. Hidden states are
numbered as in the engine.

Training writes float32; --dtype bfloat16 halves the size. With --model, if the model is on this disk,
our layout also stores its fingerprint, which identifies the model under any name."""


def register_export(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "export",
        "train.export:run",
        "Write a draft head in another engine's layout",
        "draftwood export ./my-head --to sglang --out ./my-head-sglang",
        "draftwood export smollm2-eagle3 --to vllm --out ./smollm2-eagle3-vllm",
        "draftwood export ./my-head --to speculators --out ./out --model meta-llama/Llama-3.1-8B-Instruct",
        "draftwood export ./downloaded-head --to draftwood --out ./my-head --force",
        details=_EXPORT_DETAILS,
    )
    parser.add_argument("head", metavar="HEAD", help="folder of a head in any layout, or name of a shipped head")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    parser.add_argument("--to", required=True, choices=LAYOUTS, help="layout to write")
    parser.add_argument("--dtype", choices=DTYPES[1:], help="dtype of the tensors (default: unchanged)")
    parser.add_argument("--model", default="", help="target model of the head: name or folder")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def register(commands: Subparsers[Any]) -> None:
    for register_command in (register_train, register_export):
        register_command(commands)
