"""Reading training data: what is opened and what is refused, splits, batches, draft vocabularies."""

from __future__ import annotations

import json
from collections import Counter
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
from draftwood.heads.vocabulary import checked_vocabulary
from draftwood.target.tiny import EOS, VOCAB_SIZE, tiny_target
from draftwood.train.base import Batch, Example
from draftwood.train.data.manifest import Manifest, about_model, read_manifest, write_manifest
from draftwood.train.data.read import Folder, TrainingData
from draftwood.train.data.shards import DataError, Shard, read_shard, shard_name, write_shard
from draftwood.train.data.vocabulary import draft_vocabulary

from .train_data_tools import make

TARGET = tiny_target(cache_tokens=64)


def manifest_of(num_prompts: int, shard_size: int) -> Manifest:
    settings = {"shard_size": shard_size, "seed": 0}
    return Manifest(model=about_model(TARGET), settings=settings, sources=[], prompts=num_prompts, complete=True)


def texts(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    """Random ones; the second half of each was written by the target."""
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(0, VOCAB_SIZE, size).astype(np.int32), np.arange(size) >= size // 2) for size in lengths
    ]


def data_of(examples: Sequence[Example], prompts: Sequence[int] | None = None) -> TrainingData:
    owners = range(len(examples)) if prompts is None else prompts
    shard = Shard.of(list(zip(owners, examples, strict=True)), {})
    return TrainingData._joined(Folder(Path("texts"), manifest_of(len(examples), 10_000)), [shard])


def stored(folder: Path, examples: Sequence[Example], shard_size: int = 2, *, fingerprint: str | None = None) -> Path:
    manifest = manifest_of(len(examples), shard_size)
    if fingerprint:
        manifest.model["fingerprint"] = fingerprint
    for number in range(manifest.num_shards):
        begin = number * shard_size
        part = [(begin + place, example) for place, example in enumerate(examples[begin : begin + shard_size])]
        write_shard(folder / shard_name(number), Shard.of(part, {}), number, manifest.run_id)
    write_manifest(folder, manifest)
    return folder


def as_lists(examples: Sequence[Example]) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), answered.tolist()) for ids, answered in examples]


# -- opening ---------------------------------------------------------------------------------------------------------


def test_examples_come_back_in_order(tmp_path: Path) -> None:
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


def test_a_shard_without_texts_is_a_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "part", Shard.of([], {"too_long": 2}), 0, "run")
    shard = read_shard(tmp_path / "part", 0, "run")
    assert (shard.counts()["examples"], shard.lost) == (0, {"too_long": 2})


def test_long_texts_can_be_cut(tmp_path: Path) -> None:
    examples = texts([4, 20, 12])
    data = TrainingData.open(stored(tmp_path, examples), max_length=8)
    assert data.lengths.tolist() == [4, 8]  # of the longest nothing is left that the target wrote
    assert data.prompts.tolist() == [0, 2]
    assert as_lists([data[1]]) == [(examples[2].token_ids[:8].tolist(), examples[2].answered[:8].tolist())]
    written, occurring = data.token_counts()
    assert (written.sum(), occurring.sum()) == (2 + 2, 4 + 8)
    with pytest.raises(OptionError):
        TrainingData.open(tmp_path, max_length=0)


@pytest.mark.parametrize("place", [0.05, 0.5, 0.99])
def test_a_changed_byte_is_found(place: float, tmp_path: Path) -> None:
    part = stored(tmp_path, texts([50, 60])) / shard_name(0)
    content = bytearray(part.read_bytes())
    content[int(place * len(content))] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|another run"):
        TrainingData.open(tmp_path)


def test_parts_that_end_early_or_are_missing_are_refused(tmp_path: Path) -> None:
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


def test_parts_of_other_runs_and_places_are_refused(tmp_path: Path) -> None:
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
def test_shapes_are_checked_even_where_the_checksum_is_right(change: dict[str, Any], tmp_path: Path) -> None:
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


def test_what_is_no_training_data_is_refused(tmp_path: Path) -> None:
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


