"""``draftwood train data``: the target answers prompts, and the answers are kept for training."""

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
[...]} a line, .json files with a list of those, or text with one prompt a line. Answers in the files
are not used: the target writes its own. With --self it writes the prompts too.

The same command with the same --out goes on with a run that was stopped."""
_EXAMPLES = (
    "draftwood train data prompts.jsonl --out data",
    "draftwood train data chats.jsonl questions.txt --self 2000 --temperature 0.7 --batch 256 --out data",
    "draftwood train data --self 5000 --model ./my-model --out data",
)


def register_data(group: Subparsers[Any]) -> None:
    summary = "Let the model answer prompts: the texts that its head is trained on"
    parser = add_command(group, "data", run, summary, *_EXAMPLES, details=_DETAILS)
    parser.add_argument("files", nargs="*", metavar="FILES", help="prompts; see above")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    _add(parser, "self_made", int, "prompts that the model writes itself", flag="--self")
    _add(parser, "limit", int, "only the first N prompts of the files")
    parser.add_argument("--keep-answers", action="store_true", help="the files' answers: this model wrote them already")
    _add(parser, "shard_size", int, "prompts a part; a run that is stopped loses one part at most")
    parser.add_argument("--licence", metavar="TEXT", default="", help="a note on what may be done with the data")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_model_options(parser)
    answers = parser.add_argument_group("answers")
    _add(answers, "max_tokens", int, "tokens of an answer at most")
    _add(answers, "max_length", int, "tokens of a text at most, prompt and answers")
    _add(answers, "temperature", float, "0 is greedy, higher is more varied")
    _add(answers, "top_p", float, "only the likeliest tokens that share this much probability")
    _add(answers, "seed", int, "same seed, same draws")
    _add(answers, "batch", int, "answers that are written together")
    answers.add_argument(
        "--cache-tokens", type=int, metavar="N", help="positions of their cache (default: up to 65536)"
    )
    _add(answers, "drafter", str, "what drafts them, see: draftwood drafters", metavar="NAME")
    prompts = parser.add_argument_group("self-made prompts")
    _add(prompts, "prompt_tokens", int, "tokens at most")
    _add(prompts, "prompt_temperature", float, "above 0: higher is more varied")
    _add(prompts, "prompt_top_p", float, "only the likeliest tokens that share this much probability")


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
        screen.note(f"{args.out} has what was finished. To go on:\n  {shlex.join(['draftwood', *args.argv])}")
        raise
    content = {"path": args.out, "model": manifest.model["name"], "prompts": manifest.prompts, **manifest.counts}
    return show(args, content, [f"{args.out}: {_told(manifest)}{bar.pace}"])


def _add(
    parser: argparse._ActionsContainer,
    name: str,
    kind: Callable[[str], object],
    text: str,
    flag: str = "",
    metavar: str = "N",
) -> None:
    """An option with the default of the settings."""
    default = next(f.default for f in fields(DataSettings) if f.name == name)
    told = {"limit": "all", "max_length": "the context of the model"}.get(name, default)
    flag = flag or "--" + name.replace("_", "-")
    parser.add_argument(flag, dest=name, type=kind, default=default, metavar=metavar, help=f"{text} (default: {told})")


def _told(manifest: Manifest) -> str:
    counts = dict(manifest.counts)
    told = [f"{counts.pop(name):,} {name.replace('_', ' ')}" for name in ("examples", "tokens", "answered_tokens")]
    lost = [f"{count:,} prompts {reason.replace('_', ' ')}" for reason, count in counts.items() if count]
    return ", ".join([*told, *lost])
