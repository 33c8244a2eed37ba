"""Tree attention against float64: on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.config import MAX_BUDGET
from draftwood.errors import OptionError
from draftwood.targets.base import chain_parents, depths_of
from draftwood.targets.native.cuda.attention.plan import (
    TILE_FIELDS,
    AttentionConfig,
    choose_config,
    max_tiles,
    scratch_size,
    words_per_row,
    write_plan,
)
from draftwood.targets.native.decoder import PackedSegment
from draftwood.tree.layout import ancestor_mask, is_chain
from tests.conftest import random_parents
from tests.tools.attention import SHARED, SPARE_ROWS, Case, Launch, attention_resources, random_segments, words_needed
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_kernels

pytest.importorskip("triton")

BASE = AttentionConfig(
    group=4, block_m=32, block_s=32, block_n=32, splits=4, min_blocks=1, num_warps=4, num_stages=3, merge="last"
)
CASES = {
    "base": Case(config=BASE),
    "one range": Case(config=replace(BASE, splits=1)),
    "second kernel": Case(config=replace(BASE, merge="kernel"), num_kv_heads=2),
    "few ranges": Case(config=replace(BASE, splits=8, min_blocks=2)),
    "long steps": Case(config=replace(BASE, block_s=64, block_n=64)),
    "short steps in trees": Case(config=replace(BASE, block_s=64, block_n=16)),
    "group of 1": Case(config=replace(BASE, group=1, block_m=16), head_dim=128),
    "group of 2": Case(config=replace(BASE, group=2, splits=2), head_dim=96, dtype=torch.bfloat16),
    "group of 3": Case(config=replace(BASE, group=3), num_kv_heads=3, dtype=torch.bfloat16),
    "group of 5": Case(config=replace(BASE, group=5, merge="kernel"), dtype=torch.float32),
    "group of 6": Case(config=replace(BASE, group=6, block_m=64, block_s=64), head_dim=128, dtype=torch.bfloat16),
    "group of 7": Case(config=replace(BASE, group=7, splits=1), head_dim=80),
    "group of 8": Case(config=replace(BASE, group=8, block_m=128, block_s=64, num_warps=8), head_dim=96),
    "window": Case(config=BASE, window=37),
    "tiny window, second kernel": Case(config=replace(BASE, merge="kernel"), window=2, head_dim=96),
}
GROWN = ["second kernel", "short steps in trees", "tiny window, second kernel"]
LONGEST = 8192  # tokens before a tree
MODELS = {"8B": (32, 8, 128), "1.5B": (12, 2, 128), "135M": (9, 3, 64)}


def assert_correct(launch: Launch) -> None:
    out = launch.run()
    written, spare = out[: launch.num_rows], out[launch.num_rows :]
    assert len(spare) == SPARE_ROWS
    assert spare.isnan().all()
    assert not written.isnan().any()
    tolerance = max(4 * torch.finfo(launch.case.dtype).eps, 1e-5)
    torch.testing.assert_close(written.double(), launch.expected(), atol=tolerance, rtol=tolerance)
    assert launch.arrivals is None or (launch.arrivals == 0).all()


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    """Short contexts with trees of all sizes; an empty prefix, and edges of steps and ranges."""
    rng = random.Random(name)
    edge = CASES[name].config.block_s
    sizes = [(0, 1), (edge - 1, 2), (rng.randint(edge, 110), rng.randint(3, 9))]
    for seed in range(1 if INTERPRETED else 20):
        rng.shuffle(sizes)
        assert_correct(Launch(CASES[name], random_segments(rng, sizes), DEVICE, seed))


@runs_kernels
@pytest.mark.parametrize("name", ["long steps", "window"])
def test_large_trees(name: str) -> None:
    """Ancestor bits in three words, and one tree over several tiles."""
    rng = random.Random(name)
    assert_correct(Launch(CASES[name], random_segments(rng, [(7, 2), (15, 70)]), DEVICE))


@runs_kernels
@pytest.mark.parametrize("name", GROWN if INTERPRETED else CASES)
def test_trees_with_nodes_of_earlier_passes(name: str) -> None:
    """Next to a new tree: earlier nodes after an empty prefix, in the last prefix block, and in separate blocks."""
    rng = random.Random(name)
    edge = CASES[name].config.block_s
    sizes = [(0, 1), (edge - 1, 3), (edge + 5, rng.randint(1, 9)), (rng.randint(0, 40), 2)]
    for seed in range(1 if INTERPRETED else 20):
        segments = random_segments(rng, sizes, most_earlier=40)
        segments[-1] = segments[-1]._replace(parents=(-1, 0), after=0)
        assert any(segment.after for segment in segments)
        assert_correct(Launch(CASES[name], segments, DEVICE, seed))


@runs_kernels
@pytest.mark.parametrize("name", ["long steps", "window"])
def test_earlier_nodes_take_all_words(name: str) -> None:
    """64 of them and 32 new ones fill the words completely; a grown chain is recognized only by its words."""
    rng = random.Random(name)
    tree = PackedSegment(0, 2, 9, random_parents(rng, 96), 1, 64)
    chain = PackedSegment(32, 120, 30, chain_parents(40), 1, 33)
    assert_correct(Launch(CASES[name], [tree, chain], DEVICE))


@runs_kernels
@pytest.mark.parametrize("window", [0, 20])
def test_chains_need_no_words(window: int) -> None:
    case = Case(config=replace(BASE, splits=2), num_words=0, window=window)
    assert_correct(Launch(case, random_segments(random.Random(1), [(0, 40), (50, 20)], chains=True), DEVICE))


@runs_kernels
def test_chain_next_to_trees_may_exceed_the_words() -> None:
    case = Case(config=BASE, num_words=1)
    segments = random_segments(random.Random(2), [(10, 12), (3, 40)])
    segments[1] = segments[1]._replace(parents=chain_parents(40))
    assert_correct(Launch(case, segments, DEVICE))


@runs_kernels
@pytest.mark.parametrize("name", ["base", "second kernel"])
def test_same_bits_twice(name: str) -> None:
    """The second launch reuses the scratch memory of the first."""
    launch = Launch(CASES[name], random_segments(random.Random(3), [(40, 3), (100, 4)]), DEVICE)
    first, second = launch.run(), launch.run()
    assert torch.equal(first[: launch.num_rows], second[: launch.num_rows])


@on_gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("nodes", "sequences"), [(1, 1), (8, 1), (16, 1), (64, 1), (128, 1), (256, 32), (512, 1)])
def test_chosen_shapes_at_all_lengths(model: str, nodes: int, sequences: int) -> None:
    heads, kv_heads, dim = MODELS[model]
    case = chosen(heads, kv_heads, dim, nodes, sequences)
    rng = random.Random(nodes)
    merges: tuple[Literal["last", "kernel"], ...] = ("last", "kernel")
    for merge in merges:
        for longest in (1, 150, 1100, 8192):
            others = [rng.randint(0, min(longest, 300)) for _ in range(sequences - 1)]
            sizes = [(prefix, nodes // sequences) for prefix in [longest, *others]]
            config = replace(case.config, merge=merge)
            launch = Launch(replace(case, config=config), random_segments(rng, sizes, chains=nodes == 512), DEVICE)
            assert_correct(launch)
            assert torch.equal(launch.run()[: launch.num_rows], launch.run()[: launch.num_rows])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_all_groups_and_heads_at_random_lengths(group: int, dim: int, dtype: torch.dtype) -> None:
    rng = random.Random(100 * dim + group)
    for nodes in (1, rng.randint(2, 63), 64):
        case = replace(chosen(2 * group, 2, dim, nodes, 1), dtype=dtype)
        for longest in (1, round(2 ** rng.uniform(1.0, 13.0)), LONGEST):
            assert_correct(Launch(case, random_segments(rng, [(longest, nodes)]), DEVICE))


@on_gpu
@pytest.mark.parametrize("merge", ["last", "kernel"])
def test_one_graph_serves_every_length(merge: Literal["last", "kernel"]) -> None:
    """Capture once, with programmatic launches if supported; then only the buffers change."""
    case = chosen(32, 8, 128, 16, 1)
    case = replace(case, config=replace(case.config, merge=merge))
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    launch = Launch(case, random_segments(random.Random(5), [(4100, 16)]), DEVICE)
    launch.run(pdl)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.run(pdl)
    for prefix in (1, 63, 64, 700, 3999):
        other = Launch(case, random_segments(random.Random(prefix), [(prefix, 16)]), DEVICE)
        for name in ("query", "tiles", "words"):
            getattr(launch, name).copy_(getattr(other, name))
        slots = other.keys.shape[1]
        launch.keys[:, :slots] = other.keys
        launch.values[:, :slots] = other.values
        graph.replay()
        torch.testing.assert_close(out[: other.num_rows].double(), other.expected(), atol=0.03, rtol=0.03)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("nodes", "num_words"), [(1, 1), (64, 2), (512, 0)])
def test_no_registers_are_spilled_on_hopper(nodes: int, num_words: int) -> None:
    config = chosen(32, 8, 128, nodes, 1).config
    found = attention_resources(config, 128, "bf16", num_words, 90)
    assert found.stack == 0
    assert found.shared <= 227 * 1024


@given(st.data())
def test_tiles_cover_every_node_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=8))
    nodes_per_tile = data.draw(st.integers(2, 32))
    rng = random.Random(data.draw(st.integers(0, 99)))
    segments = random_segments(rng, sizes, most_earlier=data.draw(st.integers(0, 20)))
    num_rows = sum(size for _, size in sizes)
    tiles = np.full((max_tiles(num_rows, len(sizes), nodes_per_tile), TILE_FIELDS), 9, dtype=np.int32)
    write_plan(tiles, None, segments, nodes_per_tile)
    covered: list[int] = []
    for first, nodes, base, prefix, start, chain, after in tiles.tolist():
        if nodes == 0:
            continue
        assert nodes <= nodes_per_tile
        segment = next(s for s in segments if s.start == start)
        assert (base, prefix, after) == (segment.base, segment.prefix_len, segment.after)
        assert bool(chain) == (after == 0 and is_chain(segment.parents))
        assert start <= first <= first + nodes <= segment.rows.stop
        covered.extend(range(first, first + nodes))
    assert covered == list(range(num_rows))


@given(st.integers(1, 130), st.integers(0, 999))
def test_words_are_the_ancestor_mask(size: int, seed: int) -> None:
    """Between a chain, whose rows have no words, and unused rows."""
    parents = random_parents(random.Random(seed), size)
    segments = [PackedSegment(0, 0, 5, chain_parents(200), 1), PackedSegment(200, 205, 9, parents, 1)]
    words = np.full((200 + size + 3, max(1, words_needed(segments))), 77, dtype=np.int32)
    write_plan(np.zeros((400, TILE_FIELDS), dtype=np.int32), words, segments, 1)
    assert (words[:200] == 0).all()
    assert (words[200 + size :] == 77).all()
    bits = np.unpackbits(words[200 : 200 + size].view(np.uint8), axis=1, bitorder="little")
    assert (bits[:, :size] == (0 if is_chain(parents) else ancestor_mask(parents))).all()
    assert not bits[:, size:].any()


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 9), st.integers(0, 999))
def test_words_of_grown_trees(size: int, after: int, window: int, seed: int) -> None:
    """Nodes of earlier passes are in the last words; ancestors beyond the window are omitted."""
    parents = random_parents(random.Random(seed), after + size)
    if after == 0 and is_chain(parents):
        return
    segments = [PackedSegment(0, 3, 9, parents, 1, after)]
    words = np.full((size, 4), 77, dtype=np.int32)
    write_plan(np.zeros((size, TILE_FIELDS), dtype=np.int32), words, segments, 1, window)
    depths = np.array(depths_of(parents))
    visible = ancestor_mask(parents)
    if window:
        visible &= depths[:, None] - depths[None, :] < window
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    first_bit = 128 - -(-after // 32) * 32
    assert (bits[:, :size] == visible[after:, after:]).all()
    assert (bits[:, first_bit : first_bit + after] == visible[after:, :after]).all()
    assert bits.sum() == visible[after:].sum()


def test_batches_that_do_not_fit_are_refused() -> None:
    grown = [PackedSegment(0, 0, 5, chain_parents(33), 1, 30)]
    with pytest.raises(OptionError, match="bits"):
        write_plan(np.zeros((3, TILE_FIELDS), dtype=np.int32), np.zeros((3, 1), dtype=np.int32), grown, 16)
    segments = [PackedSegment(0, 0, 5, [-1, 0, 0] + [1] * 40, 1)]
    with pytest.raises(OptionError, match="tiles"):
        write_plan(np.zeros((2, TILE_FIELDS), dtype=np.int32), None, segments, 16)
    with pytest.raises(OptionError, match="bits"):
        write_plan(np.zeros((3, TILE_FIELDS), dtype=np.int32), np.zeros((43, 1), dtype=np.int32), segments, 16)


@given(
    st.integers(1, 4096),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 32),
    st.sampled_from([64, 80, 96, 128, 256]),
    st.sampled_from(sorted(set(SHARED.values()))),
)
def test_choices_are_valid(nodes: int, sequences: int, group: int, kv_heads: int, dim: int, shared: int) -> None:
    nodes = max(nodes, sequences)
    config = choose_config(
        num_nodes=nodes, num_sequences=sequences, num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=dim,
        num_processors=132, shared_bytes=shared,
    )  # fmt: skip
    assert config.nodes_per_tile >= 1
    for number in (config.block_m, config.block_s, config.splits, config.merge_rows(dim)):
        assert number & (number - 1) == 0
    tiles = max_tiles(nodes, sequences, config.nodes_per_tile)
    floats, counters = scratch_size(config, tiles, kv_heads, dim)
    assert floats * 4 <= 128 << 20
    assert (floats > 0) == (counters > 0) == (config.splits > 1)


@given(st.integers(1, 1 << 20))
def test_words_have_bits_for_every_tree_and_do_not_grow_with_prompts(num_rows: int) -> None:
    bits = 32 * words_per_row(num_rows)
    assert min(num_rows, 2 * MAX_BUDGET) <= bits <= max(num_rows + 31, 160)
    assert bits <= 2 * MAX_BUDGET


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("nodes", "dim"), [(1, 96), (1, 128), (64, 128), (64, 256)])
def test_programs_fit_gpus_with_little_shared_memory(nodes: int, dim: int) -> None:
    config = choose_config(
        num_nodes=nodes, num_sequences=1, num_heads=32, num_kv_heads=8, head_dim=dim, num_processors=84,
        shared_bytes=SHARED[86],
    )  # fmt: skip
    assert attention_resources(config, dim, "bf16", 2, 86).shared <= SHARED[86]


@pytest.mark.parametrize("model", MODELS)
def test_one_node_is_shared_by_many_processors(model: str) -> None:
    """At 4,096 keys there are 16 ranges for every key head: more take longer to merge than they save."""
    heads, kv_heads, dim = MODELS[model]
    config = chosen(heads, kv_heads, dim, 1, 1).config
    ranges = min(config.splits, 4096 // (config.block_s * config.min_blocks))
    assert ranges == 16


def chosen(heads: int, kv_heads: int, dim: int, nodes: int, sequences: int) -> Case:
    from draftwood.targets.native.cuda.device import describe_gpu  # needs Triton

    shared = describe_gpu(DEVICE).shared_bytes if DEVICE.type == "cuda" else SHARED[90]
    config = choose_config(
        num_nodes=nodes, num_sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        num_processors=132, shared_bytes=shared,
    )  # fmt: skip
    words = 0 if nodes == 512 else -(-(nodes // sequences) // 32)
    return Case(config=config, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16, num_words=words)
