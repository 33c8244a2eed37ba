"""Memories in files: saved atomically, loaded by the next run, refused if they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftwood import LLM, SamplingParams
from draftwood.drafters import memory as memories
from draftwood.errors import DraftwoodError, OptionError
from draftwood.models.config import ModelConfig
from draftwood.targets.tiny import TINY_CONFIG
from tests.tools.cli import TINY, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.engine import reference
from tests.tools.memory import FORGETFUL, LEARNING, PARAMS, PROMPT, cycles, metadata, names, open_llm


def filled(path: Path, drafter: str = "goose", **options: Any) -> int:
    """Create a file; return the number of cycles of a cold start."""
    with open_llm(path, drafter, **options) as llm:
        return cycles(llm)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", LEARNING)
def test_next_run_starts_from_the_file(drafter: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    cold = filled(path, drafter)
    assert names(tmp_path) == ["tables.memory"]
    with open_llm(path, drafter) as llm:
        assert cycles(llm) < cold


def test_file_has_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path, top_k=4)
    about = metadata(path)
    assert about["format"] == "draftwood-memory"
    assert about["version"] == "1"
    assert about["model"].startswith("tiny (LlamaForCausalLM 258x48x2")
    assert about["layout"] == "successors of 258 tokens and of pairs, 4 each"


def test_smaller_table_keeps_latest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables.memory"
    filled(path)
    monkeypatch.setattr("draftwood.drafters.transition.RowTable.capacity_within", lambda *_: 5)
    with open_llm(path) as llm:
        assert llm._default.memory.get(0).num_pairs == 5


def interrupt_in_block(llm: LLM) -> None:
    cycles(llm)
    raise KeyboardInterrupt


def interrupt_in_stream(llm: LLM) -> None:
    for number, _ in enumerate(llm.stream(PROMPT, PARAMS)):
        if number == 2:
            raise KeyboardInterrupt


def interrupt_in_pass(llm: LLM) -> None:
    target = llm._engine.target
    forward, passes = target.forward, iter(range(5))

    def interrupted(*segments: Any) -> Any:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return forward(*segments)

    target.forward = interrupted  # type: ignore[method-assign]
    llm.generate(PROMPT, PARAMS)


@pytest.mark.parametrize("break_off", [interrupt_in_block, interrupt_in_stream, interrupt_in_pass])
def test_ctrl_c_loses_nothing(break_off: Callable[[LLM], None], tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"

    def run() -> None:
        with open_llm(path) as llm:
            break_off(llm)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert names(tmp_path) == ["tables.memory"]
    with open_llm(path) as llm:
        assert llm._default.memory.get(0).num_pairs > 15  # those of the prompt, some of them duplicates
        assert cycles(llm) < cycles(open_llm("request"))


def test_memory_is_saved_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables.memory"
    llm = open_llm(path)
    cycles(llm)
    assert not path.exists()  # a minute has not passed
    monkeypatch.setattr(memories, "SECONDS_BETWEEN_SAVES", 0.0)
    cycles(llm)
    first = path.stat().st_size
    list(llm.stream("another text altogether", PARAMS))
    assert path.stat().st_size > first
    monkeypatch.setattr(memories, "SECONDS_BETWEEN_SAVES", 60.0)
    path.unlink()
    cycles(llm)
    assert not path.exists()
    llm.close()
    assert path.exists()


def test_failed_periodic_save_does_not_fail_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "SECONDS_BETWEEN_SAVES", 0.0)
    path = tmp_path / "tables.memory"
    llm = open_llm(path)
    path.mkdir()  # now the file cannot be written
    assert llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].token_ids == reference(llm, PROMPT, 40)
    with pytest.raises(DraftwoodError, match="cannot be written"):
        llm.close()
    assert llm._engine.target.can_open(4096)
    assert names(tmp_path) == ["tables.memory"]


def test_nothing_is_saved_while_a_cycle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's request may write to the tables: the engine's lock is held during every save."""
    llm = open_llm(tmp_path / "tables.memory")
    held = []
    monkeypatch.setattr(llm._default.memory, "save", lambda **_: held.append(llm._engine._lock._is_owned()))
    llm.generate("ab ab", SamplingParams(max_tokens=4))
    list(llm.stream("ab ab", SamplingParams(max_tokens=4)))
    llm.close()
    assert held == [True] * 3


# -- files that are refused ------------------------------------------------------------------------------------------


