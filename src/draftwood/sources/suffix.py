"""Suffix match: the longest suffix of the text that occurred before, in the text itself or in a corpus.

A suffix automaton is a graph in which every substring of a text is a path from state 0. Substrings that end at the same
positions share a state; the *link* of a state leads to its longest suffix that occurs at more positions. Therefore:

- The longest suffix of the text that occurred before is the link of the last state; no second walk is needed.
- Reading another text along a finished automaton keeps the longest match by following links when there is no edge.

Both take amortised constant time per token, whatever the length of the match or the text. On English and code with a
vocabulary of 49,000 there are 1.4 to 1.6 states per token (at most 2), and 110 to 125 bytes per token while the
automaton grows, 55 once it is finished.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood.errors import OptionError
from draftwood.sources.context import Match
from draftwood.sources.datastore import Datastore
from draftwood.sources.suffix_array import SEPARATOR

MAX_CORPUS_TOKENS = 1_000_000  # about 270 MB and 7 seconds to build the automaton, 55 MB afterwards
MAX_REFRESHED = 32  # links along which the latest position is updated

OWN_SOURCE = "suffix"
CORPUS_SOURCE = "corpus"

_NO_EDGE = -2

Int32Array = npt.NDArray[np.int32]


class SuffixSource:
    """The longest match in the text itself or in a corpus; ``extend`` it with every committed token.

    The match in the text is used unless it is shorter than ``min_match`` or the match in the corpus is longer by more
    than ``static_bias`` tokens.
    """

    def __init__(self, corpus: CorpusAutomaton | None = None, *, min_match: int = 1, static_bias: int = 5) -> None:
        self._own = SuffixAutomaton()
        self._cursor = corpus.cursor() if corpus is not None else None
        self._min_match = min_match
        self._static_bias = static_bias

    @property
    def tokens(self) -> Sequence[int]:
        return self._own.tokens

    @property
    def matched(self) -> int:
        """Length of the match that ``match`` continues; 0 if there is none."""
        matched = self._select().matched
        return matched if matched >= self._min_match else 0

    @property
    def source(self) -> str:
        """Source name of that match."""
        return OWN_SOURCE if self._select() is self._own else CORPUS_SOURCE

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        if self._cursor is not None:
            self._cursor.extend(tokens)

    def match(self, max_tokens: int) -> Match | None:
        preferred = self._select()
        return preferred.match(max_tokens) if preferred.matched >= self._min_match else None

    def _select(self) -> SuffixAutomaton | CorpusCursor:
        own, cursor = self._own, self._cursor
        if cursor is None:
            return own
        bias = self._static_bias if own.matched >= self._min_match else 0
        return cursor if cursor.matched > own.matched + bias else own


class SuffixAutomaton:
    """Suffix automaton of one text; ``extend`` it with every committed token.

    If a match occurred several times, the latest occurrence is continued. All states along the links of the last one
    occur at the end of the text; their positions are updated for ``MAX_REFRESHED`` links, longest match first. Ordinary
    text has fewer than ten. A long run of one short pattern has as many as repetitions: there a short match may later
    point to the beginning of the run instead of its end.
    """

    def __init__(self) -> None:
        self._states = _States()
        self._tokens: list[int] = []
        self._next = 0  # index of the token after the earlier occurrence of the match

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def matched(self) -> int:
        """Length of the longest suffix that occurred before."""
        states = self._states
        return states.lengths[max(states.links[states.last], 0)]

    def extend(self, tokens: Iterable[int]) -> None:
        states = self._states
        links, ends = states.links, states.ends
        for token in tokens:
            states.append(token)
            self._tokens.append(token)
            end, state = len(self._tokens), links[states.last]
            self._next = ends[state]
            for _ in range(MAX_REFRESHED):
                if state == 0:
                    break
                ends[state] = end
                state = links[state]

    def match(self, max_tokens: int) -> Match | None:
        """The continuation of the longest suffix that occurred before.

        If the two occurrences touch or overlap, the text repeats itself, and so does the continuation.
        """
        length = self.matched
        if length == 0:
            return None
        period = len(self._tokens) - self._next
        tokens = self._tokens[self._next : self._next + max_tokens]
        if length >= period and len(tokens) < max_tokens:
            tokens = (tokens * (max_tokens // period + 1))[:max_tokens]
        return Match(tokens, length)


class CorpusAutomaton:
    """A finished automaton over separate documents; any number of cursors can walk it.

    A continuation takes the most frequent next token at the positions of the match, then the most frequent token after
    that at the remaining positions, and so on; ties go to the token that occurs latest.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        """``tokens`` are the concatenated documents with ``SEPARATOR`` between them."""
        states = _States()
        for token in tokens:
            states.append(token)
        self.lengths, self.links = states.lengths, states.links
        size = len(states.lengths)
        order = _ints(np.argsort(states.lengths, kind="stable"))  # a state comes after its link
        counts = np.array(_count_occurrences(states, order))  # [S]
        ends = np.array(states.ends)
        starts, tokens_read, after = states.edges()  # [E]
        by_token = np.lexsort((tokens_read, starts))
        # The edges of a state are adjacent, sorted by token.
        self._first_edge = _ints(np.searchsorted(starts[by_token], np.arange(size + 1)))
        self._edge_tokens, self._edge_states = _ints(tokens_read[by_token]), _ints(after[by_token])
        inside = np.flatnonzero(tokens_read != SEPARATOR)
        best_last = inside[np.lexsort((ends[after[inside]], counts[after[inside]], starts[inside]))]
        self.next_token = _ints(_last_of_each(starts[best_last], tokens_read[best_last], size, SEPARATOR))
        self.next_state = _ints(_last_of_each(starts[best_last], after[best_last], size, 0))
        # The longest suffix of a state that is followed by a token: ends of documents predict nothing.
        self.continued = array("i", range(size))
        for state in order[1:]:
            if self.next_token[state] == SEPARATOR:
                self.continued[state] = self.continued[self.links[state]]

    def cursor(self) -> CorpusCursor:
        return CorpusCursor(self)

    def after(self, state: int, token: int) -> int | None:
        begin, end = self._first_edge[state], self._first_edge[state + 1]
        place = bisect_left(self._edge_tokens, token, begin, end)
        return self._edge_states[place] if place < end and self._edge_tokens[place] == token else None


