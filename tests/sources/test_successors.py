"""The successor table of a model: its content, its file, and its use by drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftwood import LLM, SamplingParams
from draftwood.sources import successors
from draftwood.sources.rowtable import NOTHING
from draftwood.sources.successors import WIDTH, build_successors, load_successors, save_successors, successors_path
from draftwood.sources.transitions import SuccessorArrays
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import BOS, VOCAB_SIZE, ByteTokenizer
from tests.conftest import logits_after


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("draftwood.sources.successors.cache_home", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module", params=["eager", "auto"])
def target(request: pytest.FixtureRequest) -> NativeTarget:
    return tiny_target(backend=request.param, cache_tokens=1024)


def some_table(vocab_size: int = VOCAB_SIZE) -> SuccessorArrays:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (vocab_size, WIDTH), dtype=np.int32)
    return SuccessorArrays(ids, rng.random((vocab_size, WIDTH), dtype=np.float32))


# -- making it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 256])
def test_table_contains_top_tokens_of_the_model(
    target: NativeTarget, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successors, "CHUNK", chunk)
    table = build_successors(target, BOS)
    assert table.ids.shape == table.scores.shape == (VOCAB_SIZE, WIDTH)
    for token in range(VOCAB_SIZE):
        probs, ids = logits_after(target, [BOS, token])[-1].softmax(-1).topk(WIDTH)
        assert table.ids[token].tolist() == ids.tolist()
        assert table.scores[token].tolist() == pytest.approx(probs.tolist(), abs=1e-5)


def test_building_the_table_restores_the_cache(target: NativeTarget) -> None:
    build_successors(target, BOS)
    assert target.can_open(1024)


def test_a_small_cache_takes_more_passes() -> None:
    table = build_successors(tiny_target(cache_tokens=10), BOS)
    assert (table.ids == build_successors(tiny_target(), BOS).ids).all()


def test_interrupted_build_frees_its_slots(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(successors, "top_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_successors(target, BOS)
    assert target.can_open(1024)


def test_progress_ends_with_the_whole_vocabulary(target: NativeTarget) -> None:
    told: list[tuple[int, int]] = []
    build_successors(target, BOS, lambda _, done, total: told.append((done, total)))
    assert told[0] == (0, VOCAB_SIZE)
    assert told[-1] == (VOCAB_SIZE, VOCAB_SIZE)


def test_rows_are_padded_for_small_vocabulary() -> None:
    target = tiny_target(replace(TINY_CONFIG, vocab_size=6, eos_token_ids=(5,)))
    table = build_successors(target, 0)
    assert (np.sort(table.ids[:, :6], axis=1) == np.arange(6)).all()
    assert (table.ids[:, 6:] == NOTHING).all()
    save_successors(target.info, table)
    loaded = load_successors(target.info, 4)
    assert loaded is not None
    assert (loaded.ids == table.ids[:, :4]).all()


# -- its file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, WIDTH, WIDTH + 3])
def test_table_is_saved_and_loaded(target: NativeTarget, width: int, own_cache: Path) -> None:
    assert load_successors(target.info, width) is None
    table = some_table()
    path = save_successors(target.info, table)
    assert path.is_relative_to(own_cache)
    loaded = load_successors(target.info, width)
    assert loaded is not None
    both = min(width, WIDTH)
    assert loaded.ids.shape == loaded.scores.shape == (VOCAB_SIZE, width)
    assert (loaded.ids.dtype, loaded.scores.dtype) == (np.int32, np.float32)
    assert (loaded.ids[:, :both] == table.ids[:, :both]).all()
    assert (loaded.scores[:, :both] == table.scores[:, :both]).all()
    assert (loaded.ids[:, both:] == NOTHING).all()
    assert (loaded.scores[:, both:] == 0.0).all()


def test_every_model_has_its_own_table(target: NativeTarget) -> None:
    info = target.info
    others = [
        replace(info, name="other"),
        replace(info, vocab_size=300),
        replace(info, hidden_size=64),
        replace(info, num_layers=3),
        replace(info, num_parameters=1),
        replace(info, architecture="Other"),
    ]
    assert len({successors_path(other) for other in [info, *others]}) == 7
    assert successors_path(replace(info, backend="other", context_length=5)) == successors_path(info)


def test_invalid_table_file_is_ignored(target: NativeTarget) -> None:
    path = save_successors(target.info, some_table())
    whole = path.read_bytes()
    ids, scores = some_table()
    mark = {"format": successors.FORMAT}

    def found() -> bool:
        return load_successors(target.info, WIDTH) is not None

    assert found()
    for damaged in (b"", b"no table", whole[:100], whole[:-1], b"\xff" * len(whole)):
        path.write_bytes(damaged)
        assert not found()
    unknown = ids.copy()
    unknown[3, 3] = VOCAB_SIZE
    for arrays, about in (
        ({"ids": ids, "scores": scores}, {}),
        ({"ids": ids, "scores": scores}, {"format": "draftwood-successors-0"}),
        ({"ids": ids}, mark),
        ({"ids": ids[:-1], "scores": scores[:-1]}, mark),
        ({"ids": ids, "scores": scores[:, :-1]}, mark),
        ({"ids": unknown, "scores": scores}, mark),
        ({"ids": ids + np.float32(0.5), "scores": scores}, mark),
        ({"ids": ids, "scores": scores * np.float32(np.nan)}, mark),
    ):
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, about)
        assert not found()
    path.unlink()
    path.mkdir()
    assert not found()


# -- drafters start from it ------------------------------------------------------------------------------------------


def first_tree(drafter: str, **options: object) -> tuple[int, list[int]]:
    """Nodes of the first cycle's tree after a prompt of one token, and the whole output."""
    llm = LLM.from_target(
        tiny_target(cache_tokens=1024), ByteTokenizer(), drafter=drafter, drafter_options=options, budget=12
    )
    events = list(llm.stream([200], SamplingParams(max_tokens=20, ignore_eos=True)))
    return len(events[0].tree), [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("drafter", ["goose", "recycling", "iso3", "sequoia", "sam+recycling"])
def test_table_enables_drafting_in_first_cycle(drafter: str, target: NativeTarget) -> None:
    size, plain = first_tree(drafter)
    assert size == 1  # nothing is known yet
    save_successors(target.info, build_successors(target, BOS))
    size, output = first_tree(drafter)
    assert size > 4
    assert output == plain
    assert first_tree(drafter, static=False) == (1, plain)
    assert first_tree(drafter, top_k=WIDTH + 5)[1] == plain  # padded rows


def test_requests_do_not_change_the_initial_table(target: NativeTarget) -> None:
    save_successors(target.info, build_successors(target, BOS))
    llm = LLM.from_target(tiny_target(), ByteTokenizer(), drafter="goose", budget=12)
    table = llm._default._shared
    before = table.ids.copy(), table.scores.copy()
    llm.generate(["some text", "and another"], SamplingParams(max_tokens=20))
    assert (table.ids == before[0]).all()
    assert (table.scores == before[1]).all()
