"""Reading training data: valid data, errors, and held-out texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from draftwood.errors import DraftwoodError, OptionError
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import VOCAB_SIZE
from draftwood.train.base import Batch, Example
from draftwood.train.data.manifest import read_manifest
from draftwood.train.data.read import TrainingData
from draftwood.train.data.shards import DataError, Shard, read_shard, shard_name, write_shard
from tests.tools.train_data import make
from tests.tools.train_data_store import TARGET, data_of, manifest_of, stored, texts


def as_lists(examples: Sequence[Example]) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), answered.tolist()) for ids, answered in examples]


# -- opening ---------------------------------------------------------------------------------------------------------


def test_examples_are_read_in_order(tmp_path: Path) -> None:
    examples = texts([5, 2, 9, 1, 30])
    data = TrainingData.open(stored(tmp_path, examples))
    assert len(data) == 5
    assert data.lengths.tolist() == [5, 2, 9, 1, 30]
    assert as_lists([data[place] for place in range(5)]) == as_lists(examples)
    assert as_lists(data.examples([4, 0])) == as_lists([examples[4], examples[0]])
    assert data.prompt_ids(2) == examples[2].token_ids[:4].tolist()
    assert (data[0].token_ids.dtype, data[0].answered.dtype) == (np.int32, np.bool_)
    assert as_lists([data[-1]]) == as_lists(examples[-1:])
    assert Batch.of([data[0], data[2]]).answered.sum() == 3 + 5
    with pytest.raises(IndexError):
        data[5]


def test_empty_shard_is_valid(tmp_path: Path) -> None:
    write_shard(tmp_path / "part", Shard.of([], {"too_long": 2}), 0, "run")
    shard = read_shard(tmp_path / "part", 0, "run")
    assert (shard.counts()["examples"], shard.lost) == (0, {"too_long": 2})


def test_long_texts_can_be_cut(tmp_path: Path) -> None:
    examples = texts([4, 20, 12])
    data = TrainingData.open(stored(tmp_path, examples), max_length=8)
    assert data.lengths.tolist() == [4, 8]  # the longest has no text of the target left
    assert data.prompts.tolist() == [0, 2]
    assert as_lists([data[1]]) == [(examples[2].token_ids[:8].tolist(), examples[2].answered[:8].tolist())]
    written, occurring = data.token_counts()
    assert (written.sum(), occurring.sum()) == (2 + 2, 4 + 8)
    with pytest.raises(OptionError):
        TrainingData.open(tmp_path, max_length=0)


@pytest.mark.parametrize("place", [0.05, 0.5, 0.99])
def test_changed_byte_is_detected(place: float, tmp_path: Path) -> None:
    part = stored(tmp_path, texts([50, 60])) / shard_name(0)
    content = bytearray(part.read_bytes())
    content[int(place * len(content))] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|another run"):
        TrainingData.open(tmp_path)


def test_truncated_or_missing_shards_are_refused(tmp_path: Path) -> None:
    part = stored(tmp_path, texts([5, 6, 7])) / shard_name(1)
    content = part.read_bytes()
    for size in (0, 7, len(content) - 3):
        part.write_bytes(content[:size])
        with pytest.raises(DataError, match="damaged") as refusal:
            TrainingData.open(tmp_path)
        assert part.name in str(refusal.value)
    part.unlink()
    with pytest.raises(DataError, match="missing"):
        TrainingData.open(tmp_path)


def test_shards_of_other_runs_or_positions_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, texts([5, 6, 7, 8]))
    first, second = (tmp_path / shard_name(number) for number in range(2))
    before = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match="another run"):
        TrainingData.open(tmp_path)
    write_shard(first, read_shard(second, 1, manifest_of(4, 2).run_id), 0, "other")
    with pytest.raises(DataError, match="another run"):
        TrainingData.open(tmp_path)
    first.write_bytes(before)
    assert len(TrainingData.open(tmp_path)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 3, 3, 5], np.int64)},
        {"offsets": np.array([0, 2, 6], np.int64)},
        {"answered": np.full(5, 2, np.uint8)},
        {"answered": np.zeros(4, np.uint8)},
        {"token_ids": np.zeros(5, np.int64)},
        {"prompts": np.zeros(3, np.int64)},
    ],
)
def test_shapes_are_checked_despite_valid_checksum(change: dict[str, Any], tmp_path: Path) -> None:
    good = {
        "token_ids": np.zeros(5, np.int32),
        "answered": np.zeros(5, np.uint8),
        "offsets": np.array([0, 3, 5], np.int64),
        "prompts": np.zeros(2, np.int64),
    }
    write_shard(tmp_path / "good", Shard(**good, lost={}), 0, "run")
    read_shard(tmp_path / "good", 0, "run")
    write_shard(tmp_path / "bad", Shard(**{**good, **change}, lost={}), 0, "run")
    with pytest.raises(DataError, match="damaged"):
        read_shard(tmp_path / "bad", 0, "run")


def test_other_folders_are_not_training_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no training data"):
        TrainingData.open(tmp_path)
    for content in ("{", "[]", "{}", '{"format": "draftwood-training-data", "version": 1}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match="cannot be read"):
            TrainingData.open(tmp_path)
    folder = stored(tmp_path / "data", texts([3]))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(DataError, match="draftwood-training-data 2"):
        TrainingData.open(folder)
    other = save(load_file(folder / shard_name(0)), {"format": "other"})
    stored(folder, texts([3]))
    (folder / shard_name(0)).write_bytes(other)
    with pytest.raises(DataError, match="damaged"):
        TrainingData.open(folder)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, [Example(np.array([3, VOCAB_SIZE], np.int32), np.array([False, True]))])
    with pytest.raises(DataError, match="outside the vocabulary"):
        TrainingData.open(tmp_path)


def test_data_is_refused_for_another_target(tmp_path: Path) -> None:
    make(tmp_path, self_made=1)
    data = TrainingData.open(tmp_path)
    data.check_model(TARGET)
    data.check_model(tiny_target(cache_tokens=64, dtype=torch.bfloat16))  # the same model in another format
    renamed, other = tiny_target(cache_tokens=64), tiny_target(cache_tokens=64)
    renamed.info = replace(renamed.info, name="tiny-2")
    data.check_model(renamed)  # a model is not identified by its name, which depends on the path of the file
    other.parts().norm[0] += 1.0
    with pytest.raises(DataError, match="another model") as refusal:
        data.check_model(other)
    assert read_manifest(tmp_path).model["fingerprint"] in str(refusal.value)


# -- splits ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 3))
def test_a_split_takes_whole_prompts(owners: list[int], seed: int) -> None:
    owners = sorted(owners)
    data = data_of(texts([4] * len(owners)), owners)
    number = len(set(owners)) // 2
    train, validation = data.split(number, seed)
    assert len(train) + len(validation) == len(data)
    assert len(set(validation.prompts.tolist())) == number
    assert not set(validation.prompts.tolist()) & set(train.prompts.tolist())
    both = [*(train[place] for place in range(len(train))), *(validation[place] for place in range(len(validation)))]
    assert sorted(as_lists(both)) == sorted(as_lists([data[place] for place in range(len(data))]))
    again = data.split(number, seed)
    assert again[1].prompts.tolist() == validation.prompts.tolist()


def test_a_split_by_share_or_number() -> None:
    data = data_of(texts([4] * 40))
    assert [len(part) for part in data.split(0.1)] == [36, 4]
    assert [len(part) for part in data.split(0.001)] == [39, 1]  # a share is never empty
    assert [len(part) for part in data.split(5)] == [35, 5]
    assert [len(part) for part in data.split(0)] == [40, 0]
    assert data.split(5, seed=1)[1].prompts.tolist() != data.split(5, seed=2)[1].prompts.tolist()
    for wrong in (1.5, -1, 40, float("nan")):
        with pytest.raises(OptionError, match="held-out prompts is invalid"):
            data.split(wrong)


def test_several_folders_are_read_as_one(tmp_path: Path) -> None:
    lots = [texts([4, 6, 8], seed=1), texts([5, 7], seed=2)]
    folders = [stored(tmp_path / str(number), lot) for number, lot in enumerate(lots)]
    data = TrainingData.open(*folders)
    assert as_lists([data[place] for place in range(len(data))]) == as_lists([text for lot in lots for text in lot])
    assert data.prompts.tolist() == [0, 1, 2, 3, 4]
    data.check_model(TARGET)
    assert len(TrainingData.open(*folders, max_length=4)) == 4  # one text has no answer left


def test_shuffled_texts_of_several_folders_are_mixed(tmp_path: Path) -> None:
    folders = [stored(tmp_path / name, texts([length] * 8)) for name, length in (("one", 3), ("two", 5))]
    data = TrainingData.open(*folders)
    lengths = [len(text.token_ids) for text in data.shuffled(seed=1)]
    assert sorted(lengths) == data.lengths.tolist()
    assert set(lengths[:8]) == {3, 5}
    assert lengths == [len(text.token_ids) for text in data.shuffled(seed=1)]


def test_every_model_of_several_folders_is_checked(tmp_path: Path) -> None:
    folders = [
        stored(tmp_path / name, texts([4]), fingerprint=fingerprint)
        for name, fingerprint in (("one", None), ("two", "another"))
    ]
    with pytest.raises(DraftwoodError, match="two was written by another model"):
        TrainingData.open(*folders).check_model(TARGET)


def test_prompt_with_two_answers_stays_in_one_split(tmp_path: Path) -> None:
    asked = texts([6] * 12)
    answers = [Example(text.token_ids.copy(), text.answered) for text in asked]
    for answer in answers:
        answer.token_ids[3:] = 7
    data = TrainingData.open(stored(tmp_path / "greedy", asked), stored(tmp_path / "drawn", answers))
    train, validation = data.split(4)
    assert [len(train), len(validation)] == [16, 8]
    prompts = [{tuple(part.prompt_ids(i)) for i in range(len(part))} for part in (train, validation)]
    assert not prompts[0] & prompts[1]


def test_all_texts_of_prompt_with_two_answers_stay_in_one_split() -> None:
    """A chat template may make several texts of one conversation; those after the first start with its answer."""
    rng = np.random.default_rng(0)
    firsts = texts([6] * 12)
    owners, examples = [], []
    for prompt in range(24):
        second = Example(rng.integers(0, VOCAB_SIZE, 10).astype(np.int32), np.arange(10) >= 5)
        owners += [prompt] * 2
        examples += [firsts[prompt % 12], second]
    train, validation = data_of(examples, owners).split(4)
    assert [len(train), len(validation)] == [32, 16]
    assert not set(train.prompts.tolist()) & set(validation.prompts.tolist())
