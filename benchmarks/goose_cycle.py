"""What a cycle of goose costs outside the target's forward: proposing, sizing, accepting and learning. No model runs.

    python benchmarks/goose_cycle.py
    DRAFTWOOD_NO_KERNEL=1 python benchmarks/goose_cycle.py

The text is made up: it follows a table of successors with its probabilities, and now and then repeats a stretch of
itself. The stand-in target says after every node what that table says, ready as the best K of each row, so finding them
is not part of the figures. Medians over the cycles; a second table is timed after it was filled to its capacity.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood import SamplingParams
from draftwood.drafters import DraftRequest, Verified
from draftwood.drafters.goose import GooseDrafter, GooseOptions
from draftwood.engine.costs import SIZES, CostProfile
from draftwood.engine.sizing import DRAFTER_DECAY, AcceptanceRecord, Load, Sizer
from draftwood.engine.stats import RequestStats
from draftwood.sources.transitions import SuccessorArrays, TransitionTable
from draftwood.target.toprows import TopRows
from draftwood.tree import DraftTree
from draftwood.verify import accept_greedy

VOCABULARY, WIDTH = 151_936, 10
IN_USE = 20_000  # tokens that the text is made of
# A large GPU: 64 positions cost little more than one.
COSTS = CostProfile(SIZES, (16, 512), (tuple(1e-3 * (1.0 + 0.001 * size) for size in SIZES),) * 2)
PARTS = ("propose", "cut", "accept", "count", "note", "observe")


class World(NamedTuple):
    """What the stand-in target thinks: the successors of every token in use."""

    ids: npt.NDArray[np.int32]  # [IN_USE, K]
    scores: npt.NDArray[np.float32]  # [IN_USE, K] best first


def made_up_world(rng: np.random.Generator) -> World:
    scores = rng.dirichlet(np.full(WIDTH, 0.3), IN_USE)
    scores.sort(axis=1)
    offsets = rng.integers(1, IN_USE // WIDTH, (IN_USE, WIDTH)).cumsum(axis=1)
    ids = (np.arange(IN_USE)[:, None] + offsets) % IN_USE
    return World(ids.astype(np.int32), np.ascontiguousarray(0.9 * scores[:, ::-1], dtype=np.float32))


def made_up_text(world: World, length: int, rng: np.random.Generator) -> list[int]:
    text = [1]
    while len(text) < length:
        if len(text) > 200 and rng.random() < 0.03:  # says again what it said before
            start = int(rng.integers(len(text) - 100))
            text += text[start : start + int(rng.integers(5, 60))]
        rank = int((rng.random() > world.scores[text[-1]].cumsum()).sum())
        text.append(int(world.ids[text[-1], rank]) if rank < WIDTH else int(rng.integers(IN_USE)))
    return text


def best_of(tree: DraftTree, world: World) -> TopRows:
    """What a target would have found already."""
    tokens = np.array(tree.tokens)
    return TopRows(world.ids[tokens], np.log(world.scores[tokens]), np.zeros(len(tree), np.float32))


def filled_table(world: World, num_pairs: int, full: bool) -> TransitionTable:
    """Begins with what the world thinks, as behind `draftwood tune`."""
    ids, scores = np.full((VOCABULARY, WIDTH), -1, np.int32), np.zeros((VOCABULARY, WIDTH), np.float32)
    ids[:IN_USE], scores[:IN_USE] = world
    table = TransitionTable(VOCABULARY, WIDTH, num_pairs=num_pairs, initial=SuccessorArrays(ids, scores))
    if full:
        rng = np.random.default_rng(1)
        for _ in range(num_pairs // 1000 + 1):
            before, tokens = rng.integers(IN_USE, VOCABULARY, (2, 1000)).tolist()
            table.learn(before, tokens, np.zeros((1000, WIDTH), np.int32), np.zeros((1000, WIDTH), np.float32))
    return table


def measure(args: argparse.Namespace, *, auto: bool, full: bool) -> dict[str, float]:
    """Milliseconds by part, and nodes, tokens and seconds; medians over the cycles."""
    rng = np.random.default_rng(0)
    world = made_up_world(rng)
    text = made_up_text(world, args.context + 80 * args.cycles, rng)
    drafter = GooseDrafter(GooseOptions(), None, filled_table(world, args.pairs, full))
    drafter.begin(DraftRequest(text[: args.context], SamplingParams(), rng))
    sizer = Sizer(COSTS, AcceptanceRecord(DRAFTER_DECAY))
    stats = RequestStats()
    no_logits = torch.empty(0)
    others = np.zeros(args.cold << 17)
    done = args.context  # tokens of the text that are committed; the last of them is the root
    timed: list[dict[str, float]] = []
    for _ in range(args.cycles):
        others += 1.0  # what a forward does to the caches
        marks = [time.perf_counter()]
        offered = drafter.propose(min(args.budget, sizer.wanted) if auto else args.budget)
        marks.append(time.perf_counter())
        tree = sizer.cut(offered, done - 1, 1e-4, Load()) if auto and len(offered) > 1 else offered
        tree = tree.first(1 << 20).limited(1 << 20)
        marks.append(time.perf_counter())
        # The word of the target: along the text its next token, elsewhere none that matters.
        choices = [text[done + depth] for depth in tree.depths]
        ready = time.perf_counter()
        accepted = accept_greedy(tree, choices)
        emitted = accepted.token_ids(tree)
        accepting = time.perf_counter() - ready
        top = best_of(tree, world)
        counting = time.perf_counter()
        stats.note_tree(tree, accepted.path[1:], len(emitted))
        noting = time.perf_counter()
        if auto:
            sizer.note(offered, tree, emitted)
        observing = time.perf_counter()
        drafter.observe(Verified(tree, no_logits, choices, accepted.path, emitted, None, top))
        end = time.perf_counter()
        done += len(emitted)
        drafting = (marks[1] - marks[0], marks[2] - marks[1])
        seconds = (*drafting, accepting, noting - counting, observing - noting, end - observing)
        row = {name: 1e3 * part for name, part in zip(PARTS, seconds, strict=True)}
        timed.append({**row, "together": 1e3 * sum(seconds), "nodes": float(len(tree)), "tokens": float(len(emitted))})
    steady = timed[len(timed) // 5 :]
    medians = {name: statistics.median(row[name] for row in steady) for name in steady[0]}
    return medians | {"tokens": statistics.mean(row["tokens"] for row in steady)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--cycles", type=int, default=400)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=100_000, help="capacity of the table of pairs")
    parser.add_argument("--cold", type=int, default=0, help="megabytes that are touched between cycles")
    args = parser.parse_args()
    print(f"| budget | table | nodes | tokens | {' | '.join(f'{part}, ms' for part in PARTS)} | together, ms |")
    print("| --- " * (len(PARTS) + 5) + "|")
    for auto, full in ((False, False), (True, False), (False, True)):
        row = measure(args, auto=auto, full=full)
        cells = " | ".join(f"{row[name]:.3f}" for name in (*PARTS, "together"))
        name = "auto" if auto else str(args.budget)
        print(
            f"| {name} | {'full' if full else 'new'} | {row['nodes']:.0f} | {row['tokens']:.2f} | {cells} |", flush=True
        )


if __name__ == "__main__":
    main()
