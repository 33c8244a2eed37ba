"""Measures the CPU time of a cycle outside the target's pass, per request, divided by phase. No model runs.

    python benchmarks/host_cycle.py --batches 1,8,32,128 plain goose sam blend pld
    python benchmarks/host_cycle.py --batches 1,8,32 --temperature 0.8 plain goose

The engine, the drafters, sizing and the packing of a GPU pass are real. The target is a table: the token that follows
depends on the token before it and on its position, so that guesses are right about as often as with a model. What the
table itself takes is not counted. ``waiting`` is what the target waits for: from its answer to the launch of the next
pass; the rest is done while that runs. All times are CPU times of the thread (``time.thread_time``), so that other
processes disturb them less; each row is the quickest of several rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.engine import step as cycle
from draftwood.engine.ways import TOGETHER
from draftwood.sizing import CostProfile, LiveCosts
from draftwood.targets import ForwardOutput, PendingPass, Segment, TargetInfo, TopRows
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.inputs import Inputs, new_moves
from draftwood.targets.native.decoder import pack
from draftwood.targets.slots import SlotTarget

VOCABULARY = 49_152
WIDTH = 10  # top entries per row
WORDS = 400  # tokens that occur in the text
LIKELY, KNOWN = 0.45, 0.85  # how often the first entry of a row is right, and any of its entries
PHASES = ("draft", "fit_trees", "launch", "collect", "accept_trees", "learn", "write")  # functions of engine/step.py


class Clock:
    """CPU seconds by phase. Time spent in the table does not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.in_table = 0.0
        self.waiting = 0.0  # CPU seconds between an answer and the next launch
        self._answered: float | None = None

    def answer(self) -> None:
        self._answered = time.thread_time() - self.in_table

    def launch(self) -> None:
        if self._answered is not None:
            self.waiting += time.thread_time() - self.in_table - self._answered
            self._answered = None

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started, before = time.thread_time(), self.in_table
            result = function(*args, **kwargs)
            taken = time.thread_time() - started - (self.in_table - before)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken
            return result

        return timed


class TablePass(PendingPass):
    def __init__(self, clock: Clock, output: ForwardOutput) -> None:
        self._clock, self._output = clock, output

    def wait(self) -> ForwardOutput:
        self._clock.answer()
        return self._output


