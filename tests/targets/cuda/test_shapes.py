"""The shape of a batch: large enough, and one of few."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.targets.base import chain_parents
from draftwood.targets.native.decoder import PackedBatch, PackedSegment

decoder = pytest.importorskip("draftwood.targets.native.cuda.decoder", reason="Triton is not installed")


def batch_of(sizes: list[tuple[int, int]]) -> PackedBatch:
    """Segments with the given numbers of rows and of requested rows."""
    segments, start = [], 0
    for size, wanted in sizes:
        segments.append(PackedSegment(start, 0, 100, chain_parents(size), min(wanted, size)))
        start += size
    return PackedBatch.of([0] * start, segments)


def shape_of(batch: PackedBatch):  # type: ignore[no-untyped-def]
    return decoder._choose_shape(batch, sum(segment.num_logits for segment in batch.segments), 10, ())


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 600)), min_size=1, max_size=40))
def test_shape_fits_its_batch(sizes: list[tuple[int, int]]) -> None:
    batch = batch_of(sizes)
    shape = shape_of(batch)
    wanted = sum(segment.num_logits for segment in batch.segments)
    assert shape.num_rows >= len(batch.token_ids)
    assert min(len(sizes), shape.num_rows) <= shape.num_sequences <= shape.num_rows
    assert wanted <= shape.num_logits <= shape.num_rows
    assert (shape.num_logits == 0) == (wanted == 0)


def test_server_traffic_has_few_shapes() -> None:
    """Trees of 1 to 40 nodes for up to 32 requests, some of which read their prompts: all shapes stay captured."""
    rng = random.Random(0)
    shapes = set()
    for _ in range(20_000):
        sizes = [(nodes, nodes) for nodes in (rng.randint(1, 40) for _ in range(rng.randint(1, 32)))]
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            prompt = rng.randint(1, 512)
            sizes.append((prompt, rng.choice((0, prompt))))
        shape = shape_of(batch_of(sizes))
        if shape.num_rows <= decoder.ROWS[-1]:
            shapes.add(shape)
    assert 2 * len(shapes) <= decoder.MAX_PASSES  # in two lanes


def test_ready_shape_replaces_one_that_is_not() -> None:
    wanted = decoder.Shape(16, 4, 16, 10)
    ready = [
        decoder.Shape(8, 4, 8, 10),  # too few rows
        decoder.Shape(64, 16, 64, 10),  # four times the rows: takes too long
        decoder.Shape(24, 1, 24, 10),  # too few sequences
        decoder.Shape(24, 16, 0, 10),  # no logits
        decoder.Shape(24, 16, 24, 1),  # too few top entries
        decoder.Shape(24, 16, 24, 10, taps=(3,)),
        decoder.Shape(24, 16, 24, 10, lane=1),
        decoder.Shape(24, 16, 24, 10, is_single=True),  # for plain decoding only
    ]
    assert decoder.find_ready(wanted, ready) is None
    fitting = [decoder.Shape(32, 4, 32, 10), decoder.Shape(24, 16, 24, 12), decoder.Shape(24, 4, 24, 10)]
    assert decoder.find_ready(wanted, ready + fitting) == fitting[2]
    assert decoder.find_ready(wanted._replace(is_single=True), fitting) == fitting[2]
    assert decoder.find_ready(decoder.Shape(1024, 4, 64, 10), [decoder.Shape(1536, 4, 64, 10)]) is None
    large = [decoder.Shape(3072, 32, 64, 10), decoder.Shape(2560, 32, 256, 10)]
    assert decoder.find_ready(decoder.Shape(2048, 32, 64, 10), large) == large[1]
    assert decoder.find_ready(decoder.Shape(2048, 32, 64, 10), large[:1]) is None  # half as many rows again


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=20),
    st.lists(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=20), max_size=8),
)
def test_ready_shape_fits_the_batch(sizes: list[tuple[int, int]], others: list[list[tuple[int, int]]]) -> None:
    shape = shape_of(batch_of(sizes))
    found = decoder.find_ready(shape, [shape_of(batch_of(other)) for other in others])
    if found is not None:
        assert all(own <= other for own, other in zip(shape[:4], found[:4], strict=True))
        assert found.num_rows <= decoder.MAX_WASTE * shape.num_rows


def test_ready_sizes_are_those_of_trees() -> None:
    ready = [
        decoder.Shape(8, 4, 8, 10),
        decoder.Shape(32, 16, 32, 10),
        decoder.Shape(4, 4, 4, 10),  # a pass of 4 rows has no more sequences
        decoder.Shape(16, 1, 16, 10),
        decoder.Shape(512, 16, 64, 10),  # few logits: prompts
        decoder.Shape(24, 16, 24, 10, lane=1),
        decoder.Shape(48, 16, 48, 10, is_single=True),
    ]
    assert decoder.list_ready(16, ready) == (4, 32)
    assert decoder.list_ready(4, ready) == (4, 8, 32)
    assert decoder.list_ready(1, ready) == (4, 8, 16, 32)
