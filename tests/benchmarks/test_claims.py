"""Paired comparison of methods in benchmark runs."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev

import pytest

from draftwood.bench.records.run_folder import RequestRecord
from draftwood.bench.replay import load_recording, save_recording
from draftwood.targets.native.target import NativeTarget
from tests.tools.replay import method_of, recorded, target  # noqa: F401 - a fixture
from tests.tools.script import load_script

claims = load_script("claims")
Passes = claims.Passes


def record(method: str, prompt: int, tokens: int, cycles: int, task: str = "code", sample: int = 0) -> RequestRecord:
    return RequestRecord(
        method=method, task=task, prompt=str(prompt), sample=sample, output_tokens=tokens, stats={"cycles": cycles}
    )


def test_only_requests_that_both_methods_finished_are_paired() -> None:
    records = [
        record("a", 1, 100, 50),
        record("b", 1, 100, 40),
        record("a", 1, 60, 20, sample=1),
        record("b", 1, 90, 30, sample=1),
        record("a", 2, 100, 10),  # b was cut off
        record("c", 2, 100, 10),
        record("a", 1, 30, 10, task="chat"),
        record("b", 1, 30, 30, task="chat"),
    ]
    expected = {"chat": [Passes(30, 10, 30, 30)], "code": [Passes(160, 70, 190, 70)]}
    assert claims.pair_prompts(records, "a", "b") == expected
    assert claims.pair_prompts(records, "b", "c") == {}


def test_change_is_the_mean_of_the_ratios_of_tasks() -> None:
    change = claims.compare({"code": [Passes(10, 5, 10, 4)] * 3, "chat": [Passes(10, 5, 10, 10)] * 2})
    assert change.change == pytest.approx((1.25 + 0.5) / 2 - 1.0)
    assert (change.base, change.other) == pytest.approx((2.0, (2.5 + 1.0) / 2))
    assert change.error == pytest.approx(0.0)  # all prompts agree
    assert change.num_prompts == 5


def test_error_is_that_of_a_mean_and_tasks_add_up() -> None:
    """With the same base everywhere and tokens that differ, the ratio is a mean, whose standard error is known."""
    values = [90, 100, 130, 85, 120]
    prompts = [Passes(100, 50, value, 50) for value in values]
    expected = stdev(value / 100 for value in values) / math.sqrt(len(values))
    assert claims.compare({"code": prompts}).error == pytest.approx(expected)
    assert claims.compare({"code": prompts, "chat": prompts}).error == pytest.approx(expected / math.sqrt(2))
    assert math.isnan(claims.compare({"code": prompts[:1]}).error)


def test_difficulty_of_a_prompt_cancels() -> None:
    prompts = [Passes(tokens, 50, tokens * 11 // 10, 50) for tokens in (50, 100, 400)]
    assert claims.compare({"code": prompts}).error == pytest.approx(0.0, abs=1e-12)


def test_table_has_a_row_per_method_and_number_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        record(method, prompt, 100, cycles, sample=sample)
        for method, cycles in (("a", 50), ("b", 40))
        for prompt in (1, 2)
        for sample in (0, 1)
    ]
    claims.paired(records, "a", [1, 2])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [f"| b | {n} | 2 | 2.00 | 2.50 | +25.0% ± 0.0 | +25.0% ± 0.0 |" for n in (1, 2)]


def test_recording_is_replayed_as_records(target: NativeTarget, tmp_path: Path) -> None:
    path = tmp_path / "texts.recording"
    save_recording(path, recorded(target, [method_of("plain")]))
    records = list(claims.replay_records(str(path), "pld,sam:earlier_answers=true", 12))
    assert {each.method for each in records} == {"pld", "sam:earlier_answers=true"}
    plain = load_recording(path).requests
    assert [each.output_tokens for each in records] == [len(text.output_ids) for text in plain] * 2
    assert all(each.stats["cycles"] <= each.output_tokens for each in records)
    assert claims.pair_prompts(records, "pld", "sam:earlier_answers=true")