class CorpusCursor:
    """Position of a text in a corpus: the longest suffix that occurs there."""

    def __init__(self, corpus: CorpusAutomaton) -> None:
        self._corpus = corpus
        self._state = 0
        self._length = 0

    @property
    def matched(self) -> int:
        """Length of the longest suffix that occurs in the corpus and is followed by a token."""
        corpus, state = self._corpus, self._state
        continued = corpus.continued[state]
        return self._length if continued == state else corpus.lengths[continued]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.advance(token)

    def advance(self, token: int) -> None:
        corpus = self._corpus
        state = self._state
        after = corpus.after(state, token)
        while after is None and state != 0:
            state = corpus.links[state]
            self._length = corpus.lengths[state]
            after = corpus.after(state, token)
        if after is not None:
            self._length += 1
        self._state = after or 0

    def match(self, max_tokens: int) -> Match | None:
        """The most frequent continuation of the longest suffix that has one, up to the end of a document."""
        length = self.matched
        if length == 0:
            return None
        corpus = self._corpus
        tokens: list[int] = []
        state = corpus.continued[self._state]
        while len(tokens) < max_tokens and corpus.next_token[state] != SEPARATOR:
            tokens.append(corpus.next_token[state])
            state = corpus.next_state[state]
        return Match(tokens, length)


