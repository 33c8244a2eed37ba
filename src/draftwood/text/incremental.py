"""Decodes token ids to text incrementally, as they are generated."""

from weakref import WeakKeyDictionary

from draftwood.text.tokenizer import TextCodec

REPLACEMENT = "\ufffd"
MAX_PENDING = 3  # tokens or characters: an unfinished character lacks at least one of its at most four bytes


# By a token and the next one, both complete: the text that the next one adds, and the length of its own text.
Pieces = dict[tuple[int, int], tuple[str, int]]
_PIECES: WeakKeyDictionary[TextCodec, Pieces] = WeakKeyDictionary()
MAX_PIECES = 1 << 17


def _pieces_of(codec: TextCodec) -> Pieces:
    """What all decoders of a codec share."""
    try:
        return _PIECES.setdefault(codec, {})
    except TypeError:  # it cannot be referred to weakly, or has no hash
        return {}


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
        self._pieces = _pieces_of(codec)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became final; it may be empty."""
        ids = self._ids
        ids.append(token_id)
        is_pair = self._start + 2 == self._done + 1 == len(ids)  # the window is a complete token and this one
        if is_pair and (known := self._pieces.get((ids[-2], token_id))) is not None:
            self._start, self._done = self._done, len(ids)
            piece, self._returned = known
            return piece
        text = self._decode_from(self._start)
        pending = len(text) - len(text.rstrip(REPLACEMENT))
        if not pending:
            piece = self._return_all(text)
            if is_pair:
                if len(self._pieces) >= MAX_PIECES:
                    self._pieces.clear()
                self._pieces[ids[-2], token_id] = piece, self._returned
            return piece
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
