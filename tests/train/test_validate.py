"""Validation of a head during training: trees, accuracy and calibration after guesses of every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.text.bytes import ByteTokenizer
from draftwood.train.base import Example
from draftwood.train.config import ValidateSection
from draftwood.train.measure.calibration import measure_ranks
from draftwood.train.measure.validate import (
    TreeStats,
    _record_trees,
    extract_prompts,
    greedy_path,
    score_validation,
    validate_head,
)
from draftwood.tree import DraftTree
from tests.tools.neural import clock_target, clock_text, following, perfect_head, saved_head
from tests.tools.trainer import configuration, run


def clock_examples(count: int = 3, size: int = 20) -> list[Example]:
    return [
        Example(np.array(clock_text(start, size), dtype=np.int32), np.arange(size) >= 4 + start)
        for start in range(count)
    ]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra"])
def test_perfect_head_is_correct_after_every_guess(kind: str) -> None:
    """The successor of a token of the clock target does not depend on earlier tokens."""
    found = measure_ranks(perfect_head(kind), clock_target(), clock_examples(), positions=4)
    assert found["accuracy"] == 1.0
    assert [each["rank"] for each in found["ranks"]] == [1, 2, 3, 4, 5]
    assert [each["accuracy"] for each in found["ranks"]] == [1.0] * 5
    assert [each["count"] for each in found["ranks"]] == [12] * 5
    for each in found["ranks"]:
        assert each["ece"] == pytest.approx(each["ece_target"])  # its confidence equals that of the target


def test_medusa_does_not_see_its_own_guess() -> None:
    """So it is right after the first guess, which is the text's own token, and after no other."""
    found = measure_ranks(perfect_head("medusa"), clock_target(), clock_examples(), positions=4)
    assert [each["accuracy"] for each in found["ranks"]] == [1.0, 0.0, 0.0, 0.0, 0.0]


# -- figures ---------------------------------------------------------------------------------------------------------


def tree(parents: list[int], probs: list[float]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    size = len(parents)
    return DraftTree(tuple(range(size)), tuple(parents), tuple(depths), ("root", *["draft"] * (size - 1)), tuple(probs))


def test_counts_of_pruned_and_accepted_greedy_paths() -> None:
    made = tree([-1, 0, 0, 2, 1, 1], [1.0, 0.6, 0.3, 0.9, 0.4, 0.5])
    assert greedy_path(made) == [0, 1, 5]
    notes = TreeStats()
    notes.add(made, [0, 1, 5], 2)  # the whole greedy path, accepted
    notes.add(made, [0, 1], 3)  # it should have been longer; the accepted path is on it
    notes.add(made, [0, 2, 3], 2)  # another path
    notes.add(made, [0], 2)  # nothing was accepted: no information about paths
    notes.add(tree([-1], [1.0]), [0], 2)  # no tree
    assert notes.summary() == {"greedy_pruned": 1 / 4, "accepted_greedy": 2 / 3}


def test_prompts_end_where_target_output_begins() -> None:
    examples = [Example(np.arange(6, dtype=np.int32), np.arange(6) >= start) for start in (2, 0, 9, 3)]
    assert extract_prompts(examples, 5) == [[0, 1], [0, 1, 2]]
    assert extract_prompts(examples, 1) == [[0, 1]]


# -- together --------------------------------------------------------------------------------------------------------


def assert_progress(told: list[tuple[str, int, int]], section: ValidateSection) -> None:
    """Every part starts at 0 and its count increases; a target may emit less than the maximum."""
    for growth in section.growths:
        of_growth = [(done, total) for label, done, total in told if label == f"drafting with {growth}"]
        assert of_growth == sorted(of_growth)
        assert of_growth[0][0] == 0 < of_growth[-1][0]
        assert all(done <= total == section.prompts * section.max_tokens for done, total in of_growth)
    assert ("measuring calibration", 0, len(clock_examples())) in told


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_trees_of_a_perfect_head_are_accepted(kind: str) -> None:
    section = ValidateSection(prompts=2, max_tokens=24, budget=10, growths=("chain", "beam", "salf"), positions=2)
    head = perfect_head(kind)
    told: list[tuple[str, int, int]] = []
    result = validate_head(
        head, clock_target(), ByteTokenizer(), clock_examples(), section, lambda *at: told.append(at)
    )
    assert_progress(told, section)
    depth = {"medusa": 4, "hydra": 4}.get(kind, 7)
    assert result["trees"]["chain"]["tau"] >= min(depth, 6)
    assert (
        score_validation(result) == result["tau"] == pytest.approx(sum(t["tau"] for t in result["trees"].values()) / 3)
    )
    assert result["trees"]["beam"]["accepted_greedy"] == 1.0
    assert 2 < result["trees"]["chain"]["mean_tree_size"] <= 8
    assert result["trees"]["beam"]["mean_tree_size"] <= 10
    assert "accepted_greedy" not in result["trees"]["salf"]
    assert result["accuracy"] == 1.0
    assert following(0) == 5
    assert next(head.parameters()).dtype == torch.float32


def test_trees_cut_at_the_end_of_an_answer_are_not_pruned() -> None:
    """A chain is a greedy path of full depth, except in the last cycles of an answer."""
    notes = TreeStats()
    knowing_drafter = _record_trees("eagle3", notes)
    options = {"head": saved_head(perfect_head("eagle3", noise=0.3)), "growth": "chain"}
    llm = LLM.from_target(clock_target(), ByteTokenizer(), drafter=knowing_drafter, drafter_options=options, budget=10)
    (done,) = llm.generate([clock_text(0, 5)], SamplingParams(max_tokens=30))
    assert min(done.stats.trees_by_depth) < 7  # some were cut
    assert 0 < notes.trees < done.stats.cycles
    assert notes.pruned == 0


def test_run_validates_and_saves_the_best_head(tmp_path: Path) -> None:
    wanted = ("data.held_out=4", "run.validate_every=2", "validate.prompts=2", "validate.max_tokens=6")
    few = ('validate.growths=["beam"]', "validate.budget=6", "validate.positions=1")
    lines = run(configuration(tmp_path / "run", *wanted, *few))
    found = [line for line in lines if line["kind"] == "validate"]
    assert [line["step"] for line in found] == [2, 4]
    assert set(found[0]) >= {"loss", "parts", "tau", "trees", "accuracy", "ranks"}
    assert (tmp_path / "run" / "best" / "config.json").is_file()
    assert "tau" in (tmp_path / "run" / "course.svg").read_text()


def test_best_head_has_lowest_loss_without_prompts() -> None:
    assert score_validation({"loss": 1.0}) > score_validation({"loss": 2.0})
