"""Times drawing sampled tokens: by the kernels of the fused decoders, and the same by torch.

    python benchmarks/draws.py --device cuda --out draws.json
    python benchmarks/draws.py --device cpu --rows 1,4

Microseconds, medians: of device time with launches on a GPU, of one thread on a CPU. For rows of random logits of two
vocabularies, by sampling rule. ``steep`` rows have a few likely tokens, as most rows of a language model; ``flat`` ones
have thousands.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from draftwood import SamplingParams
from draftwood.sampling import Warper, draw_tokens
from draftwood.targets.native.cpu import load_kernel

VOCABULARIES = {"SmolLM2": 49_152, "Qwen2.5": 151_936}
RULES = {
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top-k 20, top-p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "top-k 100, top-p 0.95": SamplingParams(temperature=0.7, top_k=100, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
}
NUM_BEST = 10


class Draws(Protocol):
    def launch(self) -> None: ...

    def tokens(self) -> list[int]: ...


class CpuDraws:
    def __init__(self, logits: torch.Tensor, fields: Sequence[tuple[float, ...]]) -> None:
        kernel = load_kernel()
        assert kernel is not None, "no C compiler"
        self._draw = kernel.draftwood_draw
        self._logits, self._fields = logits, np.array(fields)
        self._tokens = np.zeros(len(fields), np.int32)
        logits_at, fields_at, tokens_at = logits.data_ptr(), self._fields.ctypes.data, self._tokens.ctypes.data
        count, vocab_size = (ctypes.c_int64(number) for number in logits.shape)
        pointers = [ctypes.c_void_p(address) for address in (logits_at, fields_at, tokens_at)]
        self._arguments = (pointers[0], vocab_size, pointers[1], count, pointers[2])

    def launch(self) -> None:
        self._draw(*self._arguments)

    def tokens(self) -> list[int]:
        return [int(token) for token in self._tokens]


class GpuDraws:
    def __init__(self, logits: torch.Tensor, fields: Sequence[tuple[float, ...]]) -> None:
        from draftwood.targets.native.cuda import kernels

        count, vocab_size = logits.shape
        words = kernels.new_words(count, NUM_BEST, logits.device)
        peaks = kernels.new_scratch(count, vocab_size, logits.device)
        kernels.launch_top_rows(logits, NUM_BEST, words, peaks)
        draws = torch.tensor(fields, dtype=torch.float64, device=logits.device)
        scratch = kernels.DrawScratch.new(count, vocab_size, logits.device)
        self._tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
        self.launch = lambda: kernels.launch_draws(logits, words, peaks, draws, scratch, self._tokens)

    def tokens(self) -> list[int]:
        return [int(token) for token in self._tokens.tolist()]


def random_logits(kind: str, num_rows: int, vocab_size: int, device: str) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, device=device) * 2.0
    if kind == "steep":
        logits[:, :50] += torch.linspace(15.0, 5.0, 50, device=device)
        logits = logits[:, torch.randperm(vocab_size, device=device)].contiguous()
    return logits


def median_microseconds(run: Callable[[], object], repeats: int, *, on_gpu: bool) -> float:
    found = []
    for _ in range(repeats + 3):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        else:
            started = time.thread_time()
            run()
            found.append((time.thread_time() - started) * 1e6)
    return statistics.median(found[3:])  # the first ones compile


def measure(kind: str, vocabulary: str, num_rows: int, rule: str, args: argparse.Namespace) -> dict[str, object]:
    warper, on_gpu = Warper(RULES[rule], ()), args.device == "cuda"
    logits = random_logits(kind, num_rows, VOCABULARIES[vocabulary], args.device)
    numbers = torch.rand(num_rows).tolist()
    fields = [(row, *warper.rule, number) for row, number in enumerate(numbers)]
    draws: Draws = GpuDraws(logits, fields) if on_gpu else CpuDraws(logits, fields)

    def by_torch() -> list[int]:
        return draw_tokens(warper.probs(logits), numbers)

    draws.launch()
    return {
        "rows": num_rows,
        "vocabulary": vocabulary,
        "kind": kind,
        "rule": rule,
        "kernels": median_microseconds(draws.launch, args.repeats, on_gpu=on_gpu),
        "torch": median_microseconds(by_torch, args.repeats, on_gpu=on_gpu),
        "same": sum(ours == theirs for ours, theirs in zip(draws.tokens(), by_torch(), strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, help="write all figures to a JSON file")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here; --device cpu times the CPU kernel.", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    sizes = [int(size) for size in args.rows.split(",")]
    print(
        "| vocabulary | rows of logits | rule | " + " | ".join(f"{size} rows: kernels, torch" for size in sizes) + " |"
    )
    print("| --- " * (3 + len(sizes)) + "|")
    found = []
    for vocabulary in VOCABULARIES:
        for kind in ("steep", "flat"):
            for rule in RULES:
                cells = [measure(kind, vocabulary, size, rule, args) for size in sizes]
                found += cells
                figures = " | ".join(f"{cell['kernels']:.0f}, {cell['torch']:.0f}" for cell in cells)
                print(f"| {vocabulary} | {kind} | {rule} | {figures} |", flush=True)
                wrong = sum(int(str(cell["rows"])) - int(str(cell["same"])) for cell in cells)
                if wrong:
                    print(f"{wrong} tokens differ from those of torch", file=sys.stderr, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
