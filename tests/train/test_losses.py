"""The pieces of the losses: where guesses count, the target's likeliest tokens, calibration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.train.base import Batch
from draftwood.train.losses.entropy import cross_entropies
from draftwood.train.losses.evaluator import Positions, accuracy, calibration_error, smooth_l1
from tests.tools.train import random_examples


def test_positions_precede_tokens_of_the_target() -> None:
    first, second = random_examples([6, 4])
    first.answered[:] = [False, False, True, True, False, True]
    second.answered[:] = [True, True, False, True]
    places = Positions.of(Batch.of([first, second]))
    assert list(zip(places.text.tolist(), places.last.tolist(), strict=True)) == [(0, 1), (0, 2), (0, 4), (1, 2)]
    assert places.reached(3).tolist() == [[True] * 4, [False, True, True, True], [False, False, True, False]]


def test_guesses_and_paths_of_a_position() -> None:
    batch = Batch.of(random_examples([6]))
    places = Positions.of(batch)
    outputs = [torch.arange(10.0 * step, 10.0 * step + 4 - step)[None, :, None] for step in range(2)]
    found = places.select(outputs, 3)[..., 0]  # the text was too short for a third step
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0], [10.0, 10.0, 11.0, 12.0], [0.0, 0.0, 0.0, 0.0]]
    ids = batch.token_ids[0]
    assert places.paths(batch.token_ids, 2).tolist() == [[int(ids[q - 1]), int(ids[q])] for q in (1, 2, 3, 4)]
    assert places.at(batch.token_ids, ahead=1).tolist() == ids[2:].tolist()


@given(k=st.integers(1, 9), seed=st.integers(0, 99))
def test_top_k_part_of_cross_entropy(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randn(5, 7, generator=generator).softmax(dim=-1)
    logits = torch.randn(2, 5, 7, generator=generator)
    part = cross_entropies(logits, labels, torch.ones(5, dtype=torch.bool), k).top_k
    each = -(labels * logits.log_softmax(dim=-1))  # [S, C, V]
    order = labels.argsort(dim=-1, descending=True)
    for step in range(2):
        for row in range(5):
            assert part[step, row].item() == pytest.approx(each[step, row, order[row, :k]].sum().item(), rel=1e-4)


def test_smooth_l1_is_a_parabola_near_zero_and_a_line_beyond() -> None:
    guessed = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    assert smooth_l1(guessed, torch.zeros(2, 2)).tolist() == [(0.125 + 2.5) / 2, 0.0]


def test_accuracy() -> None:
    right = torch.tensor([[True, True, False], [True, True, True]])
    counted = torch.tensor([[True, False, True], [False, False, False]])
    assert accuracy(right, counted).tolist() == [0.5, 0.0]


def test_calibration_error_by_hand() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.05, 0.55])
    right = torch.tensor([True, False, False, True])
    wanted = (abs(1 - 1.9) + 0.05 + 0.45) / 4
    assert calibration_error(confidence, right, num_bins=10).item() == pytest.approx(wanted)
    assert calibration_error(torch.ones(3), torch.ones(3, dtype=torch.bool)).item() == 0.0
    assert calibration_error(torch.empty(0), torch.empty(0, dtype=torch.bool)).item() == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 20))
def test_calibration_error_against_a_loop(guesses: list[tuple[float, bool]], num_bins: int) -> None:
    confidence = torch.tensor([c for c, _ in guesses])
    right = torch.tensor([r for _, r in guesses])
    bins: dict[int, list[int]] = {}
    for index, value in enumerate(confidence):
        bins.setdefault(min(int(value * num_bins), num_bins - 1), []).append(index)
    wanted = sum(
        abs(math.fsum(right[i].item() for i in some) - math.fsum(confidence[i].item() for i in some))
        for some in bins.values()
    ) / len(guesses)
    found = calibration_error(confidence, right, num_bins).item()
    assert found == pytest.approx(wanted, abs=1e-5)
    assert 0.0 <= found <= 1.0 + 1e-6