def load_corpus(path: str | Path, vocab_size: int) -> Int32Array:
    """Load token ids, ``SEPARATOR`` between documents, from a datastore or a ``.npy`` array of integers."""
    what = "The corpus cannot be used"
    allowed = f"a datastore, or a .npy file with a row of token ids, {SEPARATOR} between documents"
    if Path(path).suffix == ".npy":
        tokens = _open_array(path, what, allowed)
    else:
        tokens = Datastore.open(path, vocab_size=vocab_size).tokens
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise OptionError(what, got=f"{path}: {tokens.dtype} of shape {tokens.shape}", allowed=allowed)
    if not 1 <= len(tokens) <= MAX_CORPUS_TOKENS:
        raise OptionError(
            what,
            got=f"{path}: {len(tokens):,} tokens",
            allowed=f"1 to {MAX_CORPUS_TOKENS:,} tokens",
            next_step="The drafter 'rest' takes larger ones, as a datastore." if len(tokens) else None,
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < SEPARATOR or highest >= vocab_size:
        raise OptionError(
            what,
            got=f"{path}: token ids from {lowest} to {highest}",
            allowed=f"{SEPARATOR} to {vocab_size - 1}, the vocabulary of the model",
            next_step="Make the corpus with the tokenizer of this model.",
        )
    return np.asarray(tokens, dtype=np.int32)


def _open_array(path: str | Path, what: str, allowed: str) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as error:
        raise OptionError(what, got=f"{path}: there is no such file", allowed=allowed) from error
    except OSError as error:
        raise OptionError(what, got=error, allowed=allowed) from error
    except ValueError as error:
        raise OptionError(what, got=f"{path}: not a whole array of numbers", allowed=allowed) from error
    return array


class _States:
    """The growing graph. Most states have one edge, so the first edge is stored in arrays and only further ones in
    dicts; compared with a dict per state, this takes a third of the memory and a third more time."""

    def __init__(self) -> None:
        self.lengths = array("i", [0])  # length of the longest string of a state
        self.links = array("i", [-1])
        self.ends = array("i", [0])  # number of tokens read where the strings of a state end
        self.last = 0  # the state of the whole text
        self._tokens = array("i", [_NO_EDGE])  # first edge
        self._after = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}  # further edges

    def append(self, token: int) -> None:
        """Append a token. Amortised constant time: every visited edge is created or shortens the links."""
        lengths, links = self.lengths, self.links
        length = lengths[self.last] + 1
        new = self._add(length, end=length)
        state, after = self.last, None
        while state >= 0:
            after = self.after(state, token)
            if after is not None:
                break
            self._connect(state, token, new)
            state = links[state]
        self.last = new
        if after is None:
            links[new] = 0
        elif lengths[state] + 1 == lengths[after]:
            links[new] = after
        else:
            links[new] = self._split(state, token, after)

    def after(self, state: int, token: int) -> int | None:
        if self._tokens[state] == token:
            return self._after[state]
        more = self._more.get(state)
        return more.get(token) if more else None

    def edges(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """All edges: start states, tokens, end states."""
        first = np.flatnonzero(np.array(self._tokens) != _NO_EDGE).astype(np.int32)
        starts, tokens, after = array("i"), array("i"), array("i")
        for state, more in self._more.items():
            starts.extend([state] * len(more))
            tokens.extend(more)
            after.extend(more.values())
        return (
            np.concatenate((first, np.array(starts))),
            np.concatenate((np.array(self._tokens)[first], np.array(tokens))),
            np.concatenate((np.array(self._after)[first], np.array(after))),
        )

    def _split(self, state: int, token: int, after: int) -> int:
        """Move the shorter strings of ``after``, which now end at one more position, to a new state."""
        links = self.links
        short = self._add(self.lengths[state] + 1, end=self.ends[after])
        self._tokens[short], self._after[short] = self._tokens[after], self._after[after]
        if after in self._more:
            self._more[short] = self._more[after].copy()
        while state >= 0 and self.after(state, token) == after:
            self._connect(state, token, short)
            state = links[state]
        links[short], links[after] = links[after], short
        return short

    def _add(self, length: int, end: int) -> int:
        self.lengths.append(length)
        self.links.append(0)
        self.ends.append(end)
        self._tokens.append(_NO_EDGE)
        self._after.append(0)
        return len(self.lengths) - 1

    def _connect(self, state: int, token: int, after: int) -> None:
        first = self._tokens[state]
        if first == token:
            self._after[state] = after
        elif first == _NO_EDGE:
            self._tokens[state], self._after[state] = token, after
        else:
            self._more.setdefault(state, {})[token] = after


def _count_occurrences(states: _States, order: Sequence[int]) -> array[int]:
    """Count the occurrences of each state's strings; also sets ``ends`` to their latest positions."""
    lengths, links, ends = states.lengths, states.links, states.ends
    # States created by a token end at their own length; states that were split off end later.
    counts = array("i", (length == end for length, end in zip(lengths, ends, strict=True)))
    for state in reversed(order[1:]):
        link = links[state]
        counts[link] += counts[state]
        ends[link] = max(ends[link], ends[state])
    return counts


def _last_of_each(keys: Int32Array, values: Int32Array, size: int, missing: int) -> Int32Array:
    """For every key below ``size`` its last value."""
    found = np.full(size, missing, np.int32)
    found[keys] = values
    return found


def _ints(values: npt.NDArray[Any]) -> array[int]:
    """An ``array`` of ints, which reads single elements several times faster than numpy."""
    return array("i", values.astype(np.int32).tobytes())
