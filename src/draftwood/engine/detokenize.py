"""Token ids to text while they arrive, one accepted block after another."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.target.tokenizer import TextCodec

REPLACEMENT = "\ufffd"
MAX_HELD = 8  # tokens; a character has at most 4 bytes, so a longer wait means the bytes are no text at all


class IncrementalDecoder:
    """Gives out text as soon as it is certain.

    The text of a token can depend on the ones before it, so a window of the last tokens is decoded with and without the
    new one. An unfinished character is held back until its last byte, or until it can no longer become one.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0  # window begins here: context that was given out already
        self._done = 0  # tokens whose text was given out
        self._texts: dict[int, str] = {}  # of single tokens

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often one word piece, sometimes nothing."""
        self._ids.append(token_id)
        before, text = self._window()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._done < MAX_HELD:
            return ""
        return self._give(before, text)

    def flush(self) -> str:
        """What is still held back, as it stands."""
        return self._give(*self._window())

    def _window(self) -> tuple[str, str]:
        before = self._ids[self._start : self._done]
        return self._text_of(before), self._codec.decode(self._ids[self._start :])

    def _text_of(self, ids: list[int]) -> str:
        """Nearly always a single token, and often one that was there before."""
        if len(ids) != 1:
            return self._codec.decode(ids)
        if ids[0] not in self._texts:
            self._texts[ids[0]] = self._codec.decode(ids)
        return self._texts[ids[0]]

    def _give(self, before: str, text: str) -> str:
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]


def decode_all(codec: TextCodec, ids: Sequence[int]) -> str:
    """The text a whole sequence of tokens has when it is decoded piece by piece."""
    decoder = IncrementalDecoder(codec)
    return "".join([decoder.push(i) for i in ids] + [decoder.flush()])
