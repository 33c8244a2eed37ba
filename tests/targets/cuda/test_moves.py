"""Cache rows that the GPU decoder moves with its next pass: none is lost, swapped or moved too late."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.targets.cache import KVCache
from draftwood.targets.native.weights import assemble
from tests.conftest import path_to, random_parents
from tests.tools.cuda import SMALL, named_tensors

pytest.importorskip("triton")

from draftwood.targets.native.cuda import decoder as cuda_decoder
from draftwood.targets.native.cuda.kernels.rows import MOVES_AT_ONCE

FEW_MOVES = 7  # maximum pending moves, exceeded often
NUM_SLOTS = 120
MAX_NODES = 9
STEPS = ("pass", "pass", "keep", "keep", "keep all", "truncate", "fork", "close", "open", "look")


@pytest.fixture(autouse=True, scope="module")
def few_moves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_decoder, "MAX_MOVES", FEW_MOVES)
        yield


class Books:
    """The moves of a decoder over a cache with numbered rows, and the expected rows of each sequence."""

    def __init__(self) -> None:
        named = named_tensors(SMALL)
        weights = assemble(SMALL, lambda name: named[name].to(torch.bfloat16))
        self.cache = KVCache(1, 1, 2, NUM_SLOTS, torch.float32, torch.device("cpu"))
        self.decoder = cuda_decoder.CudaDecoder(SMALL, weights, self.cache)
        self.committed: dict[int, list[int]] = {}
        self.nodes: dict[int, tuple[list[int], list[int]]] = {}  # parents and rows of the last pass
        self.last = 0

    def step(self, name: str, rng: random.Random) -> None:
        if name == "pass":
            self.run_pass([s for s in self.committed if rng.random() < 0.7], rng)
        elif name == "open":
            self.open(rng.randint(MAX_NODES, 40))
        elif name == "look":
            self.decoder._move_now()
            self.check()
        elif self.committed:
            sequence = rng.choice(list(self.committed))
            getattr(self, name.replace(" ", "_"))(sequence, rng)

    def open(self, capacity: int) -> None:
        if self.cache.can_open(capacity):
            self.committed[self.cache.open(capacity)] = []

    def run_pass(self, sequences: list[int], rng: random.Random) -> None:
        """Apply pending moves, as the kernel does, and then write rows for new nodes."""
        self.apply_waiting()
        for sequence in sequences:
            extent = self.cache[sequence]
            room = min(extent.capacity - extent.length, MAX_NODES)
            if room == 0:
                continue
            parents = random_parents(rng, rng.randint(1, room))
            self.cache.reserve(sequence, parents)
            first = extent.base + extent.length
            rows = list(range(self.last + 1, self.last + 1 + len(parents)))
            self.last = rows[-1]
            for kind, sign in ((self.cache.keys, 1), (self.cache.values, -1)):
                kind[0, 0, first : first + len(rows)] = sign * torch.tensor(rows, dtype=torch.float32)[:, None]
            self.nodes[sequence] = parents, rows

    def apply_waiting(self) -> None:
        sources, targets = (list(slots) for slots in self.decoder._moves)
        assert len(sources) <= FEW_MOVES
        for start in range(0, len(sources), MOVES_AT_ONCE):
            part = slice(start, start + MOVES_AT_ONCE)
            for rows in (self.cache.keys, self.cache.values):
                rows[:, :, targets[part]] = rows[:, :, sources[part]].clone()
        self.decoder._forget_moves()

    def keep(self, sequence: int, rng: random.Random) -> None:
        if sequence in self.nodes:
            parents, rows = self.nodes.pop(sequence)
            path = path_to(parents, rng.randrange(len(parents)))
            self.cache.keep(sequence, path, self.decoder.move_rows)
            self.committed[sequence] += [rows[node] for node in path]

    def keep_all(self, sequence: int, rng: random.Random) -> None:
        """As the engine does after a pass."""
        for other in list(self.nodes):
            self.keep(other, rng)

    def truncate(self, sequence: int, rng: random.Random) -> None:
        length = rng.randint(0, len(self.committed[sequence]))
        self.cache.truncate(sequence, length)
        del self.committed[sequence][length:]
        self.nodes.pop(sequence, None)

    def fork(self, sequence: int, rng: random.Random) -> None:
        rows = self.committed[sequence]
        capacity = len(rows) + rng.randint(1, MAX_NODES)
        if self.cache.can_open(capacity):
            self.committed[self.cache.fork(sequence, capacity, move=self.decoder.move_rows)] = list(rows)

    def close(self, sequence: int, rng: random.Random) -> None:
        self.cache.close(sequence)
        del self.committed[sequence]
        self.nodes.pop(sequence, None)

    def check(self) -> None:
        for sequence, rows in self.committed.items():
            extent = self.cache[sequence]
            assert extent.length == len(rows)
            slots = slice(extent.base, extent.base + extent.length)
            assert self.cache.keys[0, 0, slots, 0].tolist() == rows
            assert self.cache.values[0, 0, slots, 1].tolist() == [-row for row in rows]


steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10_000)), max_size=60)
# A copy of rows that are still pending; slots that are reassigned while rows are pending for them.
FORK_AT_ONCE = [("pass", 3), ("pass", 3), ("keep", 5), ("fork", 1), ("pass", 2), ("look", 0)]
CLOSE_AND_REUSE = [
    ("pass", 3),
    ("keep", 5),
    ("fork", 1),
    ("close", 0),
    ("open", 4),
    ("fork", 2),
    ("pass", 2),
    ("look", 0),
]


@settings(max_examples=150)
@given(steps=steps, seed=st.integers(0, 100))
@example(steps=FORK_AT_ONCE, seed=0)
@example(steps=CLOSE_AND_REUSE, seed=0)
def test_every_sequence_keeps_its_rows(steps: list[tuple[str, int]], seed: int) -> None:
    books = Books()
    for capacity in (30, 20):
        books.open(capacity)
    books.run_pass(list(books.committed), random.Random(seed))
    for name, number in steps:
        books.step(name, random.Random(number))
    books.apply_waiting()
    books.check()


def test_long_runs_cover_every_case() -> None:
    """Thousands of steps: several pending moves, none, and more than the maximum."""
    books, rng = Books(), random.Random(1)
    waiting, at_once = 0, 0
    for _ in range(3000):
        books.step(rng.choice(STEPS), rng)
        count = len(books.decoder._moves.sources)
        at_once += count < waiting
        waiting = count
    books.decoder._move_now()
    books.check()
    assert at_once > 100


def test_more_moves_than_fit_are_applied_at_once() -> None:
    books = Books()
    books.open(40)
    books.run_pass([0], random.Random(0))
    before = books.cache.keys[0, 0, :, 0].clone()
    books.decoder.move_rows(list(range(10, 10 + FEW_MOVES)), 5)
    assert torch.equal(books.cache.keys[0, 0, :, 0].nan_to_num(), before.nan_to_num())
    books.decoder.move_rows(list(range(60, 61 + FEW_MOVES)), 50)  # other pending moves go first
    after = books.cache.keys[0, 0, :, 0]
    assert torch.equal(after[5 : 5 + FEW_MOVES].nan_to_num(), before[10 : 10 + FEW_MOVES].nan_to_num())
    assert torch.equal(after[50 : 51 + FEW_MOVES].nan_to_num(), before[60 : 61 + FEW_MOVES].nan_to_num())
    assert not books.decoder._moves.sources
