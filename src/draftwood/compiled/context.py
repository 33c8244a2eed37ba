"""The n-gram index of a text in C: owns its memory and calls the functions of context.h."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_void_p

import numpy as np

from draftwood.compiled.core import Core
from draftwood.compiled.outcomes import Outcomes

MAX_SIZES = 8  # as in context.h
FIRST_TOKENS = 1024


class _ContextRecord(ctypes.Structure):
    _fields_ = (
        ("size", c_int64),
        ("tokens", c_void_p),
        ("num_sizes", c_int64),
        ("sizes", c_int64 * MAX_SIZES),
        ("bits", c_int64),
        ("slots", c_void_p),
    )


class CompiledContext:
    """Maps each n-gram of a text to the place after its latest occurrence."""

    def __init__(self, core: Core, sizes: Sequence[int]) -> None:
        """``sizes``: of n-grams, longest first, at most ``MAX_SIZES``."""
        self.core = core
        self.size = 0
        self._capacity = 0
        self._record = _ContextRecord(num_sizes=len(sizes), sizes=tuple(sizes))
        self.address = ctypes.addressof(self._record)
        self._tokens = np.empty(0, np.int32)

    def last(self) -> int:
        return int(self._tokens[self.size - 1])

    def tokens(self) -> list[int]:
        text: list[int] = self._tokens[: self.size].tolist()
        return text

    def extend(self, tokens: Iterable[int]) -> None:
        text = array("i", tokens)
        self.reserve(len(text))
        memory = array("q", [self.address]), array("q", [len(text)]), text
        self.core.extend_contexts(1, *[part.buffer_info()[0] for part in memory])

    def match(self, limit: int, *, repeat: bool) -> tuple[list[int], int, int, int] | None:
        """What followed the last tokens before; how many matched, how many sizes agree, from how many places."""
        match, tokens = array("q", bytes(32)), array("i", bytes(4 * max(limit, 0)))
        size = self.core.match(self.address, limit, repeat, match.buffer_info()[0], tokens.buffer_info()[0])
        length, _, num_agreeing, num_places = match
        return (tokens[:size].tolist(), length, num_agreeing, num_places) if length else None

    def reserve(self, more: int) -> None:
        """Counts ``more`` tokens, which are added next, and reserves memory: at least two slots per token."""
        self.size += more
        if self.size > self._capacity:
            self._capacity = capacity = max(self.size, 2 * self._capacity, FIRST_TOKENS)
            self._tokens = np.resize(self._tokens, capacity)
            record, bits = self._record, (2 * capacity - 1).bit_length()
            self._slots = np.zeros((record.num_sizes, 1 << bits), np.int32)
            record.tokens, record.slots, record.bits = self._tokens.ctypes.data, self._slots.ctypes.data, bits
            self.core.index_context(self.address)


def extend_contexts(contexts: Sequence[CompiledContext], outcomes: Outcomes) -> None:
    """Adds the emitted tokens to the text of each request, in one call."""
    for context, emitted in zip(contexts, outcomes.emitted, strict=True):
        context.reserve(len(emitted))
    addresses = array("q", [context.address for context in contexts])
    contexts[0].core.extend_contexts(len(contexts), addresses.buffer_info()[0], *outcomes.memory.arguments[3:])
