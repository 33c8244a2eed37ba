"""Draft vocabularies: the most frequent tokens of the target."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import OptionError
from draftwood.heads.vocabulary import check_vocabulary
from draftwood.text.bytes import EOS, VOCAB_SIZE
from draftwood.train.base import Example
from draftwood.train.data.vocabulary import draft_vocabulary
from tests.tools.train_data_store import data_of, texts


def counted_texts() -> list[Example]:
    """The target wrote 7 three times, 5 twice, 9 and 3 once; 3 is in the prompt too, as are many 100s."""
    ids = np.array([100, 100, 100, 100, 3, 7, 7, 7, 5, 5, 9, 3], np.int32)
    return [Example(ids, np.arange(len(ids)) >= 5)]


def test_draft_vocabulary_has_most_frequent_target_tokens() -> None:
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


def test_draft_vocabulary_counts_selected_texts_only() -> None:
    data = data_of([*counted_texts(), *texts([100])])
    alone = data._select(np.array([0]))
    assert draft_vocabulary(alone, 2, VOCAB_SIZE).token_ids.tolist() == [5, 7]


@given(st.integers(1, VOCAB_SIZE), st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=5))
def test_draft_vocabulary_has_maximal_coverage(size: int, always: set[int]) -> None:
    data = data_of(texts([40, 60]))
    if size < len(always):
        with pytest.raises(OptionError, match="size of the draft vocabulary is invalid"):
            draft_vocabulary(data, size, VOCAB_SIZE, always)
        return
    token_ids, coverage = draft_vocabulary(data, size, VOCAB_SIZE, always)
    check_vocabulary(torch.from_numpy(token_ids), size, VOCAB_SIZE)
    assert token_ids.tolist() == sorted(token_ids.tolist())
    assert always <= set(token_ids.tolist())
    written = Counter(token for ids, answered in (data[0], data[1]) for token in ids[answered].tolist())
    rest = sorted((count for token, count in written.items() if token not in always), reverse=True)
    best = sum(written[token] for token in always) + sum(rest[: size - len(always)])
    assert coverage == pytest.approx(best / written.total())


def test_invalid_vocabularies_are_refused() -> None:
    data = data_of(counted_texts())
    for size in (0, VOCAB_SIZE + 1):
        with pytest.raises(OptionError, match="size of the draft vocabulary is invalid"):
            draft_vocabulary(data, size, VOCAB_SIZE)
    with pytest.raises(OptionError, match="not in the vocabulary"):
        draft_vocabulary(data, 5, VOCAB_SIZE, [VOCAB_SIZE])
    with pytest.raises(OptionError, match="another vocabulary"):
        draft_vocabulary(data, 5, 1000)
