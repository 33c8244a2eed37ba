"""What a predicted output brings: tokens a pass without one, with the answer itself, and with words of it changed.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --drafters goose,sam --budget 32 --data prompts.jsonl --limit 20 --every 10

Answers are greedy, and the same in all cases: that is checked. ``--every N`` puts another word in the place of every
N-th one, as a text of which little is to be changed would have it.
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
    """Every so many words another one."""
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
            raise DraftwoodError("A prediction has changed an answer", got=drafter)
    return [tokens_a_pass(run) for run in runs]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="(default: smollm2)")
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=["goose", "pld"], metavar="LIST")
    parser.add_argument("--budget", type=int, default=16, metavar="N", help="positions of a pass (default: 16)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompts, one a line (default: six of its own)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="prompts of the file (default: 20)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default: 96)")
    parser.add_argument("--every", type=int, default=20, metavar="N", help="words (default: 20)")
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
        # What drafters learn from an answer must not help them with the same one again.
        with LLM(args.model, drafter=args.drafters[0], budget=args.budget, memory="request") as llm:
            prompts = [llm.tokenizer.apply_chat(each) for each in conversations]
            print(f"| tokens a pass | no prediction | the answer itself | every {args.every}th word another |")
            print("| --- " * 4 + "|")
            for drafter in args.drafters:
                found = measured(llm, drafter, prompts, params, args.every)
                print(f"| `{drafter}` | " + " | ".join(f"{value:.2f}" for value in found) + " |", flush=True)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
