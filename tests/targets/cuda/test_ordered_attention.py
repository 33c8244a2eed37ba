"""Attention in the order of positions against float64: on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.targets.base import chain_parents
from draftwood.targets.native.cuda.attention.plan import max_tiles
from draftwood.targets.native.cuda.attention.ranges import (
    OrderedConfig,
    choose_block,
    choose_ordered_config,
    find_range,
    ordered_scratch_size,
)
from draftwood.targets.native.decoder import PackedSegment
from tests.conftest import random_parents
from tests.tools.attention import SHARED, SPARE_ROWS, Case, random_segments
from tests.tools.ordered import OrderedLaunch, ordered_resources
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_kernels

pytest.importorskip("triton")

BASE = OrderedConfig(group=4, block_m=32, block_s=32, splits=4, num_parts=12, num_warps=4, num_stages=3)
ALONE = replace(BASE, splits=1, num_parts=2)
CASES = {
    "base": Case(config=BASE),
    "one program": Case(config=ALONE),
    "one program, two heads": Case(config=ALONE, num_kv_heads=2),
    "many programs": Case(config=replace(BASE, splits=8)),
    "long steps": Case(config=replace(BASE, block_s=64)),
    "short steps": Case(config=replace(BASE, block_s=16)),
    "group of 1": Case(config=replace(BASE, group=1, block_m=16), head_dim=128),
    "group of 2": Case(config=replace(BASE, group=2, splits=2), head_dim=96, dtype=torch.bfloat16),
    "group of 3": Case(config=replace(BASE, group=3), num_kv_heads=3, dtype=torch.bfloat16),
    "group of 5": Case(config=replace(ALONE, group=5), dtype=torch.float32),
    "group of 6": Case(config=replace(BASE, group=6, block_m=64, block_s=64), head_dim=128, dtype=torch.bfloat16),
    "group of 7": Case(config=replace(ALONE, group=7), head_dim=80),
    "group of 8": Case(config=replace(BASE, group=8, block_m=128, block_s=64, num_warps=8), head_dim=96),
    "window": Case(config=BASE, window=37),
    "tiny window, one program": Case(config=ALONE, window=2, head_dim=96),
}
GROWN = ["one program, two heads", "short steps", "tiny window, one program"]
LONGEST = 8192  # tokens before a tree
MODELS = {"8B": (32, 8, 128), "1.5B": (12, 2, 128), "135M": (9, 3, 64)}


def assert_correct(launch: OrderedLaunch) -> None:
    out = launch.run()
    written, spare = out[: launch.num_rows], out[launch.num_rows :]
    assert len(spare) == SPARE_ROWS
    assert spare.isnan().all()
    assert not written.isnan().any()
    tolerance = max(4 * torch.finfo(launch.case.dtype).eps, 1e-5)
    torch.testing.assert_close(written.double(), launch.expected(), atol=tolerance, rtol=tolerance)
    assert (launch.arrivals == 0).all()


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
        assert_correct(OrderedLaunch(CASES[name], random_segments(rng, sizes), DEVICE, seed))


@runs_kernels
@pytest.mark.parametrize("name", ["long steps", "window"])
def test_large_trees(name: str) -> None:
    """Ancestor bits in three words, and one tree over several tiles."""
    rng = random.Random(name)
    assert_correct(OrderedLaunch(CASES[name], random_segments(rng, [(7, 2), (15, 70)]), DEVICE))


@runs_kernels
@pytest.mark.parametrize("name", GROWN if INTERPRETED else CASES)
def test_trees_with_nodes_of_earlier_passes(name: str) -> None:
    """Beside a new tree: earlier nodes behind an empty prefix, in the block of its end, and in blocks of their own."""
    rng = random.Random(name)
    edge = CASES[name].config.block_s
    sizes = [(0, 1), (edge - 1, 3), (edge + 5, rng.randint(1, 9)), (rng.randint(0, 40), 2)]
    for seed in range(1 if INTERPRETED else 20):
        segments = random_segments(rng, sizes, most_earlier=40)
        segments[-1] = segments[-1]._replace(parents=(-1, 0), after=0)
        assert any(segment.after for segment in segments)
        assert_correct(OrderedLaunch(CASES[name], segments, DEVICE, seed))


@runs_kernels
@pytest.mark.parametrize("name", ["long steps", "window"])
def test_earlier_nodes_take_all_words(name: str) -> None:
    """64 of them and 32 new ones fill the words to the last bit; a chain that grew is told apart by its words alone."""
    rng = random.Random(name)
    tree = PackedSegment(0, 2, 9, random_parents(rng, 96), 1, 64)
    chain = PackedSegment(32, 120, 30, chain_parents(40), 1, 33)
    assert_correct(OrderedLaunch(CASES[name], [tree, chain], DEVICE))


@runs_kernels
@pytest.mark.parametrize("window", [0, 20])
def test_single_nodes_need_no_paths(window: int) -> None:
    for config in (replace(BASE, splits=2), ALONE):
        case = Case(config=config, num_words=0, window=window)
        assert_correct(
            OrderedLaunch(case, random_segments(random.Random(1), [(0, 1), (50, 1), (140, 1)], chains=True), DEVICE)
        )


@runs_kernels
def test_chain_next_to_trees_may_exceed_the_words() -> None:
    case = Case(config=BASE, num_words=1)
    segments = random_segments(random.Random(2), [(10, 12), (3, 40)])
    segments[1] = segments[1]._replace(parents=chain_parents(40))
    assert_correct(OrderedLaunch(case, segments, DEVICE))


@runs_kernels
@pytest.mark.parametrize("name", ["base", "one program"])
def test_same_bits_twice(name: str) -> None:
    """The second launch finds the scratch of the first."""
    launch = OrderedLaunch(CASES[name], random_segments(random.Random(3), [(40, 3), (100, 4)]), DEVICE)
    first, second = launch.run(), launch.run()
    assert torch.equal(first[: launch.num_rows], second[: launch.num_rows])


@on_gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("nodes", "sequences"), [(1, 1), (8, 1), (16, 1), (64, 1), (128, 1), (256, 32), (512, 1)])
def test_chosen_shapes_at_all_lengths(model: str, nodes: int, sequences: int) -> None:
    heads, kv_heads, dim = MODELS[model]
    case = chosen(heads, kv_heads, dim, nodes, sequences)
    rng = random.Random(nodes)
    for longest in (1, 150, 1100, 8192):
        others = [rng.randint(0, min(longest, 300)) for _ in range(sequences - 1)]
        sizes = [(prefix, nodes // sequences) for prefix in [longest, *others]]
        launch = OrderedLaunch(case, random_segments(rng, sizes, chains=nodes == 512), DEVICE)
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
            assert_correct(OrderedLaunch(case, random_segments(rng, [(longest, nodes)]), DEVICE))


@on_gpu
@pytest.mark.parametrize("alone", [False, True])
def test_one_graph_serves_every_length(alone: bool) -> None:
    """Capture once, with programmatic launches where there are any; then only the buffers change."""
    case = chosen(32, 8, 128, 16, 1)
    if alone:
        case = replace(case, config=replace(case.config, splits=1, num_parts=2))
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    launch = OrderedLaunch(case, random_segments(random.Random(5), [(4100, 16)]), DEVICE)
    launch.run(pdl)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.run(pdl)
    for prefix in (1, 63, 64, 700, 3999):
        other = OrderedLaunch(case, random_segments(random.Random(prefix), [(prefix, 16)]), DEVICE)
        for name in ("query", "tiles", "words", "places"):
            getattr(launch, name).copy_(getattr(other, name))
        slots = other.keys.shape[1]
        launch.keys[:, :slots] = other.keys
        launch.values[:, :slots] = other.values
        graph.replay()
        torch.testing.assert_close(out[: other.num_rows].double(), other.expected(), atol=0.03, rtol=0.03)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("nodes", "second"), [(1, False), (64, False), (64, True), (512, False)])
def test_few_registers_are_spilled_on_hopper(nodes: int, second: bool) -> None:
    config = chosen(32, 8, 128, nodes, 1).config
    found = ordered_resources(config, 128, "bf16", 90, second=second)
    assert found.stack <= 128
    assert found.shared <= 227 * 1024


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
    config = choose_ordered_config(
        num_nodes=nodes, num_sequences=sequences, num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=dim,
        num_processors=132, shared_bytes=shared, capacity=LONGEST,
    )  # fmt: skip
    assert config.nodes_per_tile >= 1
    for number in (config.block_m, config.block_s, config.splits, config.loads(16, dim)):
        assert number & (number - 1) == 0
    assert config.block_s == choose_block(dim, shared)
    tiles = max_tiles(nodes, sequences, config.nodes_per_tile)
    floats, _ = ordered_scratch_size(config, tiles, kv_heads, dim)
    if config.splits > 1:
        assert config.num_parts == find_range(-(-LONGEST // config.block_s)) + 1
        assert floats * 4 <= 128 << 20


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("nodes", "dim"), [(1, 96), (1, 128), (64, 128), (64, 256)])
def test_programs_fit_gpus_with_little_shared_memory(nodes: int, dim: int) -> None:
    config = choose_ordered_config(
        num_nodes=nodes, num_sequences=1, num_heads=32, num_kv_heads=8, head_dim=dim, num_processors=84,
        shared_bytes=SHARED[86], capacity=LONGEST,
    )  # fmt: skip
    for second in (False, True):
        assert ordered_resources(config, dim, "bf16", 86, second=second).shared <= SHARED[86]


@pytest.mark.parametrize("model", MODELS)
def test_one_node_is_shared_by_many_processors(model: str) -> None:
    heads, kv_heads, dim = MODELS[model]
    assert chosen(heads, kv_heads, dim, 1, 1).config.splits == 32


def test_ranges_are_where_the_kernel_finds_them() -> None:
    """Each begins where the one before ends. Their number grows with the logarithm of the context."""
    starts = [2 * index if index < 16 else (index % 16 + 16) << (index // 16) for index in range(112)]
    assert starts[:34] == [*range(0, 64, 2), 64, 68]
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        assert {find_range(block) for block in {start, (start + end) // 2, end - 1}} == {index}
    assert find_range(LONGEST // 64) == 48
    assert find_range(131_072 // 64) == 112


def chosen(heads: int, kv_heads: int, dim: int, nodes: int, sequences: int) -> Case:
    from draftwood.targets.native.cuda.device import describe_gpu  # wants Triton

    shared = describe_gpu(DEVICE).shared_bytes if DEVICE.type == "cuda" else SHARED[90]
    config = choose_ordered_config(
        num_nodes=nodes, num_sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        num_processors=132, shared_bytes=shared, capacity=LONGEST,
    )  # fmt: skip
    words = 0 if nodes == sequences else -(-(nodes // sequences) // 32)
    return Case(config=config, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16, num_words=words)