class TableTarget(SlotTarget):
    """Packs its batch as a GPU target does and reads the answer off a table."""

    num_lanes = 2  # the next pass is launched before the last one is written out

    def __init__(self, clock: Clock, num_slots: int, seed: int = 0) -> None:
        self._clock = clock
        self._cache = KVCache(1, 1, 1, num_slots, torch.float32, torch.device("cpu"))
        rng = np.random.default_rng(seed)
        # Distinct within a row, from a small part of the vocabulary: texts repeat their words.
        self._successors = rng.integers(WORDS // WIDTH, size=(VOCABULARY, WIDTH)) + WORDS // WIDTH * np.arange(WIDTH)
        self._row = torch.from_numpy(rng.normal(0.0, 3.0, VOCABULARY).astype(np.float32))
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._top_logits = np.linspace(8.0, 4.0, WIDTH, dtype=np.float32)
        self._log_total = np.float32(np.log(np.exp(self._top_logits).sum() / 0.95))
        self._num_best = 0
        self.info = TargetInfo(
            name="table",
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
            backend="table",
        )

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        batch = pack(segments, self._cache)
        rows = -(-len(batch.token_ids) // 64) * 64
        sequences = -(-len(segments) // 64) * 64
        if (rows, sequences) not in self._inputs:
            self._inputs[rows, sequences] = Inputs(rows, rows + sequences, 16, torch.device("cpu"))
        self._inputs[rows, sequences].fill(batch, new_moves())
        started = time.thread_time()
        output = self._answer(batch)
        self._clock.in_table += time.thread_time() - started
        return output

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        output = self.forward(segments)
        self._clock.launch()
        return TablePass(self._clock, output)

    def _answer(self, batch: Any) -> ForwardOutput:
        wanted = batch.logit_rows()
        tokens = np.array(batch.token_ids, np.int64)[wanted]
        positions = np.array(batch.positions(), np.int64)[wanted]
        ids = self._successors[tokens].astype(np.int32)
        mixed = ((tokens * 0x9E3779B1 + positions * 0x85EBCA6B) >> 7) % 1009 / 1009
        rank = (np.clip((mixed - LIKELY) / (KNOWN - LIKELY), 0.0, 0.999) * WIDTH).astype(np.int64)
        every = np.arange(len(wanted))
        first = ids[every, rank]
        ids[every, rank], ids[:, 0] = ids[:, 0].copy(), first
        ids[:, 0] = np.where(mixed < KNOWN, first, (tokens + positions) % WORDS)
        first = ids[:, 0].copy()
        top = TopRows(ids, np.tile(self._top_logits, (len(wanted), 1)), np.full(len(wanted), self._log_total))
        logits = self._row.expand(len(wanted), VOCABULARY)
        return ForwardOutput(logits, torch.from_numpy(first.astype(np.int64)), None, top if self._num_best else None)

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self._cache.keep(sequence, nodes, lambda sources, first: None)

    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        return self._cache.fork(sequence, capacity, length)

    def resize(self, sequence: int, capacity: int) -> bool:
        return self._cache.resize(sequence, capacity)

    def set_taps(self, layers: Sequence[int]) -> None:
        pass

    def set_top(self, k: int) -> None:
        self._num_best = k


class Codec:
    """Ten thousand short words instead of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([f" w{token % 10_000}" for token in token_ids])


def costs(batch: int, nodes: int) -> LiveCosts:
    """Costs under which about ``nodes`` positions per request pay: a pass is flat up to there, then steep. It takes so
    long that the time of the host hardly counts."""
    knee = batch * nodes
    sizes = sorted({1, 16, 128, knee, 4 * knee + 128})
    row = [(1.0 + 0.1 * size / knee + 4.0 * max(size - knee, 0) / knee) for size in sizes]
    return LiveCosts(CostProfile(tuple(sizes), (16,), (tuple(row),)))


def measure(name: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """CPU microseconds per request and cycle by phase; also nodes and tokens per request and cycle."""
    clock = Clock()
    room = args.prompt + 8 * args.rounds * args.cycles + 256
    target = TableTarget(clock, batch * room + 4096)
    engine = Engine(target, Codec(), EngineOptions(budget=args.budget, max_batch=batch))  # type: ignore[arg-type]
    engine._ways.of = lambda _: TOGETHER  # type: ignore[method-assign]  # the table takes no time: plain would win
    if args.budget == "auto":
        engine._costs = costs(batch, args.nodes)
    rng = np.random.default_rng(1)
    factory = make_factory(name, {}, target.info)
    params = SamplingParams(max_tokens=room - args.prompt - 192, temperature=args.temperature, seed=1, ignore_eos=True)
    ids = []
    for _ in range(batch):
        prompt = tuple(rng.integers(WORDS, size=args.prompt).tolist())
        ids += engine.submit(GenerationRequest(prompt_ids=prompt, params=params, drafter=factory))
    stats: dict[int, Any] = {}

    def run(count: int) -> None:
        for _ in range(count):
            engine.step()
            for request_id, event in engine.take_ready(ids):
                if isinstance(event, Exception):
                    raise event
                stats[request_id] = event.stats

    while len(stats) < batch:
        run(1)
    run(args.warm_up)
    wrapped = {phase: getattr(cycle, phase) for phase in PHASES if hasattr(cycle, phase)}
    rounds: list[dict[str, float]] = []
    try:
        for phase, function in wrapped.items():
            setattr(cycle, phase, clock.around(phase, function))
        for _ in range(args.rounds):
            clock.seconds.clear()
            clock.waiting = 0.0
            started, before = time.thread_time(), clock.in_table
            run(args.cycles)
            total = time.thread_time() - started - (clock.in_table - before)
            per = {phase: 1e6 * clock.seconds.get(phase, 0.0) / args.cycles / batch for phase in wrapped}
            per["total"] = 1e6 * total / args.cycles / batch
            per["waiting"] = 1e6 * clock.waiting / args.cycles / batch
            per["rest"] = per["total"] - sum(per[phase] for phase in wrapped)
            rounds.append(per)
    finally:
        for phase, function in wrapped.items():
            setattr(cycle, phase, function)
    found = min(rounds, key=lambda per: per["total"])
    cycles = sum(stat.cycles for stat in stats.values())
    found["nodes"] = sum(stat.drafted_nodes for stat in stats.values()) / cycles + 1.0
    found["tokens"] = sum(stat.output_tokens for stat in stats.values()) / cycles
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--budget", default="auto", help="'auto' (default) or a number of nodes")
    parser.add_argument("--nodes", type=int, default=24, help="nodes per request that 'auto' finds worth their cost")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--cycles", type=int, default=4, help="per round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="for the drafts of a batch")
    parser.add_argument("--warm-up", type=int, default=20, help="cycles before the first round")
    args = parser.parse_args(argv)
    args.budget = args.budget if args.budget == "auto" else int(args.budget)
    torch.set_num_threads(args.threads)
    phases = [phase for phase in PHASES if hasattr(cycle, phase)]
    print(f"| drafter | batch | nodes | tokens | {' | '.join(phases)} | rest | total, us | waiting |")
    print("| --- " * (7 + len(phases)) + "|")
    for name in args.drafters:
        for batch in map(int, args.batches.split(",")):
            found = measure(name, batch, args)
            cells = " | ".join(f"{found[key]:.1f}" for key in (*phases, "rest", "total", "waiting"))
            print(f"| {name} | {batch} | {found['nodes']:.1f} | {found['tokens']:.2f} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
