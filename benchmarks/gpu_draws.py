"""Times drawing sampled tokens on a GPU: the kernels behind a pass, and the same by torch.

    python benchmarks/gpu_draws.py --out draws.json

Microseconds of device time, medians: for rows of random logits of two vocabularies, by sampling rule. ``steep`` rows
have a few likely tokens, as most rows of a language model; ``flat`` ones have thousands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftwood import SamplingParams
from draftwood.sampling import Warper, draw_tokens
from draftwood.targets.native.cuda.kernels import DrawScratch, launch_draws, launch_top_rows, new_scratch, new_words

VOCABULARIES = {"SmolLM2": 49_152, "Qwen2.5": 151_936}
RULES = {
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top-k 20, top-p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
}
NUM_BEST = 10


def random_logits(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, device="cuda") * 2.0
    if kind == "steep":
        logits[:, :50] += torch.linspace(15.0, 5.0, 50, device="cuda")
        logits = logits[:, torch.randperm(vocab_size, device="cuda")].contiguous()
    return logits


def median_microseconds(run: Callable[[], object], repeats: int) -> float:
    found = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:  # the first ones compile
            found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def measure(kind: str, vocabulary: str, num_rows: int, rule: str, repeats: int) -> dict[str, object]:
    params, vocab_size = RULES[rule], VOCABULARIES[vocabulary]
    logits, warper = random_logits(kind, num_rows, vocab_size), Warper(RULES[rule], ())
    numbers = torch.rand(num_rows).tolist()
    words, peaks = new_words(num_rows, NUM_BEST, logits.device), new_scratch(num_rows, vocab_size, logits.device)
    launch_top_rows(logits, NUM_BEST, words, peaks)
    fields = [(row, *warper.rule, number) for row, number in enumerate(numbers)]
    draws = torch.tensor(fields, dtype=torch.float64, device="cuda")
    scratch = DrawScratch.new(num_rows, vocab_size, logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int32, device="cuda")

    def by_kernels() -> list[int]:
        launch_draws(logits, words, peaks, draws, scratch, tokens)
        return tokens.tolist()

    def by_torch() -> list[int]:
        return draw_tokens(Warper(params, ()).probs(logits), numbers)

    same = sum(ours == theirs for ours, theirs in zip(by_kernels(), by_torch(), strict=True))
    return {
        "rows": num_rows,
        "vocabulary": vocabulary,
        "kind": kind,
        "rule": rule,
        "kernels": median_microseconds(lambda: launch_draws(logits, words, peaks, draws, scratch, tokens), repeats),
        "torch": median_microseconds(by_torch, repeats),
        "same": same,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU.", file=sys.stderr)
        return 2
    sizes = [int(size) for size in args.rows.split(",")]
    print(
        "| vocabulary | rows of logits | rule | " + " | ".join(f"{size} rows: kernels, torch" for size in sizes) + " |"
    )
    print("| --- " * (3 + len(sizes)) + "|")
    found = []
    for vocabulary in VOCABULARIES:
        for kind in ("steep", "flat"):
            for rule in RULES:
                cells = [measure(kind, vocabulary, size, rule, args.repeats) for size in sizes]
                found += cells
                figures = " | ".join(f"{cell['kernels']:.0f}, {cell['torch']:.0f}" for cell in cells)
                print(f"| {vocabulary} | {kind} | {rule} | {figures} |", flush=True)
                wrong = sum(int(cell["rows"]) - int(cell["same"]) for cell in cells)
                if wrong:
                    print(f"{wrong} tokens differ from those of torch", file=sys.stderr, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
