"""Trees that grow over several passes: every node gets the same logits as in a single pass."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import CapabilityError
from draftwood.targets.base import Segment, Target, chain_parents
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.decoder import PackedBatch, PackedSegment, pack
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble
from draftwood.targets.tiny import tiny_target
from tests.conftest import prefill
from tests.tools.cuda import SMALL, named_tensors
from tests.tools.growing import check_growth, passes_of, random_growth

VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "everything": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 24,
        "qk_norm": True,
        "qkv_bias": True,
        "sliding_window": 70,
    },
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
fused_cpu = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")


@lru_cache
def target_of(variant: str, dtype: str, backend: str) -> NativeTarget:
    config = replace(SMALL, **VARIANTS[variant])
    tensors = named_tensors(config)
    weights = assemble(config, lambda name: tensors[name].to(TYPES[dtype]))
    return NativeTarget(backend, config, weights, 4096, backend=backend)


def check(target: Target, seed: int, *, most_prompt: int, most_nodes: int, exact: bool) -> None:
    rng = random.Random(seed)
    growths = [random_growth(rng, target.info.vocab_size, most_prompt, most_nodes) for _ in range(rng.randint(1, 4))]

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.isfinite().all()
        if exact:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    check_growth(target, target, rng, growths, compare)


@fused_cpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 30))
def test_the_same_bits_on_a_cpu(variant: str, dtype: str, seed: int) -> None:
    check(target_of(variant, dtype, "fused-cpu"), seed, most_prompt=140, most_nodes=40, exact=True)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30))
def test_the_eager_decoder(variant: str, seed: int) -> None:
    check(target_of(variant, "float32", "eager"), seed, most_prompt=20, most_nodes=12, exact=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3-window"])
@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30))
def test_the_transformers_target(name: str, seed: int) -> None:
    pytest.importorskip("transformers")
    from tests.tools import hf as hf_tools

    check(hf_tools.target_of(name), seed, most_prompt=20, most_nodes=10, exact=False)


def test_random_growths_mix_new_trees_and_old_ones() -> None:
    """The cases of the tests above do occur: new trees next to grown ones, junk, several passes of a tree."""
    rng = random.Random(0)
    growths = [[random_growth(rng, 99, 5, 12) for _ in range(3)] for _ in range(40)]
    assert any(kinds == {False, True} for each in growths for kinds in passes_of(each))
    steps = [step for each in growths for growth in each for step in growth.steps if step is not None]
    assert {(step.is_junk, step.after > 0) for step in steps} == {(a, b) for a in (False, True) for b in (False, True)}


@pytest.mark.parametrize("backend", ["eager", pytest.param("fused-cpu", marks=fused_cpu)])
def test_pending_nodes(backend: str) -> None:
    """Nodes count until the next keep, truncate or close; and as far as the last segment reaches."""
    target = tiny_target(backend=backend)
    sequence = prefill(target, [1, 2, 3])

    def run(count: int, after: int) -> None:
        parents = [max(after - 1, -1), *[after] * (count - 1)]
        target.forward([Segment(sequence, [7] * count, parents, count, after)])

    def refused(after: int) -> None:
        with pytest.raises(CapabilityError, match="A tree can only continue after nodes that are pending"):
            run(1, after)

    refused(1)
    run(3, 0)
    refused(4)
    refused(-1)
    run(2, 3)
    run(1, 2)  # drops two
    refused(4)
    with pytest.raises(CapabilityError, match="Only nodes of the pending tree can be kept"):
        target.keep(sequence, [0, 3])
    target.keep(sequence, [0, 1, 2])
    assert target.length(sequence) == 6
    refused(1)
    run(2, 0)
    target.truncate(sequence, 6)
    refused(1)
    run(2, 0)
    copy = target.fork(sequence, 20)
    with pytest.raises(CapabilityError, match="continue"):
        target.forward([Segment(copy, [7], [0], 1, 1)])
    run(2, 2)  # a copy leaves the tree as it is


def test_tree_that_outgrows_its_sequence_is_refused() -> None:
    target = tiny_target()
    sequence = target.open(5)
    target.forward([Segment(sequence, [1, 2, 3], [-1, 0, 0], 1)])
    with pytest.raises(CapabilityError, match="outgrows"):
        target.forward([Segment(sequence, [1, 2, 3], [0, 1, 2], 1, 3)])
    target.forward([Segment(sequence, [1, 2], [0, 3], 1, 3)])
    target.keep(sequence, [0, 3, 4])


def test_packing() -> None:
    """The parents of a new tree are not copied; a grown tree has the parents of all nodes and rows for new ones."""
    cache = tiny_target().cache
    first, second = cache.open(10), cache.open(20)
    new = (-1, 0, 0)
    batch = pack([Segment(first, [1, 2, 3], new, 2)], cache)
    assert cache[first].parents is new
    assert [list(segment.parents) for segment in batch.segments] == [list(new)]
    batch = pack([Segment(second, [4, 5], [-1, 0], 1), Segment(first, [6, 7], (2, 3), 2, 3)], cache)
    segments = [PackedSegment(0, 10, 0, [-1, 0], 1), PackedSegment(2, 0, 0, [-1, 0, 0, 2, 3], 2, 3)]
    expected = PackedBatch.of([4, 5, 6, 7], segments)
    assert vars(batch) == vars(expected)
    assert [segment._replace(parents=list(segment.parents)) for segment in batch.segments] == segments
    assert (batch.num_segments, batch.num_wanted) == (2, 3)
    assert batch.positions() == [0, 1, 2, 3]
    assert batch.logit_rows() == [1, 2, 3]
    assert (batch.segments[1].size, batch.segments[1].rows, batch.segments[1].first_slot) == (2, slice(2, 4), 3)


def test_a_long_chain_that_grew() -> None:
    """A prompt whose chunks are kept in one call at the end."""
    target = tiny_target()
    tokens = [(7 * i) % 250 for i in range(90)]
    sequence, chain = target.open(100), chain_parents(90)
    for start in range(0, 90, 25):
        part = slice(start, start + 25)
        target.forward([Segment(sequence, tokens[part], chain[part], 0, start)])
    target.keep(sequence, range(90))
    logits = target.forward([Segment(sequence, [9], [-1], 1)]).logits.clone()
    fresh = prefill(target, tokens)
    torch.testing.assert_close(logits, target.forward([Segment(fresh, [9], [-1], 1)]).logits, atol=1e-5, rtol=1e-5)
