"""Chains of guesses after many growing texts.

Every text has an index of its own; further sources, and what is learned about all of them, are shared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.compiled import TAIL, CompiledBlend, CompiledPlaces, HintSource, follow_texts, load_core
from draftwood.growth import PythonBlend, new_blend, new_learned
from draftwood.sources import PlaceHints

Tokens = npt.NDArray[np.int32]


class FollowedText(NamedTuple):
    places: PlaceHints
    blend: PythonBlend | CompiledBlend
    tail: list[int]  # its last tokens, where there is no compiler


class Chain(NamedTuple):
    tokens: list[int]
    values: list[float]  # the chance that it is right up to this token


class Follower:
    """Reads texts as they grow, and guesses what follows each of them."""

    def __init__(self, shared: Sequence[HintSource] = ()) -> None:
        self._shared = shared
        self._learned = new_learned([PlaceHints(), *shared])

    def open(self) -> FollowedText:
        places = PlaceHints()
        return FollowedText(places, new_blend([places, *self._shared], self._learned), [])

    def follow(
        self, texts: Sequence[FollowedText], added: Sequence[Tokens], max_tokens: int, min_value: float
    ) -> list[Chain]:
        """Add tokens to each text, and return the likeliest chain after it: at most ``max_tokens`` tokens, and only
        while the chance of the whole path is at least ``min_value``.

        A chain may be empty. What is added to a text for the first time is not learned from: it is a prompt.
        """
        core = load_core()
        if core is None:
            return [Chain(*_follow(*pair, max_tokens, min_value)) for pair in zip(texts, added, strict=True)]
        blends = [text.blend for text in texts if isinstance(text.blend, CompiledBlend)]
        places = [text.places.index for text in texts if isinstance(text.places.index, CompiledPlaces)]
        return [Chain(*found) for found in follow_texts(core, blends, places, added, max_tokens, min_value)]


def _follow(text: FollowedText, added: Tokens, max_tokens: int, min_value: float) -> tuple[list[int], list[float]]:
    """The same steps in Python."""
    blend, tokens = text.blend, added.tolist()
    assert isinstance(blend, PythonBlend)
    if text.tail:
        blend.learn(text.tail, tokens)
    text.places.extend(tokens)
    text.tail[:] = [*text.tail, *tokens][-TAIL:]
    return blend.chain(text.tail, max_tokens, min_value)
