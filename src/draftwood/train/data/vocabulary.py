"""The draft vocabulary: the tokens that the target generates most often."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.errors import OptionError
from draftwood.train.data.read import TrainingData


class DraftVocabulary(NamedTuple):
    token_ids: npt.NDArray[np.int64]  # [size] ascending
    coverage: float  # fraction of the generated tokens that are in it


def draft_vocabulary(data: TrainingData, size: int, vocab_size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """Return the ``size`` most frequent generated tokens, including those of ``always`` (end-of-turn tokens).

    Ties go to tokens that occur more often in prompts, then to lower ids.
    """
    kept = np.unique(np.fromiter(always, dtype=np.int64))
    _check(data, size, vocab_size, kept)
    written, occurring = data.token_counts()
    is_other = np.ones(vocab_size, dtype=np.bool_)
    is_other[kept] = False
    # The last key is the primary one; the sort is stable.
    order = np.lexsort((-occurring, -written, is_other))
    token_ids = np.sort(order[:size])
    return DraftVocabulary(token_ids, float(written[token_ids].sum() / max(1, written.sum())))


def _check(data: TrainingData, size: int, vocab_size: int, kept: npt.NDArray[np.int64]) -> None:
    if vocab_size != data.vocab_size:
        raise OptionError("The texts have another vocabulary", got=vocab_size, allowed=data.vocab_size)
    if kept.size and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise OptionError(
            "A token to keep is not in the vocabulary", got=f"{kept[0]} to {kept[-1]}", allowed=f"0 to {vocab_size - 1}"
        )
    if not max(1, len(kept)) <= size <= vocab_size:
        raise OptionError(
            "The size of the draft vocabulary is invalid",
            got=f"head.draft_vocab_size = {size}",
            allowed=f"{max(1, len(kept))} to {vocab_size}",
        )