def refusal(path: Path, drafter: str = "goose", config: ModelConfig = TINY_CONFIG, **options: Any) -> str:
    """The error message; the file must stay unchanged."""
    before = path.read_bytes()
    with pytest.raises(DraftwoodError) as refused:
        open_llm(path, drafter, config, **options)
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]
    message = str(refused.value)
    assert str(path) in message
    return message


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path)
    message = refusal(path, config=replace(TINY_CONFIG, num_layers=3))
    assert "belongs to another model" in message
    assert "258x48x2" in message
    assert "258x48x3" in message
    assert memories.NEW_FILE in message


@pytest.mark.parametrize(
    ("drafter", "options"), [("recycling", {}), ("goose", {"top_k": 5}), ("goose", {"bigrams": False}), ("stand", {})]
)
def test_a_file_with_other_tables_is_refused(drafter: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path)
    message = refusal(path, drafter, **options)
    assert "was filled by a drafter with other tables" in message
    assert "successors of 258 tokens and of pairs, 10 each" in message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": "2"}, "is a memory of another version"),
        ({"version": None}, "is a memory of another version"),
        ({"format": "something"}, "is not a Draftwood memory"),
        ({"format": None}, "is not a Draftwood memory"),
        ({"layout": None}, "other tables"),
        ({"model": None}, "another model"),
    ],
)
def test_file_with_wrong_metadata_is_refused(changed: dict[str, str | None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path)
    about = {key: value for key, value in {**metadata(path), **changed}.items() if value is not None}
    save_file(load_file(path), path, about)
    assert message in refusal(path)


@pytest.mark.parametrize("damage", ["empty", "text", "start", "end", "noise", "header"])
@pytest.mark.parametrize("drafter", ["goose", "stand"])
def test_a_damaged_file_is_refused(damage: str, drafter: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path, drafter)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"this is no memory " * 20,
            "start": whole[:50],
            "end": whole[:-10],
            "noise": np.random.default_rng(0).bytes(5000),
            "header": whole[:8] + b"\xff" * 40 + whole[48:],
        }[damage]
    )
    message = refusal(path, drafter)
    assert "cannot be read as a memory" in message
    assert memories.NEW_FILE in message


@pytest.mark.parametrize("drafter", ["goose", "stand"])
def test_a_file_with_missing_or_misshapen_tables_is_refused(drafter: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path, drafter)
    arrays, about = load_file(path), metadata(path)
    for name, array in arrays.items():
        save_file({other: values for other, values in arrays.items() if other != name}, path, about)
        assert "cannot be read as a memory" in refusal(path, drafter)
        if name.endswith("ids"):
            save_file({**arrays, name: np.ascontiguousarray(array[:, :-1])}, path, about)
            assert "cannot be read as a memory" in refusal(path, drafter)


@pytest.mark.parametrize(("drafter", "table"), [("goose", "pairs.ids"), ("goose", "ids"), ("stand", "ngrams.ids")])
def test_tokens_the_model_does_not_have_are_refused(drafter: str, table: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    filled(path, drafter)
    arrays, about = load_file(path), metadata(path)
    arrays[table][0, 0] = 5000
    save_file(arrays, path, about)
    assert "tokens that the model does not have" in refusal(path, drafter)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a folder"):
        open_llm(tmp_path)


def test_a_missing_folder_is_refused_before_anything_is_learned(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="folder for the memory does not exist") as refused:
        open_llm(tmp_path / "missing" / "tables.memory")
    assert str(tmp_path / "missing") in str(refused.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("drafter", FORGETFUL)
def test_a_drafter_without_memory_needs_no_file(drafter: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="learns nothing"):
        open_llm(tmp_path / "tables.memory", drafter)
    assert names(tmp_path) == []


# -- the command line ------------------------------------------------------------------------------------------------


def test_command_saves_memory_to_file(tmp_path: Path, draftwood_command: Command) -> None:
    path = tmp_path / "tables.memory"
    command = ("generate", *TINY, "--drafter", "goose", "--memory", str(path), "--raw", "ab ab ab", "--json")
    first, second = (draftwood_command(*command) for _ in range(2))
    assert (first.code, second.code) == (0, 0)
    cold, warm = json.loads(first.out), json.loads(second.out)
    assert warm["token_ids"] == cold["token_ids"]
    assert warm["stats"]["cycles"] < cold["stats"]["cycles"]
    assert names(tmp_path) == ["tables.memory"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafter", "goose", "--memory", "proces"), "memory is not a scope or a file name"),
        (("--drafter", "pld", "--memory", "./tables.memory"), "learns nothing"),
    ],
)
def test_command_refuses_invalid_memory(
    options: tuple[str, ...], message: str, tmp_path: Path, draftwood_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = draftwood_command("generate", *TINY, *options, "--raw", "ab ab ab")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert names(tmp_path) == []
