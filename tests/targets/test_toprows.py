"""Top entries of rows: in the order of a stable sort, with and without the kernel, in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.errors import OptionError
from draftwood.targets.find_top import top_rows
from draftwood.targets.native.cpu import build
from draftwood.targets.toprows import MAX_TOP_K, TopRows
from tests.conftest import threads
from tests.tools.top import INF, ROWS, check, check_extreme, extreme_rows, random_rows, rows_with_nan

needs_kernel = pytest.mark.skipif(build.load_kernel() is None, reason=f"no kernel: {build.why_unavailable()}")
WITH_KERNEL = pytest.param(True, id="kernel", marks=needs_kernel)
WITHOUT_KERNEL = pytest.param(False, id="torch")
both_paths = pytest.mark.parametrize("kernel", [WITH_KERNEL, WITHOUT_KERNEL])


@contextmanager
def path(*, kernel: bool) -> Iterator[None]:
    if kernel:
        yield
        return
    with mock.patch.object(build, "load_kernel", return_value=None):
        yield


@both_paths
@pytest.mark.parametrize("k", [1, 2, 10, MAX_TOP_K, MAX_TOP_K + 1])
@pytest.mark.parametrize("kind", ROWS)
def test_equals_a_stable_sort(kind: str, k: int, kernel: bool) -> None:
    logits = ROWS[kind]
    k = min(k, logits.shape[1])
    with path(kernel=kernel):
        check(top_rows(logits, k), logits, k)


@both_paths
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 90])
def test_whole_vocabulary_may_be_requested(vocab_size: int, kernel: bool) -> None:
    logits = random_rows(4, vocab_size).round()
    with path(kernel=kernel):
        check(top_rows(logits, vocab_size), logits, vocab_size)


entries = st.sampled_from([-INF, -3.0, -0.0, 0.0, 1.0, 1.5, 40.0]) | st.floats(-50, 50, width=32)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(row=st.lists(entries, min_size=1, max_size=200), k=st.integers(1, 70))
@example(row=[0.0] * 100 + [1.0] * 100, k=64)
@example(row=[-INF] * 65, k=3)
def test_both_paths_agree(row: list[float], k: int) -> None:
    logits = torch.tensor([row, row[::-1]])
    k = min(k, len(row))
    with path(kernel=False):
        plain = top_rows(logits, k)
    check(plain, logits, k)
    fast = top_rows(logits, k)
    np.testing.assert_array_equal(fast.ids, plain.ids)
    np.testing.assert_array_equal(fast.logits, plain.logits)
    np.testing.assert_allclose(fast.log_total, plain.log_total, atol=1e-4)


@both_paths
@pytest.mark.parametrize("k", [1, 10, 70])
def test_nan_counts_as_minus_infinity(k: int, kernel: bool) -> None:
    logits, cleaned = rows_with_nan()
    with path(kernel=kernel):
        found = top_rows(logits, k)
        check(found, cleaned, k)
        assert np.isfinite(found.probs()).all()


@both_paths
def test_infinite_and_nan_logits_are_handled(kernel: bool) -> None:
    with path(kernel=kernel):
        check_extreme(top_rows(extreme_rows(), 5), extreme_rows(), 5)


@both_paths
def test_probs_are_normalized_over_the_whole_row(kernel: bool) -> None:
    logits = ROWS["random"]
    with path(kernel=kernel):
        probs = top_rows(logits, 20).probs()
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs, logits.softmax(dim=-1).topk(20).values.numpy(), rtol=2e-4)


@both_paths
def test_row_of_minus_infinity_has_no_probabilities(kernel: bool) -> None:
    with path(kernel=kernel):
        found = top_rows(torch.full((2, 100), -INF), 3)
    assert found.ids.tolist() == [[0, 1, 2]] * 2
    assert found.log_total.tolist() == [-INF] * 2
    assert found.probs().tolist() == [[0.0] * 3] * 2


@both_paths
def test_non_contiguous_rows_are_supported(kernel: bool) -> None:
    wide = random_rows(12, 2100)
    views = {
        "every other row": wide[::2],
        "a part of each row": wide[:, 3:1500],
        "columns": wide.t()[:, :9],
        "every other column": wide[:, ::2],
        "one row again and again": wide[:1].expand(5, -1),
    }
    with path(kernel=kernel):
        for logits in views.values():
            check(top_rows(logits, 6), logits.contiguous(), 6)


@both_paths
def test_other_dtypes_are_widened(kernel: bool) -> None:
    logits = random_rows(4, 3000).to(torch.bfloat16)  # so coarse that there are ties at the k-th entry
    with path(kernel=kernel):
        for k in (1, 9, 30):
            check(top_rows(logits, k), logits.float(), k)


@both_paths
def test_no_rows_give_no_rows(kernel: bool) -> None:
    with path(kernel=kernel):
        found = top_rows(torch.empty(0, 50), 4)
    assert found.ids.shape == found.logits.shape == found.probs().shape == (0, 4)
    assert found.log_total.shape == (0,)


@pytest.mark.parametrize("k", [-1, 0, 51])
def test_k_must_fit_the_vocabulary(k: int) -> None:
    with pytest.raises(OptionError, match="1 to 50"):
        top_rows(torch.zeros(2, 50), k)


@needs_kernel
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(count: int) -> None:
    logits = random_rows(40, 5003)
    with threads(count):
        together = top_rows(logits, 10)
    for row in range(0, 40, 7):
        alone = top_rows(logits[row : row + 1].clone(), 10)
        for all_rows, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(all_rows[row : row + 1].view(np.int32), one.view(np.int32))


@both_paths
def test_some_rows_in_any_order(kernel: bool) -> None:
    logits = random_rows(9, 700)
    rows = [7, 0, 0, 4]
    with path(kernel=kernel):
        some, everything = top_rows(logits, 5, rows), top_rows(logits, 5)
        for part, whole in zip(some, everything, strict=True):
            np.testing.assert_array_equal(part, whole[rows])
        for bad in ([9], [-1]):
            with pytest.raises(IndexError):
                top_rows(logits, 5, bad)


@both_paths
def test_logits_are_not_modified_and_result_is_a_copy(kernel: bool) -> None:
    logits = random_rows(3, 700)
    before = logits.clone()
    with path(kernel=kernel):
        found = top_rows(logits, 5)
        kept = [part.copy() for part in found]
        assert torch.equal(logits, before)
        logits.zero_()  # a target reuses the memory
        top_rows(logits, 5)
    for part, copy in zip(found, kept, strict=True):
        np.testing.assert_array_equal(part, copy)


def test_parts_of_top_rows() -> None:
    logits = random_rows(9, 700)
    found, rows = top_rows(logits, 8), [7, 0, 0, 4]
    for part, expected in zip(found.at(rows).first(3), top_rows(logits, 3, rows), strict=True):
        np.testing.assert_array_equal(part, expected)
        assert part.flags.c_contiguous
    for part, expected in zip(found.at(slice(2, 5)), top_rows(logits[2:5], 8), strict=True):
        np.testing.assert_array_equal(part, expected)


@needs_kernel
def test_probabilities_of_the_kernel_are_those_of_the_entries() -> None:
    logits = random_rows(9, 700)
    found = top_rows(logits, 8)
    parts = {"all": found, "rows": found.at([7, 0]), "range": found.at(slice(2, 5)), "first": found.at((3, 1)).first(3)}
    for part in parts.values():
        np.testing.assert_allclose(part.probs(), TopRows(*part).probs(), rtol=1e-5)
        assert part.probs().flags.c_contiguous
    others = found._replace(logits=found.logits - 1.0)
    np.testing.assert_allclose(others.probs(), found.probs() / np.e, rtol=1e-5)


def test_top_rows_from_words() -> None:
    logits = random_rows(4, 300)
    found = top_rows(logits, 3)
    words = [found.ids, found.logits.view(np.int32), found.log_total[:, None].view(np.int32)]
    for part, expected in zip(TopRows.from_words(np.concatenate(words, axis=1)), found, strict=True):
        np.testing.assert_array_equal(part, expected)
        assert part.flags.c_contiguous
