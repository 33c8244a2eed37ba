"""What the host does in a cycle of goose, all of it, from the draft to the text. No model runs.

    python benchmarks/goose_cycle.py
    python benchmarks/goose_cycle.py --requests 32 --budget 8
    DRAFTWOOD_NO_KERNEL=1 python benchmarks/goose_cycle.py

The engine runs as ever, on a stand-in target: the decoder for GPUs with passes that launch nothing. The text is made
up: it follows a table of successors with its probabilities, and now and then repeats a stretch of itself. After every
node the stand-in says what that table says, along the text its next token first. What it takes to find that answer is
not part of the figures. Medians over the cycles; the last line is of a table that was filled to its capacity before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from draftwood import SamplingParams
from draftwood.config import EngineOptions
from draftwood.drafters.goose import GooseDrafter
from draftwood.drafters.registry import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.engine.session import Session
from draftwood.models.config import ModelConfig
from draftwood.models.tensors import tensor_shapes
from draftwood.sizing.costs import SIZES, CostProfile
from draftwood.sources.transitions import SuccessorArrays, TransitionTable
from draftwood.targets.base import ForwardOutput, Segment, TargetInfo
from draftwood.targets.native.cuda.attention.plan import choose_config, max_tiles
from draftwood.targets.native.cuda.decoder import CapturedPass, CudaDecoder, PassOutput
from draftwood.targets.native.cuda.inputs import Inputs
from draftwood.targets.native.cuda.passes import Pass, Shape
from draftwood.targets.native.cuda.products.launch import MAX_ROWS
from draftwood.targets.native.decoder import PackedBatch
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import Weights, assemble
from draftwood.targets.tiny import TINY_CONFIG
from draftwood.text.tokenizer import Tokenizer

VOCABULARY, WIDTH = 151_936, 10
IN_USE = 20_000  # tokens that the text is made of
# A large GPU: 64 positions cost little more than one.
COSTS = CostProfile(SIZES, (16, 512), (tuple(1e-3 * (1.0 + 0.001 * size) for size in SIZES),) * 2)
PARTS = ("propose", "cut", "forward", "accept", "text", "count", "note", "observe", "keep")
CPU = torch.device("cpu")


class World(NamedTuple):
    """What the stand-in target thinks: the successors of every token in use."""

    ids: npt.NDArray[np.int32]  # [IN_USE, K]
    scores: npt.NDArray[np.float32]  # [IN_USE, K] best first


@lru_cache(maxsize=1)
def made_up_world() -> World:
    rng = np.random.default_rng(0)
    scores = rng.dirichlet(np.full(WIDTH, 0.3), IN_USE)
    scores.sort(axis=1)
    offsets = rng.integers(1, IN_USE // WIDTH, (IN_USE, WIDTH)).cumsum(axis=1)
    ids = (np.arange(IN_USE)[:, None] + offsets) % IN_USE
    return World(ids.astype(np.int32), np.ascontiguousarray(0.9 * scores[:, ::-1], dtype=np.float32))


def made_up_text(length: int, seed: int) -> list[int]:
    world, rng = made_up_world(), np.random.default_rng(seed)
    text = [1]
    while len(text) < length:
        if len(text) > 200 and rng.random() < 0.03:  # says again what it said before
            start = int(rng.integers(len(text) - 100))
            text += text[start : start + int(rng.integers(5, 60))]
        rank = int((rng.random() > world.scores[text[-1]].cumsum()).sum())
        text.append(int(world.ids[text[-1], rank]) if rank < WIDTH else int(rng.integers(IN_USE)))
    return text


def filled_table(num_pairs: int, full: bool) -> TransitionTable:
    """Begins with what the world thinks, as behind `draftwood tune`."""
    ids, scores = np.full((VOCABULARY, WIDTH), -1, np.int32), np.zeros((VOCABULARY, WIDTH), np.float32)
    ids[:IN_USE], scores[:IN_USE] = made_up_world()
    table = TransitionTable(VOCABULARY, WIDTH, num_pairs=num_pairs, initial=SuccessorArrays(ids, scores))
    if full:
        rng = np.random.default_rng(1)
        for _ in range(num_pairs // 1000 + 1):
            before, tokens = rng.integers(IN_USE, VOCABULARY, (2, 1000)).tolist()
            table.learn(before, tokens, np.zeros((1000, WIDTH), np.int32), np.zeros((1000, WIDTH), np.float32))
    return table


class PreparedGoose(GooseDrafter):
    """`goose` with a table that is there already."""

    table: TransitionTable

    @classmethod
    def share(cls, options: object, target: TargetInfo) -> None:
        return None

    @classmethod
    def new_memory(cls, options: object, target: TargetInfo, shared: object) -> TransitionTable:
        return cls.table


class StandInPass(Pass):
    """Launches nothing: its answer was given to the decoder."""

    def __init__(self, shape: Shape, answers: StandInDecoder) -> None:
        plan = choose_config(
            num_nodes=shape.num_rows,
            num_sequences=shape.num_sequences,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            num_processors=132,
            shared_bytes=227 << 10,
        )
        num_tiles = max_tiles(shape.num_rows, shape.num_sequences, plan.nodes_per_tile)
        self.inputs = Inputs(shape.num_rows, num_tiles, plan.nodes_per_tile, CPU)
        self.selects_rows = shape.num_rows > MAX_ROWS
        self.taps = None
        self.logits = torch.empty(shape.num_logits, VOCABULARY)
        self._shape = shape
        self._answers = answers
        self._answer = torch.zeros(shape.num_logits, 2 * shape.num_best + 1, dtype=torch.int32)

    def replay(self) -> None:
        started = time.perf_counter()
        words = self._answers.words
        self._answer.numpy()[: len(words)] = words
        self._answers.seconds += time.perf_counter() - started

    def launch(self) -> None: ...
    def _prepare(self) -> Any: ...
    def _project(self, *_: object) -> None: ...
    def _finish(self, *_: object) -> None: ...
    def _head(self) -> Any: ...


class StandInDecoder(CudaDecoder):
    words: npt.NDArray[np.int32]  # [N, 2K + 1] what the next pass answers
    seconds = 0.0  # spent on answers

    def _first_run(self, shape: Shape, batch: PackedBatch) -> CapturedPass[Pass]:
        work: Any = StandInPass(shape, self)
        work.inputs.fill(batch, self._moves)
        work.replay()
        return CapturedPass(work, work, PassOutput(work))


class StandInTarget(NativeTarget):
    """Keeps the books of its cache as ever, and knows the texts."""

    def __init__(self, texts: Sequence[list[int]], num_slots: int) -> None:
        config, weights = tiny_weights()
        super().__init__("stand-in", config, weights, num_slots, backend="eager")
        self.info = replace(self.info, vocab_size=VOCABULARY, context_length=num_slots, eos_token_ids=())
        self.decoder = self._decoder = StandInDecoder(config, weights, self._cache)
        self._texts = texts

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        started = time.perf_counter()
        self.decoder.words = np.concatenate([self._answer(segment) for segment in segments])
        self.decoder.seconds += time.perf_counter() - started
        return super().forward(segments)

    def _answer(self, segment: Segment) -> npt.NDArray[np.int32]:
        """[n, 2K + 1] ids, logits and totals, as they come from a GPU."""
        text, world = self._texts[segment.sequence], made_up_world()
        tokens = np.array(segment.token_ids)
        words = np.zeros((len(tokens), 2 * WIDTH + 1), np.int32)
        words[:, :WIDTH] = world.ids[tokens]
        words[:, WIDTH : 2 * WIDTH] = np.log(world.scores[tokens]).view(np.int32)
        places: list[int | None] = []  # in the text
        for node, parent in enumerate(segment.parents):
            above = self.length(segment.sequence) - 1 if parent < 0 else places[parent]
            on_text = above is not None and text[above + 1] == segment.token_ids[node]
            places.append(above + 1 if on_text and above is not None else None)
            if on_text and above is not None:
                following = text[above + 2]
                others = [i for i in words[node, :WIDTH].tolist() if i != following]
                words[node, :WIDTH] = [following, *others][:WIDTH]
        return words


def tiny_weights() -> tuple[ModelConfig, Weights]:
    """Of a model that never runs."""
    shapes = tensor_shapes(TINY_CONFIG)
    return TINY_CONFIG, assemble(TINY_CONFIG, lambda name: torch.zeros(shapes[name]))


def made_up_tokenizer() -> Tokenizer:
    """Decodes as those of most models do, from byte-level pieces of some letters."""
    rng = np.random.default_rng(2)
    letters = rng.integers(ord("a"), ord("z") + 1, (VOCABULARY, 3)).astype(np.uint8)
    vocabulary = {f"\u0120{bytes(row).decode()}{number}": number for number, row in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


class Clock:
    """Adds up what parts of a cycle take."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def watch(self, owner: object, method: str, part: str) -> None:
        call, seconds = getattr(owner, method), self.seconds

        def timed(*args: object) -> Any:
            started = time.perf_counter()
            result = call(*args)
            seconds[part] += time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def watch_session(self, session: Session) -> None:
        self.watch(session.drafter, "propose", "propose")
        self.watch(session.drafter, "observe", "observe")
        self.watch(session, "accept", "accept")
        self.watch(session, "_cut", "text")
        self.watch(session, "_count", "count")
        if session._sizer is not None:
            self.watch(session._sizer, "cut", "cut")
            self.watch(session._sizer, "note", "note")


