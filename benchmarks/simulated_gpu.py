"""Tokens per second of batches on a simulated GPU: the host's work is real, passes only take time.

    python benchmarks/simulated_gpu.py --batches 8,32,128 plain goose blend pld
    python benchmarks/simulated_gpu.py --pass-ms 0.55 --row-ms 0.003 --likely 0.1 --known 0.3 plain goose

A pass takes ``--pass-ms`` and ``--row-ms`` more for each position, from its launch or the end of the pass before, while
the host goes on; by default about those of a model with 1.5 billion parameters on an H200. Time is simulated: the CPU
time of the host, without that of the table which stands for the model, and what it waits for passes. So other processes
hardly matter. ``--likely`` and ``--known``: how often the first of ten known successors of a token is right, and any.
"""

from __future__ import annotations

from simulated import NOW, SIZES, Gpu  # before anything that reads the clock

# isort: split
import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import host_cycle
from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.sizing import CostProfile, LiveCosts
from draftwood.targets import PendingPass, Segment


class SimulatedGpu(host_cycle.TableTarget):
    def __init__(self, num_slots: int, gpu: Gpu) -> None:
        super().__init__(NOW, num_slots)  # type: ignore[arg-type]
        self._gpu = gpu

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        return self._gpu.start(self.forward(segments), sum(len(segment.token_ids) for segment in segments))


def measure(name: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    room = args.prompt + args.max_tokens + 256
    gpu = Gpu(args.pass_ms, args.row_ms)
    target = SimulatedGpu(batch * room + 4096, gpu)
    engine = Engine(target, host_cycle.Codec(), EngineOptions(budget=args.budget, max_batch=batch))  # type: ignore[arg-type]
    if args.budget == "auto":
        engine._costs = LiveCosts(CostProfile(SIZES, (16,), (tuple(map(gpu.seconds, SIZES)),)))
    rng = np.random.default_rng(1)
    factory = make_factory(name, {}, target.info)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    ids, stats = list[int](), dict[int, Any]()
    for _ in range(args.per_place * batch):
        prompt = tuple(rng.integers(host_cycle.WORDS, size=args.prompt).tolist())
        ids += engine.submit(GenerationRequest(prompt_ids=prompt, params=params, drafter=factory))
    started = NOW()
    while engine.has_work:
        engine.step()
        for request_id, event in engine.take_ready(ids):
            if isinstance(event, Exception):
                raise event
            stats[request_id] = event.stats
    seconds = NOW() - started
    cycles = sum(stat.cycles for stat in stats.values())
    tokens = sum(stat.output_tokens for stat in stats.values())
    nodes = 1.0 + sum(stat.drafted_nodes for stat in stats.values()) / cycles
    return {"tokens/s": tokens / seconds, "tau": tokens / cycles, "nodes": nodes}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=["plain", "goose"], help="the first is what others compare to")
    parser.add_argument("--batches", default="8,32,128")
    parser.add_argument("--budget", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--pass-ms", type=float, default=1.25)
    parser.add_argument("--row-ms", type=float, default=0.008)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-place", type=int, default=2, help="requests for each place of a batch")
    parser.add_argument("--likely", type=float, default=host_cycle.LIKELY)
    parser.add_argument("--known", type=float, default=host_cycle.KNOWN)
    args = parser.parse_args(argv)
    host_cycle.LIKELY, host_cycle.KNOWN = args.likely, args.known
    print("| batch | drafter | tokens/s | times the first | tau | nodes |\n" + "| --- " * 6 + "|")
    for batch in map(int, args.batches.split(",")):
        first = 0.0
        for name in args.drafters:
            found = measure(name, batch, args)
            first = first or found["tokens/s"]
            print(
                f"| {batch} | {name} | {found['tokens/s']:,.0f} | {found['tokens/s'] / first:.2f}x "
                f"| {found['tau']:.2f} | {found['nodes']:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
