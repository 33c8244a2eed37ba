"""Expected against real acceptance."""

import json

import numpy as np
import pytest

from draftwood.compiled import load_core
from draftwood.engine import NUM_BINS, TreeCounts
from draftwood.tree import DraftTree, Proposal

needs_core = pytest.mark.skipif(load_core() is None, reason="no compiler")


def make_tree() -> DraftTree:
    """A root with two children; the first has one child."""
    sources = ("root", "context", "transition", "context")
    return DraftTree((1, 2, 3, 4), (-1, 0, 0, 1), (0, 1, 1, 2), sources, (1.0, 0.75, 0.15, 0.55))


@pytest.fixture(params=[False, pytest.param(True, marks=needs_core)], ids=["python", "c"])
def trees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TreeCounts:
    if not request.param:
        monkeypatch.setattr("draftwood.engine.tally.load_core", lambda: None)
    return TreeCounts()


def test_counts_only_guesses_whose_parent_was_accepted(trees: TreeCounts) -> None:
    trees.note(make_tree(), [], 1)
    assert trees.calibration.total[::2] == (2, 0)
    trees.note(make_tree(), [1], 2)
    assert trees.calibration.total[::2] == (5, 1)
    assert trees.calibration.bins[7] == (2, 1.5, 1)
    assert trees.calibration.sources["transition"].as_dict() == {"tried": 2, "expected": 0.15, "accepted": 0.0}


def test_outcomes_after_a_stop_are_not_known(trees: TreeCounts) -> None:
    trees.note(make_tree(), [1], 1)  # a stop cut the path after one token
    assert trees.calibration.total == (2, pytest.approx(0.9), 1)


def test_error_is_zero_if_chances_come_true(trees: TreeCounts) -> None:
    tree = DraftTree((1, 2), (-1, 0), (0, 1), ("root", "context"), (1.0, 0.25))
    for number in range(8):
        trees.note(tree, *(([1], 2) if number % 4 == 0 else ([], 1)))
    assert trees.calibration.error == pytest.approx(0.0)
    trees.note(tree, [1], 2)
    assert trees.calibration.error == pytest.approx(0.75 / 9)
    assert len(trees.calibration.bins) == NUM_BINS


def test_errors_of_sources_do_not_cancel_out(trees: TreeCounts) -> None:
    """Both sources expect 0.5 of the same bin: one is always right, the other never."""
    tree = DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1), ("root", "context", "transition"), (1.0, 0.5, 0.5))
    trees.note(tree, [1], 2)
    content = trees.calibration.as_dict()
    assert content["error"] == 0.0
    assert {name: own["error"] for name, own in content["sources"].items()} == {"context": 0.5, "transition": 0.5}
    assert content["bins"] == [{"from": 0.5, "to": 0.6, "tried": 2, "expected": 0.5, "accepted": 0.5}]
    assert json.loads(json.dumps(content)) == content


def test_drawn_nodes_have_no_expected_acceptance(trees: TreeCounts) -> None:
    proposal = Proposal(np.array([2]), np.array([1.0]))
    drawn = DraftTree((1, 2), (-1, 0), (0, 1), ("root", "draft"), (1.0, 0.3), proposals={0: proposal})
    trees.note(drawn, [1], 2)
    assert trees.accepted_by_source == {"draft": 1}
    assert trees.calibration.total.tried == 0
    assert trees.calibration.error == 0.0


def test_chances_outside_zero_to_one_do_no_harm(trees: TreeCounts) -> None:
    chances = (1.0, -3.0, float("nan"), float("inf"), 2.0)
    tree = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 0, 0), (0, 1, 1, 1, 1), ("root", *["odd"] * 4), chances)
    trees.note(tree, [], 1)
    assert trees.calibration.total == (4, 2.0, 0)
    assert trees.calibration.bins[0] == (2, 0.0, 0)
    assert trees.calibration.bins[-1] == (2, 2.0, 0)
