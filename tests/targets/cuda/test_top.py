"""The top entries of rows by the GPU kernels: on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.targets import find_top
from draftwood.targets.find_top import top_rows
from draftwood.targets.native.cpu import build
from draftwood.targets.toprows import TopRows
from tests.tools.top import INF, ROWS, check, check_extreme, extreme_rows, random_rows, rows_with_nan
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, resources, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.kernels import top

FEW_TIMES = {"large vocabulary": 10, "huge vocabulary": 1}  # only this k in the interpreter, which is slow


@pytest.fixture(autouse=True, scope="module")
def by_triton() -> Iterator[None]:
    """In the interpreter, rows on the host use the GPU code path."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(build, "load_kernel", lambda: None)
            patch.setattr(find_top, "_words_on", lambda device_type: top.top_words)
        yield


def best(logits: torch.Tensor, k: int, rows: list[int] | None = None) -> TopRows:
    return top_rows(logits.to(DEVICE), k, rows)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@runs_kernels
@pytest.mark.parametrize("k", [1, 10, 32])
@pytest.mark.parametrize("kind", ROWS)
def test_equals_a_stable_sort(kind: str, k: int) -> None:
    if INTERPRETED and k != FEW_TIMES.get(kind, 10 if len(ROWS[kind]) > 3 else k):
        pytest.skip("takes long in the interpreter")
    logits = ROWS[kind]
    k = min(k, logits.shape[1])
    check(best(logits, k), logits, k)


@runs_kernels
@pytest.mark.parametrize("vocab_size", [127, 128, 129, 2047, 2048, 2049])
@pytest.mark.parametrize("k", [1, 12])
def test_edges_of_blocks_and_programs(vocab_size: int, k: int) -> None:
    logits = random_rows(4, vocab_size)
    logits[1, -1] = 90.0
    logits[2, ::127] = 50.0  # the best and their ties are at the edges
    logits[3, vocab_size // 128 * 128 :] = 60.0
    check(best(logits, k), logits, k)


@runs_kernels
def test_the_largest_k_and_the_whole_vocabulary() -> None:
    logits = random_rows(2, 64).round()
    check(best(logits, 64), logits, 64)


entries = st.sampled_from([-INF, -3.0, -0.0, 0.0, 1.0, 1.5, 40.0]) | st.floats(-50, 50, width=32)


@runs_kernels
@settings(max_examples=8 if INTERPRETED else 60)
@given(row=st.lists(entries, min_size=1, max_size=200), k=st.integers(1, 12))
@example(row=[0.0, -0.0] * 70, k=3)
@example(row=[-0.0, 0.0] * 70, k=3)
@example(row=[-INF] * 130, k=3)
def test_any_row(row: list[float], k: int) -> None:
    logits = torch.tensor([row, row[::-1]])
    k = min(k, len(row))
    check(best(logits, k), logits, k)


@runs_kernels
@pytest.mark.parametrize("k", [1, 10])
def test_nan_counts_as_minus_infinity(k: int) -> None:
    logits, cleaned = rows_with_nan()
    check(best(logits, k), cleaned, k)


@runs_kernels
def test_infinite_and_nan_logits() -> None:
    check_extreme(best(extreme_rows(), 5), extreme_rows(), 5)


@runs_kernels
def test_block_of_minus_infinity_next_to_very_low_logits() -> None:
    logits = random_rows(2, 700) - 300.0
    logits[:, 128:300] = -INF
    check(best(logits, 5), logits, 5)


@runs_kernels
def test_non_contiguous_rows_are_supported() -> None:
    wide = random_rows(9, 700).to(DEVICE)
    for logits in (wide[::4], wide[:3, 3:500], wide.t()[:4], wide[:3, ::2], wide[:1].expand(3, -1)):
        check(top_rows(logits, 6), logits.cpu().contiguous(), 6)


@runs_kernels
def test_some_rows_in_any_order() -> None:
    logits, rows = random_rows(9, 700), [7, 0, 0, 4]
    for part, whole in zip(best(logits, 5, rows), best(logits, 5), strict=True):
        np.testing.assert_array_equal(part, whole[rows])
    assert best(logits[:0], 4).ids.shape == (0, 4)


@runs_kernels
def test_buffers_may_be_larger_than_the_rows() -> None:
    logits, k = random_rows(3, 700), 5
    words = top.new_words(8, k, DEVICE).fill_(-7)
    top.launch_top_rows(logits.to(DEVICE), k, words, top.new_scratch(8, 700, DEVICE))
    check(TopRows.from_words(words[:3].cpu().numpy()), logits, k)
    assert (words[3:] == -7).all()


@on_gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_in_a_graph(pdl: bool) -> None:
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels of this GPU cannot start early")
    logits, k = random_rows(17, 151_936).to(DEVICE), 10
    words, scratch = top.new_words(17, k, DEVICE), top.new_scratch(17, 151_936, DEVICE)
    top.launch_top_rows(logits, k, words, scratch, pdl=pdl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top.launch_top_rows(logits, k, words, scratch, pdl=pdl)
    for seed in range(5):
        logits.copy_(random_rows(17 + seed, 151_936)[:17])
        graph.replay()
        check(TopRows.from_words(words.cpu().numpy()), logits.cpu(), k)


READ = {"logits": "*fp32", "scratch": "*fp32", "row_stride": "i32", "vocab_size": "i32", "num_blocks": "i32"}
FIND = {**READ, "words": "*i32"}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_register_use_allows_full_occupancy() -> None:
    """2,048 concurrent threads for the reading kernel; no kernel uses local memory."""
    common = {"capability": 90, "num_stages": 3}
    read = resources(top._read_blocks, READ, {"BLOCK": 128, "BLOCKS": 16, "PDL": True}, num_warps=4, **common)
    assert read.registers <= 32
    assert read.stack == 0
    for k in (1, 16, 32):
        constants = {"K": k, "K_PAD": k, "BLOCK": 128, "BLOCKS_PAD": 2048, "PDL": True}
        find = resources(top._find_best, FIND, constants, num_warps=top.FIND_WARPS, **common)
        assert find.registers <= 128
        assert find.stack == 0
