"""Compares drawn with chosen children: the probability that one of k children is accepted.

    python benchmarks/drawn_or_chosen.py --data PROMPTS --tasks gsm8k --prompts 4 --samples 8

Outputs are sampled with plain decoding. Before each token STAND's tables are queried for their distribution q at the
context; afterwards they learn the target's p. Chosen: the k best tokens of q, accepted with their probability under p.
Drawn: k tokens drawn from q without replacement and verified in sequence (verify/sampling.py), averaged over draws.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections import defaultdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from draftwood import LLM, SamplingParams
from draftwood.config import ModelOptions
from draftwood.drafters import DraftRequest, VerifiedTree
from draftwood.drafters.stand import StandDrafter
from draftwood.prompts import prompt_ids, read_prompts
from draftwood.sampling import Warper
from draftwood.targets.load import load_target
from draftwood.tree import DraftTree

CHILDREN = (1, 2, 3, 5, 8)
BEST = (0.5, 0.8, 0.95)
DRAWS = 32

Floats = npt.NDArray[np.float64]
Entry = tuple[list[float], list[float], float]  # chosen, drawn, overlap of p and q


class Observer(StandDrafter):
    """Drafts nothing and records the distribution STAND would have drafted from."""

    name = "observer"
    found: ClassVar[dict[tuple[int, int, int], list[Entry]]] = defaultdict(list)  # by sample, certainty of p, of q
    sample = 0

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._warper = Warper(request.params, request.prompt_ids)

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.root_only(self._root)

    def observe(self, verified: VerifiedTree) -> None:
        known, ids, stored = self.memory.rows([self._context])
        if known:
            p = self._warper.probs(verified.logits[0]).double().numpy()
            kept = stored[0] > 0
            q = stored[0][kept].astype(np.float64)
            on_support = p[ids[0][kept]]
            q /= q.sum()
            chosen = [float(on_support[:k].sum()) for k in CHILDREN]
            drawn = drawn_chances(on_support, 1.0 - on_support.sum(), q)
            entropy = float(-(p[p > 0] * np.log(p[p > 0])).sum())
            key = (Observer.sample, bisect((0.1, 1.0), entropy), bisect(BEST, float(q.max())))
            Observer.found[key].append((chosen, drawn, float(np.minimum(on_support, q).sum())))
        super().observe(verified)


def drawn_chances(p: Floats, outside: float, q: Floats) -> list[float]:
    """Probability that one of the first k draws is accepted; ``p`` [S] on the support of q, ``outside`` the rest."""
    rng = np.random.default_rng(0)
    totals = np.zeros(max(CHILDREN))
    for _ in range(DRAWS):
        order = np.argsort(rng.standard_exponential(len(q)) / q)
        left_p, left_q, rest, missed = p.copy(), q.copy(), outside, 1.0
        for step in range(max(CHILDREN)):
            if step < len(order):
                mass, token = left_p.sum() + rest, order[step]
                scaled = left_q * (mass / max(left_q.sum(), 1e-300))
                missed *= 1.0 - min(1.0, left_p[token] / max(scaled[token], 1e-300))
                left_p = np.maximum(left_p - scaled, 0.0)
                left_q[token] = 0.0
            totals[step] += 1.0 - missed
    return [float(totals[k - 1] / DRAWS) for k in CHILDREN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tasks", default="gsm8k")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    loaded = load_target(ModelOptions(model=args.model, max_batch=1))
    for task in args.tasks.split(","):
        for conversation in read_prompts(Path(args.data) / f"{task}.jsonl", args.prompts):
            # One memory per prompt, shared by its samples.
            llm = LLM.from_target(loaded.target, loaded.codec, drafter=Observer, budget=1, memory="process")
            for sample in range(args.samples):
                Observer.sample = sample
                params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=sample)
                llm.generate([prompt_ids(loaded.codec, conversation)], params)
    for title, chosen_keys in (
        ("all contexts", lambda key: True),
        ("first sample", lambda key: key[0] == 0),
        ("last half of the samples", lambda key: key[0] >= args.samples // 2),
        ("p nearly certain (entropy below 0.1)", lambda key: key[1] == 0),
        ("p in between", lambda key: key[1] == 1),
        ("p uncertain (entropy above 1)", lambda key: key[1] == 2),
        ("the best of q below 0.5", lambda key: key[2] == 0),
        ("the best of q 0.5 to 0.8", lambda key: key[2] == 1),
        ("the best of q 0.8 to 0.95", lambda key: key[2] == 2),
        ("the best of q above 0.95", lambda key: key[2] == 3),
    ):
        show(title, [entry for key, entries in Observer.found.items() if chosen_keys(key) for entry in entries])


def show(title: str, entries: list[Entry]) -> None:
    if not entries:
        return
    chosen = np.mean([entry[0] for entry in entries], axis=0)
    drawn = np.mean([entry[1] for entry in entries], axis=0)
    overlap = np.mean([entry[2] for entry in entries])
    print(f"\n{title}: {len(entries)} contexts, overlap of p and q {overlap:.3f}")
    print("| children | " + " | ".join(map(str, CHILDREN)) + " |\n| --- |" + " --- |" * len(CHILDREN))
    print("| chosen | " + " | ".join(f"{value:.3f}" for value in chosen) + " |")
    print("| drawn | " + " | ".join(f"{value:.3f}" for value in drawn) + " |", flush=True)


if __name__ == "__main__":
    main()
