"""Batches of training data: every text once, as many as fit, the same for any number of processes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import OptionError
from tests.tools.train_data_store import data_of, texts

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(LENGTHS, st.integers(60, 300), st.integers(0, 5), st.integers(0, 5))
def test_batches_contain_every_text_once_and_fit(lengths: list[int], max_tokens: int, seed: int, epoch: int) -> None:
    data = data_of(texts(lengths))
    batches = data.batches(max_tokens, seed=seed, epoch=epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in batches)
    assert batches == data.batches(max_tokens, seed=seed, epoch=epoch)
    assert batches[2:] == data.batches(max_tokens, seed=seed, epoch=epoch, start=2)


@given(LENGTHS, st.integers(1, 4))
def test_processes_alternate_over_the_same_batches(lengths: list[int], world_size: int) -> None:
    data = data_of(texts(lengths))
    alone = data.batches(80, seed=1)
    shares = [data.batches(80, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    in_turns = [batch for step in zip(*shares, strict=True) for batch in step]
    assert in_turns == alone[: len(in_turns)]
    assert len(alone) - len(in_turns) < world_size


def test_epochs_and_seeds_shuffle_and_lengths_stay_together() -> None:
    lengths = list(range(10, 1000))  # all different: sorted only by length, batches would always be the same
    data = data_of(texts(lengths))
    batches = data.batches(4000)
    others = [data.batches(4000, epoch=1), data.batches(4000, seed=1)]
    members = [{frozenset(batch) for batch in each} for each in (batches, *others)]
    assert len(members[0] & members[1]) < len(batches) / 10  # not the same batches in another order
    assert len(members[0] & members[2]) < len(batches) / 10
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert padded < 1.25 * sum(lengths)
    means = [np.mean([lengths[index] for index in batch]) for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # short ones are not all first


def test_pools_keep_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.train.data.read.POOL", 7)
    data = data_of(texts([3] * 23))
    assert Counter(index for batch in data.batches(9) for index in batch) == Counter(range(23))


def test_impossible_batches_are_refused() -> None:
    data = data_of(texts([5, 50]))
    with pytest.raises(OptionError, match="longest text does not fit"):
        data.batches(49)
    with pytest.raises(OptionError, match="rank is out of range"):
        data.batches(100, rank=2, world_size=2)
    train, nothing = data.split(0)
    assert nothing.batches(10) == []
    assert len(train.batches(50)) == 2
