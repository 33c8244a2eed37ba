"""Compares the answers of drafters in batches with plain decoding of one request at a time, token for token.

    python benchmarks/exactness.py --model MODEL.gguf --device cuda --exact --data PROMPTS --limit 500 \\
        plain@8 plain@32 goose:budget=60@1 goose:budget=12@32 blend@8 sam@1/100

With ``--temperature`` answers are sampled: a seed must then give the same text in every run, unless the drafter draws
its guesses (``stand`` at a fixed budget).

A run is a drafter, its options, and the size of its batches; without a budget it is ``auto``. ``/100``: only the first
100 prompts, since single requests take long. Prompts of all tasks are
in one queue, a prompt of each task in turn, so that requests of different lengths begin and end beside each other. The
exit code is 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import NamedTuple, Self

from batches import PLAIN, parse_drafter
from draftwood import LLM, SamplingParams
from draftwood.bench.tasks.load import load_tasks
from draftwood.compare import first_difference
from draftwood.config import QUANTIZE, ModelOptions
from draftwood.errors import DraftwoodError
from draftwood.prompts import prompt_ids
from draftwood.targets.load import Loaded, load_target


class Run(NamedTuple):
    """``drafter:key=value@batch/prompts``."""

    drafter: str
    batch: int
    num_prompts: int | None  # the first ones; None: all

    @classmethod
    def parse(cls, text: str) -> Self:
        drafter, _, sizes = text.partition("@")
        batch, _, prompts = sizes.partition("/")
        return cls(drafter, int(batch or 1), int(prompts) if prompts else None)

    def open(self, loaded: Loaded) -> LLM:
        drafter, options = parse_drafter(self.drafter)
        budget = options.pop("budget", "auto")
        return LLM.from_target(
            loaded.target, loaded.codec, drafter=drafter, drafter_options=options, budget=budget, max_batch=self.batch
        )


def differing(answers: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> Iterator[str]:
    """Where answers leave those of plain decoding alone."""
    for number, (answer, wanted) in enumerate(zip(answers, alone, strict=True)):
        place = first_difference(answer, wanted)
        if place is not None:
            yield f"{number}:{place}"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    how = {"dtype": args.dtype, "quantize": args.quantize, "exact": args.exact, "device": args.device}
    runs = {text: Run.parse(text) for text in args.runs}
    try:
        tasks = load_tasks(args.tasks, args.data, args.limit)
        loaded = load_target(ModelOptions(model=args.model, **how, max_batch=max(run.batch for run in runs.values())))
    except DraftwoodError as error:
        print(error, file=sys.stderr)
        return 2
    by_task = [[prompt_ids(loaded.codec, prompt.turns[0]) for prompt in task.prompts] for task in tasks]
    in_turn = (prompt for prompt in chain.from_iterable(zip_longest(*by_task)) if prompt is not None)
    prompts = list(islice(in_turn, args.limit))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=1)

    def answer(run: Run) -> list[Sequence[int]]:
        with run.open(loaded) as llm:
            return [completion.token_ids for completion in llm.generate(prompts[: run.num_prompts], params)]

    alone = answer(Run(f"{PLAIN}:budget=1", 1, None))
    print("| run | equal to plain decoding alone | seconds |\n| --- | --- | --- |", flush=True)
    num_wrong = 0
    for text, run in runs.items():
        started = time.perf_counter()
        answers = answer(run)
        wrong = list(differing(answers, alone[: len(answers)]))
        num_wrong += len(wrong)
        seconds = time.perf_counter() - started
        print(f"| {text} | {len(answers) - len(wrong)} of {len(answers)} | {seconds:.0f} |", flush=True)
        if wrong:
            print(f"{text}: answer and first different token: {' '.join(wrong[:20])}", file=sys.stderr, flush=True)
    return int(num_wrong > 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", default=["plain@8", "blend@1", "blend@8"], help="drafter:key=value@batch/prompts"
    )
    parser.add_argument("--model", default="smollm2", help="a known name, a folder or a GGUF file")
    parser.add_argument("--data", help="prompts, as for draftwood bench; default: bundled")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=[], help="tasks; default: all")
    parser.add_argument("--limit", type=int, default=100, help="prompts in all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: sampled, all with one seed")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("auto", "float32", "float16", "bfloat16"))
    parser.add_argument("--quantize", choices=QUANTIZE)
    parser.add_argument("--exact", action="store_true", help="passes with the same bits for a row in every pass")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
