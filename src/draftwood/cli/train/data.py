"""``draftwood train data``: let the target answer prompts and store the answers for training."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftwood.cli.console import PaceBar, Screen, Subparsers, add_command, add_model_options, model_options, show
from draftwood.train.data import DataSettings

if TYPE_CHECKING:
    from draftwood.train.data import Manifest

_DETAILS = """\
Prompts are .jsonl files with {"turns": [...]}, {"messages": [...]} or ShareGPT's {"conversations":
[...]} per line, .json files with a list of those, or text with one prompt per line. Answers in the
files are ignored: the target generates its own. With --self it generates prompts too.

Run the same command with the same --out again to continue an interrupted run."""
_EXAMPLES = (
    "draftwood train data prompts.jsonl --out data",
    "draftwood train data chats.jsonl questions.txt --self 2000 --temperature 0.7 --batch 256 --out data",
    "draftwood train data --self 5000 --model ./my-model --out data",
)


def register_data(group: Subparsers[Any]) -> None:
    summary = "Let the model answer prompts, to train a head on the answers"
    parser = add_command(group, "data", run, summary, *_EXAMPLES, details=_DETAILS)
    parser.add_argument("files", nargs="*", metavar="FILES", help="files of prompts, see above")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    _add_option(parser, "self_made", int, "number of prompts that the model generates", flag="--self")
    _add_option(parser, "limit", int, "use only the first N prompts of the files")
    parser.add_argument("--keep-answers", action="store_true", help="keep the files' answers (by this model)")
    _add_option(parser, "shard_size", int, "prompts per shard; an interrupted run loses at most one shard")
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


def run(args: argparse.Namespace) -> int:
    given = {f.name: getattr(args, f.name) for f in fields(DataSettings)}
    settings = DataSettings(**{**given, "files": tuple(args.files)})
    screen = Screen(args.color)
    bar = screen.progress = PaceBar(screen.err)
    from draftwood.targets import load_target
    from draftwood.train.data import make_data, prepare

    prepared = prepare(settings, args.out)
    loaded = load_target(model_options(args, max_batch=args.batch), bar)
    try:
        manifest = make_data(prepared, loaded, bar, bar.hear)
    except KeyboardInterrupt:
        bar.clear()
        screen.note(f"{args.out} has the finished shards. To continue:\n  {shlex.join(['draftwood', *args.argv])}")
        raise
    content = {"path": args.out, "model": manifest.model["name"], "prompts": manifest.prompts, **manifest.counts}
    return show(args, content, [f"{args.out}: {_describe_counts(manifest)}{bar.pace}"])


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


def _describe_counts(manifest: Manifest) -> str:
    counts = dict(manifest.counts)
    counted = [f"{counts.pop(name):,} {name.replace('_', ' ')}" for name in ("examples", "tokens", "answered_tokens")]
    lost = [f"{count:,} prompts {reason.replace('_', ' ')}" for reason, count in counts.items() if count]
    return ", ".join([*counted, *lost])
