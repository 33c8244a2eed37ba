"""The benchmark run: all methods get the same prompts, every answer is recorded and judged, timing is fair."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from draftwood.bench.records.run_folder import read_run
from draftwood.bench.run.engines import DrafterEngine
from draftwood.bench.tasks.load import load_tasks
from tests.tools.bench import BASE, Spy, bench, conversations

# --- prompts and records ----------------------------------------------------------------------------------------------


def test_every_method_runs_every_turn_of_every_prompt(tmp_path: Path) -> None:
    run = bench(tmp_path / "a")
    counts = Counter((record.method, record.task) for record in run.records)
    assert counts == {(m, t): n for m in BASE["drafters"] for t, n in (("code", 2), ("chat", 4))}
    assert {record.turn for record in run.records if record.task == "chat"} == {0, 1}
    again = read_run(tmp_path / "a")
    assert again.records == run.records
    assert again.manifest == run.manifest
    assert run.manifest.finished is not None


def test_greedy_outputs_are_compared_in_any_method_order(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", dtype="float32")
    verdicts = {record.method: record.lossless and record.lossless.verdict for record in run.records}
    assert verdicts == {"plain": None, "pld": "identical", "goose": "identical"}
    assert all(record.lossless is not None for record in run.records if record.method != "plain")


def test_second_turn_contains_the_first_answer(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("plain",), tasks=("chat",), limit=1)
    (task,) = load_tasks(["chat"], None, 1)
    prompt = task.prompts[0]
    first, second = run.records
    llm = LLM("tiny", drafter="plain", budget=1)
    messages = [
        {"role": "user", "content": prompt.turns[0]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": prompt.turns[1]},
    ]
    from draftwood.prompts import prompt_ids

    expected = llm.generate(prompt_ids(llm.tokenizer, messages), SamplingParams(max_tokens=12))[0]
    assert second.token_ids == expected.token_ids
    assert second.prompt_tokens == len(prompt_ids(llm.tokenizer, messages))


def test_batch_has_same_tokens_and_a_common_speed(tmp_path: Path) -> None:
    alone = bench(tmp_path / "a", tasks=("code",), dtype="float32")
    together = bench(tmp_path / "b", tasks=("code",), dtype="float32", batch=2)
    tokens = {record.key: record.token_ids for record in alone.records}
    assert {record.key: record.token_ids for record in together.records} == tokens
    speeds = {r.decode_tokens / r.decode_seconds for r in together.records if r.method == "goose"}
    assert max(speeds) == pytest.approx(min(speeds))


def test_trajectories_are_samples_of_one_prompt(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("stand", "recycling"), temperature=0.8, trajectories=(1, 3), tasks=("chat",))
    keys = Counter((r.method, r.prompt, r.turn) for r in run.records)
    assert set(keys.values()) == {3}
    assert {turn for _, _, turn in keys} == {0}
    assert {record.sample for record in run.records} == {0, 1, 2}
    outputs = {tuple(r.token_ids) for r in run.records if r.method == "stand" and r.prompt == run.records[0].prompt}
    assert len(outputs) == 3
    assert all(record.lossless is None for record in run.records)


def test_repeats_have_different_seeds(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("plain",), temperature=1.0, repeats=2, tasks=("code",), limit=1)
    first, second = run.records
    assert (first.repeat, second.repeat) == (0, 1)
    assert first.token_ids != second.token_ids


def test_manifest_describes_the_run(tmp_path: Path) -> None:
    bench(tmp_path / "a", limit=1, tasks=("code",))
    content = json.loads((tmp_path / "a" / "run.json").read_text())
    assert content["model"]["name"] == "tiny"
    assert content["machine"]["cores"] >= 1
    assert content["software"]["torch"]
    assert [method["label"] for method in content["methods"]] == ["plain", "pld", "goose"]
    assert content["tasks"]["code"]["prompts"] == 1


# --- measurement ------------------------------------------------------------------------------------------------------


def test_warm_up_does_not_fill_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DrafterEngine.generate
    known: list[dict[str, object]] = []

    def spied(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        known.append(dict(self.llm._default.memory._by_owner))
        return answer(self, prompts, params)

    monkeypatch.setattr(DrafterEngine, "generate", spied)
    bench(tmp_path / "a", drafters=("recycling:memory=process",), tasks=("code",))
    assert not known[0]
    assert known[1]


def test_samples_that_run_together_share_their_time(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", temperature=0.8, trajectories=(3,), batch=2, tasks=("code",), limit=1)
    speeds = [r.decode_tokens / r.decode_seconds for r in run.records if r.method == "goose"]
    assert len(speeds) == 3
    assert max(speeds) == pytest.approx(min(speeds))


def test_all_turns_of_a_batch_are_one_batch(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data", ("first",), ("first", "second"), ("first",))
    run = bench(tmp_path / "a", data=data, tasks=("talk",), drafters=("plain",), batch=2, limit=None)
    batches = {(r.prompt[-1], r.turn): r.batch[-1:] for r in run.records}
    assert batches == {("0", 0): "0", ("1", 0): "0", ("1", 1): "0", ("2", 0): ""}


def test_no_seed_is_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer derives the seeds of its samples by counting up from the given one."""
    spy = Spy(monkeypatch)
    bench(tmp_path / "a", temperature=1.0, trajectories=(3,), repeats=2, tasks=("code",), limit=1, drafters=("plain",))
    assert [params.seed for params in spy.params] == [0, 3]


def test_memory_file_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "tables.memory"
    bench(tmp_path / "a", drafters=("plain", "recycling"), memory=str(file), tasks=("code",), limit=1)
    assert file.exists()
