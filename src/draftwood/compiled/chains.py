"""Chains of guesses for many texts in one call: the function of chains.h."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftwood.compiled.blend import CompiledBlend
from draftwood.compiled.core import Core
from draftwood.compiled.places import CompiledPlaces


def follow_texts(
    core: Core,
    blends: Sequence[CompiledBlend],
    texts: Sequence[CompiledPlaces],
    added: Sequence[npt.NDArray[np.int32]],
    max_tokens: int,
    min_value: float,
) -> list[tuple[list[int], list[float]]]:
    """Add tokens to texts, learn from them unless a text was empty, and return the chain of guesses after each text,
    with the chances of its paths."""
    count = len(texts)
    is_new = bytes(not len(text) for text in texts)
    for text, tokens in zip(texts, added, strict=True):
        text.reserve(len(tokens))
    starts = np.cumsum([0, *map(len, added)], dtype=np.int64)
    tokens_added = np.concatenate(added) if count else np.empty(0, np.int32)
    chains = np.empty((count, max_tokens), np.int32)
    values, sizes = np.empty((count, max_tokens)), np.empty(count, np.int64)
    blend_addresses = array("Q", [blend.address for blend in blends])
    text_addresses = array("Q", [text.address for text in texts])
    failed = core.follow_texts(
        count,
        blend_addresses.buffer_info()[0],
        text_addresses.buffer_info()[0],
        starts.ctypes.data,
        tokens_added.ctypes.data,
        is_new,
        max_tokens,
        min_value,
        *[result.ctypes.data for result in (chains, values, sizes)],
    )
    if failed:
        raise MemoryError("chains of guesses")
    rows = zip(chains.tolist(), values.tolist(), sizes.tolist(), strict=True)
    return [(chain[:size], own[:size]) for chain, own, size in rows]
