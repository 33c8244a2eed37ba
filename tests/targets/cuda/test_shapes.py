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
    return PackedBatch([0] * start, segments)


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
