"""Measures the time per cycle outside the target's forward: drafting, acceptance, compaction, text, bookkeeping.

    python benchmarks/cycle_overhead.py --budget 60 --model smollm2

A test drafter proposes full trees around the correct continuation: some nodes are accepted in every cycle, and they are
scattered over the tree, so that the cache has rows to move.
"""

from __future__ import annotations

import argparse
import statistics
import time

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree
from draftwood.tree import DraftTree, TreeBuilder

DEPTH = 4  # correct tokens per cycle


class FullTreeDrafter(Drafter):
    """Proposes the recorded continuation among wrong tokens, always filling the budget."""

    name = "full-tree"
    recorded: list[int] = []  # noqa: RUF012 - set once by main

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]
        self._ahead = list(self.recorded)

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._last)
        width = (budget - 1) // DEPTH
        node = 0
        for token in self._ahead[:DEPTH]:
            for decoy in range(width - 1):
                builder.add(node, (token + 1 + decoy) % 256, "decoy")
            node = builder.add(node, token, "right")
        return builder.build()

    def observe(self, verified: VerifiedTree) -> None:
        self._ahead = self._ahead[len(verified.emitted) :]
        self._last = verified.emitted[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="plain", budget=args.budget)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    prompt = "Once upon a time, in a town by the sea,"
    FullTreeDrafter.recorded = llm.generate(prompt, params)[0].token_ids
    rows = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        stats = llm.generate(prompt, params, drafter=FullTreeDrafter)[0].stats
        wall = time.perf_counter() - started
        outside = stats.total_seconds - stats.verify_seconds - stats.prefill_seconds
        rows.append([1e3 * x / stats.cycles for x in (outside, stats.draft_seconds, stats.accept_seconds, wall)])
    outside, draft, accept, cycle = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{args.model}, budget {args.budget}, tau {stats.acceptance_length:.2f}, {llm.info.backend} {llm.info.dtype}")
    print(
        f"outside the forward: {outside:.3f} ms a cycle (draft {draft:.3f}, accept {accept:.3f}); cycle {cycle:.2f} ms"
    )


if __name__ == "__main__":
    main()
