"""Finds requests again: vLLM tells the rows of a batch, which move, and not whose they are.

All that is kept about a request follows from its tokens. So a row belongs to any kept text that it continues: one with
the same last tokens at the same length. Rows usually stay where they are, so the text of the same row is tried first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.compiled import TAIL
from draftwood.vllm.chains import FollowedText, Follower
from draftwood.vllm.memory import BLOCK, OVERLAP, Memory

MAX_IDLE = 256  # steps after which a text that no row continued is dropped; it can be indexed again

Tokens = npt.NDArray[np.int32]


class Request:
    """One text, and how much of it is known."""

    __slots__ = ("length", "remembered", "seen", "tail", "text")

    def __init__(self, text: FollowedText) -> None:
        self.text = text
        self.length = 0
        self.tail = b""  # the last TAIL tokens
        self.remembered = 0  # tokens that are in the memory, or are the prompt
        self.seen = 0  # the step


class Row(NamedTuple):
    number: int
    request: Request
    added: Tokens


class Requests:
    def __init__(self, follower: Follower, memory: Memory | None) -> None:
        self._follower = follower
        self._memory = memory
        self._by_row: dict[int, Request] = {}
        self._by_end: dict[tuple[int, bytes], list[Request]] = {}  # by length and last tokens
        self._step = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    def read(self, rows: Iterator[tuple[int, int, Tokens]]) -> list[Row]:
        """For each row, with the number of its new tokens and all its tokens: its request, and what is new there."""
        self._step += 1
        found: list[Row] = []
        by_row: dict[int, Request] = {}
        moved: list[tuple[int, int, Tokens]] = []
        for number, count, tokens in rows:
            request = self._by_row.get(number)
            if request is not None and request.length >= request.remembered + BLOCK:
                self._remember(request)
            known = len(tokens) - count
            if request is not None and request.length == known and request.tail == _tail(tokens, known):
                found.append(self._continue(number, request, tokens))
                by_row[number] = request
            else:
                moved.append((number, count, tokens))
        for number, count, tokens in moved:
            known = len(tokens) - count
            kept = self._by_end.get((known, _tail(tokens, known)), ())
            request = next((one for one in kept if one.seen < self._step), None) or Request(self._follower.open())
            found.append(self._continue(number, request, tokens))
            by_row[number] = request
        for request in self._by_row.values():
            if request.seen < self._step:
                self._remember(request)  # it has probably ended
        self._by_row = by_row
        if self._step % BLOCK == 0:
            self._drop_idle()
        return found

    def _continue(self, number: int, request: Request, tokens: Tokens) -> Row:
        if request.length:
            self._forget(request)
        added = tokens[request.length :]
        if not request.length:
            request.remembered = len(tokens)
        request.length, request.tail, request.seen = len(tokens), _tail(tokens, len(tokens)), self._step
        self._by_end.setdefault((request.length, request.tail), []).append(request)
        return Row(number, request, added)

    def _remember(self, request: Request) -> None:
        """Add the part of its answer that is not in the memory yet."""
        new = request.length - request.remembered
        if self._memory is not None and new:
            self._memory.add(request.text.places.index.last(min(new + OVERLAP, request.length)))
            request.remembered = request.length

    def _forget(self, request: Request) -> None:
        key = request.length, request.tail
        self._by_end[key].remove(request)
        if not self._by_end[key]:
            del self._by_end[key]

    def _drop_idle(self) -> None:
        idle = [
            request
            for requests in self._by_end.values()
            for request in requests
            if request.seen <= self._step - MAX_IDLE
        ]
        for request in idle:
            self._forget(request)


def _tail(tokens: Tokens, length: int) -> bytes:
    return tokens[max(length - TAIL, 0) : length].tobytes()
