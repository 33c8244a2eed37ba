"""Measures the effect of a predicted output: tokens per pass without, with the exact, and with a modified prediction.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --drafters goose,sam --budget 32 --data prompts.jsonl --limit 20 --every 10

Outputs are greedy and must be the same in all cases. ``--every N`` replaces every N-th word of the prediction, as in an
editing task with few changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from draftwood import LLM, Completion, SamplingParams
from draftwood.errors import DraftwoodError, OptionError
from draftwood.prompts import read_prompts
from outcome import exit_code

OWN_PROMPTS = (
    "Name three trees.", "What is a loop?", "Write a haiku about rain.", "Explain recursion.",
    "Write a Python function that sorts a list.", "What is the capital of France?",
)  # fmt: skip
OTHER_WORD = "something"


def changed(text: str, every: int) -> str:
    """Replace every n-th word."""
    words = text.split(" ")
    return " ".join(OTHER_WORD if (i + 1) % every == 0 else word for i, word in enumerate(words))


def tokens_a_pass(answers: Sequence[Completion]) -> float:
    return sum(len(each.token_ids) for each in answers) / sum(each.stats.cycles for each in answers)


def measured(
    llm: LLM, drafter: str, prompts: Sequence[Sequence[int]], params: SamplingParams, every: int
) -> list[float]:
    def answered(predictions: Sequence[str | None]) -> list[Completion]:
        pairs = zip(prompts, predictions, strict=True)
        return [llm.generate(ids, params, drafter=drafter, prediction=expected)[0] for ids, expected in pairs]

    without = answered([None] * len(prompts))
    texts = [each.text for each in without]
    runs = [without, answered(texts), answered([changed(text, every) for text in texts])]
    for run in runs:
        if [each.token_ids for each in run] != [each.token_ids for each in without]:
            raise DraftwoodError("A prediction changed an output", got=drafter)
    return [tokens_a_pass(run) for run in runs]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=["goose", "pld"], metavar="LIST")
    parser.add_argument("--budget", type=int, default=16, metavar="N", help="positions per pass (default: 16)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompt file (default: six built-in prompts)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="number of prompts (default: 20)")
    parser.add_argument(
        "--max-tokens", type=int, default=96, metavar="N", help="maximum number of output tokens (default: 96)"
    )
    parser.add_argument("--every", type=int, default=20, metavar="N", help="replace every N-th word (default: 20)")
    args = parser.parse_args(argv)
    if min(args.limit, args.max_tokens, args.every) < 1:
        raise OptionError("--limit, --max-tokens and --every count something", allowed="1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> None:
        args = parsed(argv)
        own = [[{"role": "user", "content": text}] for text in OWN_PROMPTS]
        conversations = read_prompts(args.data, args.limit) if args.data else own
        params = SamplingParams(max_tokens=args.max_tokens)
        # Drafters must not reuse what they learned from the same output.
        with LLM(args.model, drafter=args.drafters[0], budget=args.budget, memory="request") as llm:
            prompts = [llm.tokenizer.apply_chat(each) for each in conversations]
            print(f"| tokens per pass | no prediction | exact prediction | every {args.every}th word replaced |")
            print("| --- " * 4 + "|")
            for drafter in args.drafters:
                found = measured(llm, drafter, prompts, params, args.every)
                print(f"| `{drafter}` | " + " | ".join(f"{value:.2f}" for value in found) + " |", flush=True)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
