"""Expected against real acceptance."""

import pytest

from draftwood.tree import DraftTree
from draftwood.tune import NUM_BINS, Calibration


def make_tree() -> DraftTree:
    """A root with two children; the first has one child."""
    sources = ("root", "context", "transition", "context")
    return DraftTree((1, 2, 3, 4), (-1, 0, 0, 1), (0, 1, 1, 2), sources, (1.0, 0.75, 0.15, 0.55))


def test_counts_only_guesses_whose_parent_was_accepted() -> None:
    calibration = Calibration()
    calibration.note(make_tree(), [0], 1)
    assert calibration.total.tried == 2
    assert calibration.total.accepted == 0
    calibration.note(make_tree(), [0, 1], 2)
    assert calibration.total.tried == 5
    assert calibration.total.accepted == 1
    assert calibration.bins[7] == (2, 1.5, 1)
    assert calibration.sources["transition"].as_dict() == {"tried": 2, "expected": 0.15, "accepted": 0.0}


def test_outcomes_after_a_stop_are_not_known() -> None:
    calibration = Calibration()
    calibration.note(make_tree(), [0, 1, 3], 1)  # a stop cut the path after one token
    assert calibration.total == (2, pytest.approx(0.9), 1)


def test_error_is_zero_if_chances_come_true() -> None:
    calibration = Calibration()
    tree = DraftTree((1, 2), (-1, 0), (0, 1), ("root", "context"), (1.0, 0.25))
    for number in range(8):
        calibration.note(tree, [0, 1] if number % 4 == 0 else [0], 2 if number % 4 == 0 else 1)
    assert calibration.error == pytest.approx(0.0)
    calibration.note(tree, [0, 1], 2)
    assert calibration.error == pytest.approx(0.75 / 9)
    assert len(calibration.bins) == NUM_BINS
