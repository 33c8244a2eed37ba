"""Decodes token ids to text incrementally, as they are generated."""

from draftwood.text.tokenizer import TextCodec

REPLACEMENT = "\ufffd"
MAX_PENDING = 3  # tokens or characters: an unfinished character lacks at least one of its at most four bytes


class IncrementalDecoder:
    """Returns text as soon as it is final.

    The text of a token can depend on the tokens before it, so the decoded window starts with tokens whose text was
    already returned. An incomplete character shows as replacement characters at the end. They are held back until the
    character is complete, or until there are too many of them for one character.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0  # start of the window
        self._done = 0  # tokens before this one are complete
        self._returned = 0  # characters of the window that were returned
        self._texts: dict[tuple[int, ...], str] = {}  # by ids, of short windows

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became final; it may be empty."""
        self._ids.append(token_id)
        text = self._decode_from(self._start)
        pending = len(text) - len(text.rstrip(REPLACEMENT))
        if not pending:
            return self._return_all(text)
        if len(self._ids) - self._done <= MAX_PENDING:
            return ""
        final = max(self._returned, len(text) - min(pending, MAX_PENDING))
        piece, self._returned = text[self._returned : final], final
        return piece

    def flush(self) -> str:
        """Returns the text that is still held back."""
        return self._return_all(self._decode_from(self._start))

    def _return_all(self, text: str) -> str:
        piece = text[self._returned :]
        self._start, self._done = self._done, len(self._ids)
        self._returned = len(self._decode_from(self._start))
        return piece

    def _decode_from(self, start: int) -> str:
        """Decodes the tokens from ``start`` on. They are usually one or two, and repeat, so their texts are cached."""
        ids = tuple(self._ids[start:])
        if len(ids) > 2:
            return self._codec.decode(ids)
        text = self._texts.get(ids)
        if text is None:
            text = self._texts[ids] = self._codec.decode(ids)
        return text
