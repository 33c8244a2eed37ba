"""Small datastores for the tests."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.sources.datastore import Datastore, build_datastore

VOCAB = 4


def store_of(corpus: Sequence[Sequence[int]], vocab_size: int = VOCAB) -> Datastore:
    return build_datastore(corpus, vocab_size=vocab_size, tokenizer="abc", sources=["x.txt", "y"])
