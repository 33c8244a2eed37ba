"""Milliseconds per forward of a GGUF file as it is stored, beside the same file expanded to other dtypes.

    python benchmarks/stored_forward.py model.gguf
    python benchmarks/stored_forward.py model.gguf --dtypes auto --threads 1 --context 1024

The forms of the model are interleaved, one forward each, so that other load affects them equally. ``auto`` is the file
as stored. Trees are those of ``cpu_forward.py``. With one thread its CPU time is measured, which other processes
disturb less.
"""

import argparse
import time
from pathlib import Path

import torch

from cpu_forward import forward, interleaved, prefilled
from draftwood.config import ModelOptions
from draftwood.targets.load import load_target
from draftwood.targets.native.target import NativeTarget


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    slots = options.context + max(options.positions)
    targets: dict[str, NativeTarget] = {}
    for dtype in options.dtypes:
        target = load_target(ModelOptions(model=options.file, dtype=dtype, device="cpu", cache_tokens=slots)).target
        assert isinstance(target, NativeTarget), "a native model is needed"
        targets[target.info.quantize or dtype] = target
    sequences = {name: prefilled(target, options.context) for name, target in targets.items()}
    print(f"context {options.context}, {torch.get_num_threads()} threads, fastest of {options.repeats} forwards\n")
    print("| positions |", " | ".join(f"{name}, ms | / one" for name in targets), "|")
    print("| --- " * (1 + 2 * len(targets)) + "|")
    ones: dict[str, float] = {}
    for count in options.positions:
        runs = {name: forward(target, sequences[name], count) for name, target in targets.items()}
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        times = interleaved(runs, options.repeats, "min", clock)
        ones = ones or times
        print(
            f"| {count} |", " | ".join(f"{times[n]:.2f} | {times[n] / ones[n]:.2f}" for n in targets), "|", flush=True
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["auto", "bfloat16"])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument(
        "--positions", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 6, 8, 16, 32]
    )
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
