"""Milliseconds per forward of the native decoders on this CPU, by context and number of positions.

    python benchmarks/cpu_forward.py --dtype bfloat16
    python benchmarks/cpu_forward.py --model path/to/folder --contexts 128,1024 --positions 1,16

The decoders are interleaved, one forward each, so that other load affects them equally. The positions form a tree (the
parent of node i is node (i - 1) // 2), and the logits of every node are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from draftwood.models.config import ModelConfig, Rope, parse_config
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import Weights, assemble, load_weights

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    context_length=8192,
    rope=Rope(theta=100_000.0),
    tied_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
)
BACKENDS = ("fused-cpu", "eager")
PREFILL = 512  # positions per chunk


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    config, weights = model(options.model, getattr(torch, options.dtype))
    longest = max(options.contexts) + max(options.positions)
    targets = {name: NativeTarget(name, config, weights(), longest, backend=name) for name in options.backends}
    print(f"{config.num_layers} layers of {config.hidden_size}, {options.dtype}, {torch.get_num_threads()} threads")
    print(f"{options.statistic} of {options.repeats} forwards, milliseconds; in brackets: relative to one position\n")
    print("| context | positions |", " | ".join(options.backends), "| eager / fused |")
    print("| --- " * (3 + len(options.backends)) + "|")
    for context in options.contexts:
        sequences = {name: prefilled(target, context) for name, target in targets.items()}
        ones: dict[str, float] = {}
        for count in options.positions:
            runs = {name: forward(targets[name], sequences[name], count) for name in options.backends}
            times = interleaved(runs, options.repeats, options.statistic)
            ones = ones or times
            print_row(context, count, times, ones)
        for name, target in targets.items():
            target.close(sequences[name])


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; default: the shape of SmolLM2-135M, random weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--contexts", type=numbers, default=[1, 128, 512, 1024, 4096])
    parser.add_argument("--positions", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--statistic", default="median", choices=("median", "min"))
    return parser.parse_args()


def model(folder: Path | None, dtype: torch.dtype) -> tuple[ModelConfig, Callable[[], Weights]]:
    """Return the configuration, and a function that creates weights: the fused decoder consumes them."""
    if folder is not None:
        config = parse_config(json.loads((folder / "config.json").read_text()))
        return config, lambda: load_weights(folder, config, dtype, torch.device("cpu"))

    def make() -> Weights:
        generator = torch.Generator().manual_seed(0)
        shapes = tensor_shapes(SMOLLM2)
        return assemble(SMOLLM2, lambda name: (torch.randn(shapes[name], generator=generator) * 0.05).to(dtype))

    return SMOLLM2, make


def prefilled(target: NativeTarget, context: int) -> int:
    sequence = target.open(target.num_slots)
    for start in range(0, context, PREFILL):
        size = min(PREFILL, context - start)
        target.forward([Segment(sequence, [(start + i) % 1000 for i in range(size)], chain_parents(size), 0)])
        target.keep(sequence, range(size))
    return sequence


def forward(target: NativeTarget, sequence: int, count: int) -> Callable[[], object]:
    segment = Segment(sequence, list(range(count)), [-1, *((i - 1) // 2 for i in range(1, count))], count)
    return lambda: target.forward([segment])


def interleaved(
    runs: dict[str, Callable[[], object]], repeats: int, statistic: str, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if repeat:  # the first one is a warm-up
                times[name].append(1000 * (clock() - start))
    summary = statistics.median if statistic == "median" else min
    return {name: summary(values) for name, values in times.items()}


def print_row(context: int, count: int, times: dict[str, float], ones: dict[str, float]) -> None:
    cells = [f"{value:.1f} ({value / ones[name]:.2f})" for name, value in times.items()]
    both = all(name in times for name in BACKENDS)
    ratio = f"{times['eager'] / times['fused-cpu']:.1f}" if both else "-"
    print(f"| {context} | {count} |", " | ".join(cells), f"| {ratio} |", flush=True)


if __name__ == "__main__":
    main()