def measure(args: argparse.Namespace, *, auto: bool, full: bool) -> dict[str, float]:
    """Milliseconds by part, and nodes and tokens of a request; medians over the cycles, but means of tokens."""
    texts = [made_up_text(args.context + 12 * args.cycles, seed) for seed in range(args.requests)]
    room = max(map(len, texts)) + max(args.budget, COSTS.largest)
    target = StandInTarget(texts, args.requests * (room + 1))
    options = EngineOptions(budget="auto" if auto else args.budget, max_batch=args.requests)
    engine = Engine(target, made_up_tokenizer(), options)
    engine._costs = COSTS if auto else None
    PreparedGoose.table = filled_table(args.pairs, full)
    factory = make_factory(PreparedGoose, {}, target.info)
    for text in texts:
        params = SamplingParams(max_tokens=len(text) - args.context - 2, temperature=args.temperature, seed=0)
        engine.submit(GenerationRequest(prompt_ids=tuple(text[: args.context]), params=params, drafter=factory))
    clock = Clock()
    clock.watch(target, "forward", "forward")
    clock.watch(target, "keep", "keep")
    engine.step()
    while any(session.is_prefilling for session in engine._scheduler.running):
        engine.step()
    for session in engine._scheduler.running:
        clock.watch_session(session)
    others = np.zeros(args.cold << 17)
    timed: list[dict[str, float]] = []
    while len(timed) < args.cycles and len(engine._scheduler.running) == args.requests:
        others += 1.0  # what a forward does to the caches
        clock.seconds.update(dict.fromkeys(PARTS, 0.0))
        target.decoder.seconds = 0.0
        sessions = list(engine._scheduler.running)
        before = sum(session.stats.output_tokens for session in sessions)
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started - target.decoder.seconds
        clock.seconds["forward"] -= target.decoder.seconds
        row = {part: 1e3 * clock.seconds[part] for part in PARTS}
        row["rest"] = 1e3 * (seconds - sum(clock.seconds.values()))
        row["together"] = 1e3 * seconds
        row["nodes"] = sum(len(session._tree) for session in sessions) / len(sessions)
        row["tokens"] = (sum(session.stats.output_tokens for session in sessions) - before) / len(sessions)
        timed.append(row)
    engine.clear()
    steady = timed[len(timed) // 5 :]
    medians = {name: statistics.median(row[name] for row in steady) for name in steady[0]}
    return medians | {"tokens": statistics.mean(row["tokens"] for row in steady)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--requests", type=int, default=1, help="that run together")
    parser.add_argument("--cycles", type=int, default=400)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=100_000, help="capacity of the table of pairs")
    parser.add_argument("--cold", type=int, default=0, help="megabytes that are touched between cycles")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    columns = (*PARTS, "rest", "together")
    print(f"| budget | table | nodes | tokens | {' | '.join(columns)} | (milliseconds)")
    print("| --- " * (len(columns) + 4) + "|")
    for auto, full in ((False, False), (True, False), (False, True)):
        row = measure(args, auto=auto, full=full)
        cells = " | ".join(f"{row[name]:.3f}" for name in columns)
        name, table = "auto" if auto else str(args.budget), "full" if full else "new"
        print(f"| {name} | {table} | {row['nodes']:.0f} | {row['tokens']:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
