"""The comparisons of trained heads in docs/results/training.md, from the texts to the tables, with one command.

    python benchmarks/compare_heads.py talf --prompts TRAINING_PROMPTS --data PROMPTS --out compare --jobs 8
    python benchmarks/compare_heads.py gto --prompts TRAINING_PROMPTS --data PROMPTS --out compare --jobs 8 --plan
    python benchmarks/compare_heads.py talf --texts compare/texts/* --data PROMPTS --out more --epochs 3 \\
        --also path=talf --set path:method.weights=path

talf  an EAGLE head is trained, or given with --head; then EAGLE, HASS and TALF go on from it, as long each
gto   EAGLE-3's training and GTO go on from a trained head, as long each; then EAGLE-3's with as many steps as GTO had

Stages: ``data`` (the model writes the texts of the head that ships, as far as they are needed), ``train``, ``bench``
(tokens a pass by temperature and growth), ``ranks`` (how right the heads are below their own guesses, on texts that
were held out), ``table``. Every step is a draftwood command with a log of its own in OUT/logs. What is finished is left
alone, so the same command goes on where it was stopped. Training runs are timed and have the machine to themselves;
--jobs is for the steps of the other stages.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compare_plan import COMPARISONS, STAGES, Plan
from compare_steps import run_steps
from compare_tables import tables
from draftwood.errors import DraftwoodError


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and whoever ends this program: its children are ended with it, also where a shell had it ignore them."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, signal.default_int_handler) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("comparison", choices=tuple(COMPARISONS))
    add("--out", type=Path, required=True, metavar="DIR", help="where everything goes; texts serve all comparisons")
    add("--model", default="smollm2", help="(default: smollm2)")
    add("--prompts", type=Path, metavar="FOLDER", help="the prompt files that texts are made from")
    add("--texts", nargs="+", metavar="FOLDER", help="texts that are there, instead of making them")
    add("--data", metavar="FOLDER", help="the prompts of the bench")
    add("--head", default="", metavar="HEAD", help="that the comparison starts from: a folder or a shipped head")
    add("--stages", type=words, default=list(STAGES), metavar="LIST", help=f"some of {','.join(STAGES)}; default: all")
    add("--jobs", type=count, default=1, metavar="N", help="steps at a time, but for training (default: 1)")
    add("--plan", action="store_true", help="print the commands that are left, and end")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of every run (default: as in the document)")
    length.add_argument("--steps", type=count, help="of every run, instead")
    length.add_argument("--epochs", type=count, help="of every run, instead")
    add("--set", action="append", default=[], metavar="[NAME:]SECTION.KEY=VALUE", help="of the training; repeatable")
    add("--also", action="append", default=[], metavar="NAME=RUN", help="another run like RUN, for --set to change")
    add("--self", type=count, default=2000, metavar="N", help="prompts of a folder of self-made ones (default: 2000)")
    add("--text-limit", type=count, metavar="N", help="prompts of a folder of others (default: all)")
    add("--text-tokens", type=count, default=320, metavar="N", help="of an answer (default: 320)")
    add("--text-batch", type=count, metavar="N", help="answers that are written together (default: 128 or 256)")
    add("--tasks", type=words, default=["mt_bench", "humaneval", "gsm8k"], metavar="LIST", help="of the bench")
    add("--temperatures", type=words, default=["0", "1"], metavar="LIST", help="(default: 0,1)")
    add("--growths", type=words, default=["beam", "optimal", "salf"], metavar="LIST")
    add("--budget", type=count, default=60, metavar="N", help="nodes of a draft tree (default: 60)")
    add("--bench-limit", type=count, default=30, metavar="N", help="prompts of a task (default: 30)")
    add("--bench-tokens", type=count, default=128, metavar="N", help="of an answer (default: 128)")
    add("--bench-batch", type=count, default=8, metavar="N", help="prompts that are answered together (default: 8)")
    args = parser.parse_args(argv)
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"no such stage: {', '.join(unknown)} (there are {', '.join(STAGES)})")
    return args


def compare(args: argparse.Namespace) -> None:
    plan = Plan(args)
    plan.check()
    for stage, steps in plan.stages().items():
        if args.plan:
            print(f"# {stage}", *(step.planned(plan.logs) for step in steps()), sep="\n")
        else:
            run_steps(steps(), plan.logs, 1 if stage == "train" else args.jobs)
    if "table" in args.stages and not args.plan:
        text = "\n".join(tables(plan.entries(), plan.pairs, args.growths, args.tasks)).strip() + "\n"
        path = plan.out / "tables.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"\n{text}\n{path}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        with interruptible():
            compare(args)
    except DraftwoodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = shlex.join(["python", *sys.argv] if argv is None else ["compare_heads.py", *argv])
        print(f"\ninterrupted. To go on:\n  {again}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