def test_only_the_target_that_wrote_the_data_trains_on_it(tmp_path: Path) -> None:
    make(tmp_path, self_made=1)
    data = TrainingData.open(tmp_path)
    data.check_model(TARGET)
    data.check_model(tiny_target(cache_tokens=64, dtype=torch.bfloat16))  # the same model in another format
    renamed, other = tiny_target(cache_tokens=64), tiny_target(cache_tokens=64)
    renamed.info = replace(renamed.info, name="tiny-2")
    data.check_model(renamed)  # a name, which a file takes from where it lies, is not what a model is known by
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
    assert [len(part) for part in data.split(0.001)] == [39, 1]  # a share is never nothing
    assert [len(part) for part in data.split(5)] == [35, 5]
    assert [len(part) for part in data.split(0)] == [40, 0]
    assert data.split(5, seed=1)[1].prompts.tolist() != data.split(5, seed=2)[1].prompts.tolist()
    for wrong in (1.5, -1, 40, float("nan")):
        with pytest.raises(OptionError, match="no part of the prompts"):
            data.split(wrong)


def test_several_folders_are_read_as_one(tmp_path: Path) -> None:
    lots = [texts([4, 6, 8], seed=1), texts([5, 7], seed=2)]
    folders = [stored(tmp_path / str(number), lot) for number, lot in enumerate(lots)]
    data = TrainingData.open(*folders)
    assert as_lists([data[place] for place in range(len(data))]) == as_lists([text for lot in lots for text in lot])
    assert data.prompts.tolist() == [0, 1, 2, 3, 4]
    data.check_model(TARGET)
    assert len(TrainingData.open(*folders, max_length=4)) == 4  # of one text no answer is left


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


def test_a_prompt_that_was_answered_twice_stays_on_one_side(tmp_path: Path) -> None:
    asked = texts([6] * 12)
    answers = [Example(text.token_ids.copy(), text.answered) for text in asked]
    for answer in answers:
        answer.token_ids[3:] = 7
    data = TrainingData.open(stored(tmp_path / "greedy", asked), stored(tmp_path / "drawn", answers))
    train, validation = data.split(4)
    assert [len(train), len(validation)] == [16, 8]
    prompts = [{tuple(part.prompt_ids(i)) for i in range(len(part))} for part in (train, validation)]
    assert not prompts[0] & prompts[1]


def test_all_texts_of_a_prompt_that_was_answered_twice_stay_on_one_side() -> None:
    """A chat template may make several texts of one conversation; those behind the first begin with its answer."""
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


# -- batches ---------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(LENGTHS, st.integers(60, 300), st.integers(0, 5), st.integers(0, 5))
def test_batches_have_every_text_once_and_no_more_than_fits(
    lengths: list[int], max_tokens: int, seed: int, epoch: int
) -> None:
    data = data_of(texts(lengths))
    batches = data.batches(max_tokens, seed=seed, epoch=epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in batches)
    assert batches == data.batches(max_tokens, seed=seed, epoch=epoch)
    assert batches[2:] == data.batches(max_tokens, seed=seed, epoch=epoch, start=2)


