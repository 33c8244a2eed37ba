"""Measures the time of drafters alone, proposing and learning, by context length. No model runs.

    python benchmarks/draft_overhead.py --contexts 100,1000,10000,30000 goose stand recycling

The text is synthetic: phrases of a Zipf-distributed vocabulary, many of them repeated. Logits are random, and half of
the first children are accepted. ``top-k`` is the time to find the top tokens of verified rows, which normally runs on
the target's device; the rest is the drafter's. All times are CPU times of the thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch

import draftwood.drafters.base
from draftwood import SamplingParams
from draftwood.cli.options import drafter_options
from draftwood.drafters import DraftRequest, PromptRows, VerifiedTree, make_factory
from draftwood.targets.base import TargetInfo
from draftwood.targets.find_top import top_rows
from draftwood.tree import DraftTree

VOCABULARY = 49_152
CHUNK = 512


class Clock:
    """Sums the time of calls of a function."""

    seconds = 0.0

    def around(self, function: Any) -> Any:
        @wraps(function)
        def timed(*args: Any) -> Any:
            started = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - started
            return result

        return timed


def made_up_text(length: int, rng: np.random.Generator) -> list[int]:
    phrases = [rng.zipf(1.3, size=rng.integers(3, 12)) % VOCABULARY for _ in range(200)]
    text: list[int] = []
    while len(text) < length:
        text += phrases[rng.integers(len(phrases))].tolist()
    return text[:length]


def accepted(tree: DraftTree, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Choose a path along first children, continuing with probability 1/2; return it with the emitted tokens."""
    children = tree.children()
    path = [0]
    while children[path[-1]] and rng.random() < 0.5:
        path.append(children[path[-1]][0])
    return path, [*(tree.tokens[node] for node in path[1:]), int(rng.zipf(1.3) % VOCABULARY)]


def measure(method: str, context: int, args: argparse.Namespace) -> Sequence[float]:
    """Milliseconds per cycle: propose, observe without top-k, top-k; and the mean tree size."""
    name, _, rest = method.partition(":")
    info = TargetInfo(
        name="made up",
        architecture="none",
        vocab_size=VOCABULARY,
        hidden_size=1,
        num_layers=1,
        context_length=1 << 20,
        dtype=torch.float32,
        device=torch.device("cpu"),
        eos_token_ids=(),
        num_parameters=0,
        cache_bytes_per_token=1,
        backend="none",
    )
    rng = np.random.default_rng(0)
    clock = Clock()
    draftwood.drafters.base.top_rows = clock.around(top_rows)
    drafter = make_factory(name, drafter_options(rest.split(",") if rest else []), info).new(0)
    prompt = made_up_text(context, rng)
    logits = torch.from_numpy(rng.normal(0.0, 3.0, (max(CHUNK, args.budget), VOCABULARY)).astype(np.float32))
    drafter.begin(DraftRequest(prompt, SamplingParams(temperature=args.temperature), rng))
    if drafter.wants_prompt_logits:
        for start in range(0, context - 1, CHUNK):
            drafter.read_prompt(PromptRows(start, logits[: min(CHUNK, context - 1 - start)]))
    rows = []
    for _ in range(args.cycles):
        started = time.thread_time()
        tree = drafter.propose(args.budget)
        proposed = time.thread_time() - started
        path, emitted = accepted(tree, rng)
        choices = [0] * len(tree)
        clock.seconds = 0.0
        started = time.thread_time()
        drafter.observe(VerifiedTree(tree, logits[: len(tree)], choices, path, emitted, None))
        observed = time.thread_time() - started - clock.seconds
        rows.append((1e3 * proposed, 1e3 * observed, 1e3 * clock.seconds, float(len(tree))))
    return [statistics.median(column) for column in zip(*rows[args.cycles // 10 :], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD", help="a drafter, with options after a colon")
    parser.add_argument("--contexts", default="100,1000,10000,30000")
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    contexts = [int(length) for length in args.contexts.split(",")]
    print("| drafter | context | nodes | propose, ms | learn, ms | total, ms | top-k, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for method in args.methods:
        for context in contexts:
            propose, observe, top, nodes = measure(method, context, args)
            cells = f"{propose:.3f} | {observe:.3f} | {propose + observe:.3f} | {top:.3f}"
            print(f"| {method} | {context:,} | {nodes:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
