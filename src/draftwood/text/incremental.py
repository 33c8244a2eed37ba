"""Token ids to text while they arrive, one accepted block after another."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.text.tokenizer import TextCodec

REPLACEMENT = "\ufffd"
MAX_PENDING = 3  # tokens or characters: an unfinished character lacks at least one of its at most four bytes


class IncrementalDecoder:
    """Gives out text as soon as it is certain.

    The text of a token can depend on the ones before it, so a window is decoded that begins with tokens whose text was
    given out already. An unfinished character shows as replacement characters at the end: they are held back until it
    is complete, or until there are too many of them for one character.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0  # the window begins here
        self._done = 0  # tokens before this one left nothing unfinished
        self._given = 0  # characters of the window's text that were given out
        self._texts: dict[tuple[int, ...], str] = {}  # of short windows that were there before

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often one word piece, sometimes nothing."""
        self._ids.append(token_id)
        text = self._text_of(self._start)
        pending = len(text) - len(text.rstrip(REPLACEMENT))
        if not pending:
            return self._give_all(text)
        if len(self._ids) - self._done <= MAX_PENDING:
            return ""
        certain = max(self._given, len(text) - min(pending, MAX_PENDING))
        piece, self._given = text[self._given : certain], certain
        return piece

    def flush(self) -> str:
        """What is still held back, as it stands."""
        return self._give_all(self._text_of(self._start))

    def _give_all(self, text: str) -> str:
        piece = text[self._given :]
        self._start, self._done = self._done, len(self._ids)
        self._given = len(self._text_of(self._start))
        return piece

    def _text_of(self, start: int) -> str:
        """Of the tokens from ``start`` on: one or two, nearly always, and in a text that says things again often the
        same."""
        ids = tuple(self._ids[start:])
        if len(ids) > 2:
            return self._codec.decode(ids)
        text = self._texts.get(ids)
        if text is None:
            text = self._texts[ids] = self._codec.decode(ids)
        return text


def decode_all(codec: TextCodec, ids: Sequence[int]) -> str:
    """The text a whole sequence of tokens has when it is decoded piece by piece."""
    decoder = IncrementalDecoder(codec)
    return "".join([decoder.push(i) for i in ids] + [decoder.flush()])
