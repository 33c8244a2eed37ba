"""Memories of drafters: their scopes, saving and loading, and that they never change the output."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, make_factory
from draftwood.drafters.goose import GooseDrafter
from draftwood.drafters.memory import MemoryConfig, parse_memory
from draftwood.errors import OptionError
from draftwood.sources.transitions import TransitionTable
from draftwood.targets.tiny import tiny_target
from tests.tools.cli import _plain_environment  # noqa: F401 - fixtures
from tests.tools.engine import PROMPTS, reference
from tests.tools.memory import FORGETFUL, LEARNING, PARAMS, PROMPT, cycles, metadata, open_llm

# -- options ---------------------------------------------------------------------------------------------------------


def test_scopes_and_files_are_distinguished(tmp_path: Path) -> None:
    for scope in ("request", "prompt", "process"):
        assert parse_memory(scope) == MemoryConfig(scope)
    for name in ("tables.memory", "./tables", str(tmp_path / "tables")):
        assert parse_memory(name) == MemoryConfig("process", Path(name))
    assert parse_memory(Path("tables")) == MemoryConfig("process", Path("tables"))
    assert parse_memory("~/tables") == MemoryConfig("process", Path.home() / "tables")


@pytest.mark.parametrize("memory", ["proces", "", "Process", None, 3, True, ["prompt"], b"tables.memory"])
def test_invalid_memory_is_refused(memory: Any) -> None:
    with pytest.raises(OptionError, match="memory is not a scope or a file name") as refused:
        open_llm(memory)
    assert repr(memory) in str(refused.value)
    assert "request, prompt, process" in str(refused.value)


def test_misspelt_scope_is_refused_before_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.llm.load_target", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(OptionError, match="memory is not a scope"):
        LLM("tiny", memory="proces")


def test_factory_refuses_invalid_memory() -> None:
    with pytest.raises(OptionError, match="memory is not a scope"):
        make_factory("goose", None, tiny_target().info, "proces")


@pytest.mark.parametrize("name", ["x" * 300 + ".memory", "~nobody-of-that-name/tables"])
def test_invalid_file_names_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="Invalid file name"):
        open_llm(name)


# -- scopes ----------------------------------------------------------------------------------------------------------


class SpyingGoose(GooseDrafter):
    """Records the memories in weak references."""

    name = "spying"
    seen: ClassVar[list[tuple[int, weakref.ref[TransitionTable]]]] = []
    pairs_at_start: ClassVar[list[int]] = []

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self.seen.append((id(self.memory), weakref.ref(self.memory)))
        self.pairs_at_start.append(self.memory.num_pairs)


@pytest.fixture
def spy() -> type[SpyingGoose]:
    SpyingGoose.seen.clear()
    SpyingGoose.pairs_at_start.clear()
    return SpyingGoose


SAMPLES = replace(PARAMS, n=3, temperature=1.0, seed=1)


def test_request_scope_starts_empty(spy: type[SpyingGoose]) -> None:
    llm = open_llm("request", spy, max_batch=1)
    llm.generate([PROMPT, PROMPT], SAMPLES)
    assert spy.pairs_at_start == [0] * 6
    llm = open_llm("request", spy)
    llm.generate([PROMPT, PROMPT], SAMPLES)
    assert len({memory for memory, _ in spy.seen[6:]}) == 6


def test_prompt_scope_is_shared_by_samples_only(spy: type[SpyingGoose]) -> None:
    llm = open_llm("prompt", spy)
    llm.generate([PROMPT, PROMPT, "another"], SAMPLES)
    assert len(spy.seen) == 9
    assert len({memory for memory, _ in spy.seen}) == 3
    spy.pairs_at_start.clear()
    one_by_one = open_llm("prompt", spy, max_batch=1)
    one_by_one.generate(PROMPT, SAMPLES)
    assert spy.pairs_at_start[0] == 0
    assert 0 < spy.pairs_at_start[1] < spy.pairs_at_start[2]
    one_by_one.generate(PROMPT, SAMPLES)
    assert spy.pairs_at_start[3] == 0


@pytest.mark.parametrize("scope", ["request", "prompt"])
@pytest.mark.parametrize("ending", ["finished", "cancelled"])
def test_memories_are_freed_with_their_requests(scope: str, ending: str, spy: type[SpyingGoose]) -> None:
    llm = open_llm(scope, spy)
    if ending == "finished":
        llm.generate([PROMPT, "another"], SAMPLES)
    else:
        stream = llm.stream(PROMPT, PARAMS)
        next(stream)
        assert spy.seen[0][1]() is not None
        stream.close()
        del stream
    gc.collect()
    assert spy.seen
    assert all(memory() is None for _, memory in spy.seen)


def test_process_scope_is_shared_by_all_requests(spy: type[SpyingGoose]) -> None:
    llm = open_llm("process", spy)
    first = llm.generate(PROMPT, PARAMS)[0]
    second = llm.generate(PROMPT, PARAMS)[0]
    llm.generate(["another", "text"], PARAMS)
    assert len({memory for memory, _ in spy.seen}) == 1
    assert spy.pairs_at_start[0] == 0 < spy.pairs_at_start[1]
    assert second.token_ids == first.token_ids
    assert second.stats.cycles < first.stats.cycles


def test_models_do_not_share_memory(spy: type[SpyingGoose]) -> None:
    first, second = open_llm("process", spy), open_llm("process", spy)
    cycles(first)
    cycles(second)
    assert spy.pairs_at_start == [0, 0]


def test_drafter_of_a_call_uses_the_scope(tmp_path: Path) -> None:
    path = tmp_path / "tables.memory"
    with open_llm(path, "goose") as llm:
        cold, warm = (llm.generate(PROMPT, PARAMS, drafter="recycling")[0].stats.cycles for _ in range(2))
        assert warm < cold
        layout = llm._default.memory.get(0).layout
    assert metadata(path)["layout"] == layout  # the file belongs to the drafter of the model


@pytest.mark.parametrize("drafter", FORGETFUL)
@pytest.mark.parametrize("scope", ["request", "prompt", "process"])
def test_drafters_without_memory_accept_any_scope(scope: str, drafter: str) -> None:
    llm = open_llm(scope, drafter)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].token_ids == reference(llm, PROMPT, 40)
    assert llm._default.memory.get(1) is None


# -- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", LEARNING)
@pytest.mark.parametrize("memory", ["request", "prompt", "process", "file"])
def test_memory_does_not_change_the_output(memory: str, drafter: str, tmp_path: Path) -> None:
    place = tmp_path / "tables.memory" if memory == "file" else memory
    params = SamplingParams(max_tokens=30)
    for _ in range(2):  # the second time with the memory of the first
        with open_llm(place, drafter) as llm:
            results = llm.generate(PROMPTS, params)
            again = llm.generate(PROMPTS[::-1], params)[::-1]
            plain = llm.generate(PROMPTS, params, drafter="plain")
            assert [c.token_ids for c in results] == [c.token_ids for c in again] == [c.token_ids for c in plain]