@given(LENGTHS, st.integers(1, 4))
def test_processes_take_the_same_batches_in_turns(lengths: list[int], world_size: int) -> None:
    data = data_of(texts(lengths))
    alone = data.batches(80, seed=1)
    shares = [data.batches(80, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    in_turns = [batch for step in zip(*shares, strict=True) for batch in step]
    assert in_turns == alone[: len(in_turns)]
    assert len(alone) - len(in_turns) < world_size


def test_epochs_and_seeds_shuffle_and_lengths_stay_together() -> None:
    lengths = list(range(10, 1000))  # no two alike: sorted by length alone they would always be batched in the same way
    data = data_of(texts(lengths))
    batches = data.batches(4000)
    others = [data.batches(4000, epoch=1), data.batches(4000, seed=1)]
    members = [{frozenset(batch) for batch in each} for each in (batches, *others)]
    assert len(members[0] & members[1]) < len(batches) / 10  # not the same batches in another order
    assert len(members[0] & members[2]) < len(batches) / 10
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert padded < 1.25 * sum(lengths)
    means = [np.mean([lengths[index] for index in batch]) for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # short ones do not all come first


def test_pools_keep_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.train.data.read.POOL", 7)
    data = data_of(texts([3] * 23))
    assert Counter(index for batch in data.batches(9) for index in batch) == Counter(range(23))


def test_batches_that_cannot_be_are_refused() -> None:
    data = data_of(texts([5, 50]))
    with pytest.raises(OptionError, match="no room for the longest text"):
        data.batches(49)
    with pytest.raises(OptionError, match="no such process"):
        data.batches(100, rank=2, world_size=2)
    train, nothing = data.split(0)
    assert nothing.batches(10) == []
    assert len(train.batches(50)) == 2


# -- draft vocabularies ----------------------------------------------------------------------------------------------


def counted_texts() -> list[Example]:
    """The target wrote 7 three times, 5 twice, 9 and 3 once; 3 is in the prompt too, as are many 100s."""
    ids = np.array([100, 100, 100, 100, 3, 7, 7, 7, 5, 5, 9, 3], np.int32)
    return [Example(ids, np.arange(len(ids)) >= 5)]


def test_the_draft_vocabulary_is_what_the_target_writes_most() -> None:
    data = data_of(counted_texts())
    assert draft_vocabulary(data, 2, VOCAB_SIZE).token_ids.tolist() == [5, 7]
    assert draft_vocabulary(data, 2, VOCAB_SIZE).coverage == pytest.approx(5 / 7)
    assert draft_vocabulary(data, 3, VOCAB_SIZE).token_ids.tolist() == [3, 5, 7]  # 3 before 9: it occurs more often
    found = draft_vocabulary(data, 3, VOCAB_SIZE, always=[EOS, 200, EOS])
    assert found.token_ids.tolist() == [7, 200, EOS]
    assert found.coverage == pytest.approx(3 / 7)
    assert draft_vocabulary(data, 6, VOCAB_SIZE).token_ids.tolist() == [0, 3, 5, 7, 9, 100]
    everything = draft_vocabulary(data, VOCAB_SIZE, VOCAB_SIZE)
    assert (everything.token_ids.tolist(), everything.coverage) == (list(range(VOCAB_SIZE)), 1.0)


def test_the_draft_vocabulary_counts_its_own_part_only() -> None:
    data = data_of([*counted_texts(), *texts([100])])
    alone = data._selected(np.array([0]))
    assert draft_vocabulary(alone, 2, VOCAB_SIZE).token_ids.tolist() == [5, 7]


@given(st.integers(1, VOCAB_SIZE), st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=5))
def test_no_other_vocabulary_of_that_size_covers_more(size: int, always: set[int]) -> None:
    data = data_of(texts([40, 60]))
    if size < len(always):
        with pytest.raises(OptionError, match="cannot have that size"):
            draft_vocabulary(data, size, VOCAB_SIZE, always)
        return
    token_ids, coverage = draft_vocabulary(data, size, VOCAB_SIZE, always)
    checked_vocabulary(torch.from_numpy(token_ids), size, VOCAB_SIZE)
    assert token_ids.tolist() == sorted(token_ids.tolist())
    assert always <= set(token_ids.tolist())
    written = Counter(token for ids, answered in (data[0], data[1]) for token in ids[answered].tolist())
    rest = sorted((count for token, count in written.items() if token not in always), reverse=True)
    best = sum(written[token] for token in always) + sum(rest[: size - len(always)])
    assert coverage == pytest.approx(best / written.total())


def test_vocabularies_that_cannot_be_are_refused() -> None:
    data = data_of(counted_texts())
    for size in (0, VOCAB_SIZE + 1):
        with pytest.raises(OptionError, match="cannot have that size"):
            draft_vocabulary(data, size, VOCAB_SIZE)
    with pytest.raises(OptionError, match="not in the vocabulary"):
        draft_vocabulary(data, 5, VOCAB_SIZE, [VOCAB_SIZE])
    with pytest.raises(OptionError, match="another vocabulary"):
        draft_vocabulary(data, 5, 1000)
