"""A datastore: a tokenised corpus with its suffix array, in one memory-mapped file.

The file is a safetensors file with two tensors, ``tokens`` (every document ends with a separator) and ``suffixes``, and
metadata about their origin. Opening it maps the file and checks a few entries; a query is a binary search.

    build_datastore(documents, vocab_size=..., tokenizer=tokenizer_fingerprint(codec)).save(path)
    store = Datastore.open(path, vocab_size=49152)
    match = store.matches(context[-16:])            # the longest suffix of the context that occurs in the corpus
    rows = store.continuations(match, 10, 256)      # [m, 10], what followed there
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from draftwood.display import readable_size
from draftwood.progress import Progress, report
from draftwood.sources.datastore_file import DatastoreError, MappedDatastore, damaged, map_file, write_file
from draftwood.sources.suffix_array import BYTES_PER_TOKEN, MAX_TOKENS, SEPARATOR, Int32Array, suffix_array
from draftwood.text import TextCodec

PADDED_VOCABULARY = 2048  # maximum number of padding ids that a model has beyond its tokenizer
_NUM_CHECKS = 16  # entries checked when a file is opened
_CHECKED_TOKENS = 8
_NUM_PROBES = 256  # ids whose text is part of a fingerprint
_PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? Unbelievable: 3.14159, 2024-01-31, 1,000,000!",
    "def main(argv: list[str]) -> int:\n    return 0 if not argv else len(argv)  # \t tabs\r\n\n\n",
    "Größe, façade, naïve, señor, Привет мир, 你好世界, こんにちは, 안녕하세요, مرحبا, नमस्ते, 🙂👩‍👩‍👧",
    '<div class="a">&amp;</div> {"key": [1, 2.5e-3, null]} \\frac{a}{b} https://example.org/?q=1#top',
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatastoreInfo:
    """Contents and origin of a datastore."""

    num_documents: int
    num_tokens: int  # without separators
    vocab_size: int  # of the tokenizer
    tokenizer: str  # its fingerprint
    sources: tuple[str, ...]


class DatastoreMatch(NamedTuple):
    """All occurrences of a token sequence: a range of the suffix array."""

    length: int  # matched tokens
    first: int
    last: int  # exclusive

    @property
    def num_places(self) -> int:
        return self.last - self.first


class Datastore:
    """Finds what followed the last tokens of a context in a corpus. Immutable, so requests can share it."""

    def __init__(self, info: DatastoreInfo, tokens: Int32Array, suffixes: Int32Array) -> None:
        self.info = info
        self.tokens = tokens  # [n]
        self.suffixes = suffixes  # [n]
        # Views of the same memory: reading single numbers from a memoryview is several times faster than from numpy.
        self._tokens = tokens.data.cast("B").cast("i")
        self._suffixes = suffixes.data.cast("B").cast("i")

    @classmethod
    def open(cls, path: str | Path, *, vocab_size: int | None = None, tokenizer: str | None = None) -> Self:
        """Map the file; raise if it does not fit ``vocab_size`` (the target's) or ``tokenizer`` (a fingerprint)."""
        mapped = map_file(Path(path).expanduser())
        store = cls(_read_info(mapped), mapped.tokens, mapped.suffixes)
        store._check_content(mapped.path)
        store._check_fit(mapped.path, vocab_size, tokenizer)
        return store

    def save(self, path: str | Path, progress: Progress | None = None) -> None:
        """Write the file atomically."""
        info = self.info
        metadata = {
            "num_documents": str(info.num_documents),
            "vocab_size": str(info.vocab_size),
            "tokenizer": info.tokenizer,
            "sources": json.dumps(info.sources),
        }
        write_file(Path(path), self.tokens, self.suffixes, metadata, progress)

    def matches(self, tail: Sequence[int], max_length: int = 16, min_length: int = 1) -> DatastoreMatch | None:
        """All occurrences of the longest suffix of ``tail`` that is followed by a token somewhere.

        If a suffix occurs, so do all shorter ones; its length is found by binary search.
        """
        low, high = min_length - 1, min(max_length, len(tail))  # the longest length lies in low..high
        best: DatastoreMatch | None = None
        while low < high:
            length = (low + high + 1) // 2
            found = self.find(tail[len(tail) - length :])
            if found is None:
                high = length - 1
            else:
                low, best = length, found
        return best

    def find(self, run: Sequence[int]) -> DatastoreMatch | None:
        """All occurrences of ``run`` that are followed by a token of the same document."""
        tokens, suffixes, length = self._tokens, self._suffixes, len(run)
        wanted = list(run)
        # Separators sort first, so occurrences followed by a token start at ``run`` plus the lowest token.
        followed = [*wanted, 0]
        first = bisect_left(suffixes, followed, key=lambda place: tokens[place : place + length + 1].tolist())
        if first == len(suffixes):
            return None
        place = suffixes[first]
        if tokens[place : place + length].tolist() != wanted:
            return None
        last = bisect_right(suffixes, wanted, lo=first, key=lambda place: tokens[place : place + length].tolist())
        return DatastoreMatch(length, first, last)

    def continuations(self, match: DatastoreMatch, max_tokens: int, max_matches: int) -> Int32Array:
        """What followed, one row per occurrence ``[m, max_tokens]``, -1 after the end of a document.

        At most ``max_matches`` occurrences are used, evenly spread. Rows are in ascending order.
        """
        steps = np.arange(min(match.num_places, max_matches))
        chosen = self.suffixes[match.first + steps * match.num_places // len(steps)]
        # Indices past the end of the corpus are clipped to the last token, which is a separator.
        places = chosen.astype(np.int64)[:, None] + np.arange(match.length, match.length + max_tokens)
        rows = self.tokens.take(places, mode="clip")
        is_inside = (rows >= 0) & (rows < self.info.vocab_size)
        rows[~np.logical_and.accumulate(is_inside, axis=1)] = SEPARATOR
        return rows

    def _check_content(self, path: Path) -> None:
        """Check a few entries, so that a damaged file is detected."""
        n = len(self._tokens)
        indices = np.linspace(0, n - 1, min(n, _NUM_CHECKS)).astype(int).tolist()
        places = [self._suffixes[index] for index in indices]
        is_valid = self._tokens[n - 1] == SEPARATOR and len(set(places)) == len(places)
        before: list[int] = []
        for place in places:
            run = self._tokens[place : place + _CHECKED_TOKENS].tolist() if 0 <= place < n else []
            run = run[: run.index(SEPARATOR) + 1] if SEPARATOR in run else run
            is_valid &= bool(run) and before <= run and max(run) < self.info.vocab_size and min(run) >= SEPARATOR
            before = run
        if not is_valid:
            raise damaged(path, "its suffixes are not in order")

    def _check_fit(self, path: Path, vocab_size: int | None, tokenizer: str | None) -> None:
        size = self.info.vocab_size
        fits = vocab_size is None or size <= vocab_size <= size + PADDED_VOCABULARY
        if fits and tokenizer in (None, self.info.tokenizer):
            return
        raise DatastoreError(
            "The datastore was made with the tokenizer of another model",
            got=f"{path}, {size:,} tokens in its vocabulary",
            allowed="the same tokenizer" if fits else f"a vocabulary of {vocab_size:,} tokens",
            next_step="Build one for this model: draftwood datastore build FILES... --out FILE --model MODEL",
        )


def build_datastore(
    documents: Iterable[Sequence[int] | Int32Array],
    *,
    vocab_size: int,
    tokenizer: str,
    sources: Sequence[str] = (),
    progress: Progress | None = None,
) -> Datastore:
    """Build a datastore in memory from documents of token ids; empty documents are skipped."""
    pieces: list[Int32Array] = []
    num_tokens = 0
    for document in documents:
        if len(document):
            ids = np.asarray(document, np.int32)
            _check_ids(ids, vocab_size)
            pieces += [ids, np.array([SEPARATOR], np.int32)]
            num_tokens += len(ids)
    num_documents = len(pieces) // 2
    _check_size(num_tokens + num_documents)
    tokens = np.concatenate(pieces)
    pieces.clear()  # hold the corpus in memory only once
    info = DatastoreInfo(
        num_documents=num_documents,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        sources=tuple(sources),
    )
    report(progress, f"sorting takes about {readable_size(BYTES_PER_TOKEN * len(tokens))} of memory", 0, 1)
    return Datastore(info, tokens, suffix_array(tokens, progress))


def tokenizer_fingerprint(codec: TextCodec) -> str:
    """Identify a tokenizer by its encodings of some texts and the texts of ids from the whole vocabulary.

    Unlike a hash of the file, it is the same for files that define the same tokenizer in different ways.
    """
    ids = sorted(set(np.linspace(0, codec.vocab_size - 1, _NUM_PROBES).astype(int).tolist()))
    content = {
        "size": codec.vocab_size,
        "texts": [codec.encode(text, add_special=False) for text in _PROBE_TEXTS],
        "ids": [codec.decode([index], skip_special=False) for index in ids],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_info(mapped: MappedDatastore) -> DatastoreInfo:
    try:
        num_documents = int(mapped.metadata["num_documents"])
        return DatastoreInfo(
            num_documents=num_documents,
            num_tokens=len(mapped.tokens) - num_documents,
            vocab_size=int(mapped.metadata["vocab_size"]),
            tokenizer=mapped.metadata["tokenizer"],
            sources=tuple(map(str, json.loads(mapped.metadata["sources"]))),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise damaged(mapped.path, "its metadata is invalid") from error


def _check_ids(ids: Int32Array, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DatastoreError(
            "A document has ids outside the vocabulary",
            got=f"{ids.min()} to {ids.max()}",
            allowed=f"0 to {vocab_size - 1}",
        )


def _check_size(num_tokens: int) -> None:
    if num_tokens == 0:
        raise DatastoreError("The corpus is empty", next_step="Give files with text in them.")
    if num_tokens > MAX_TOKENS:
        raise DatastoreError(
            "The corpus is too large for one datastore",
            got=f"{num_tokens:,} tokens",
            allowed=f"{MAX_TOKENS:,}",
            next_step="Build it from fewer files.",
        )
