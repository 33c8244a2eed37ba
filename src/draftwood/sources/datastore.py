"""A datastore: a tokenised corpus with its suffix array, in one file that is read where it lies.

The file is a safetensors file with two tensors, ``tokens`` (a separator closes every document) and ``suffixes``, and
notes on what they were made from. Opening it maps it into memory and reads a few places only; a query bisects.

    build_datastore(documents, vocab_size=..., tokenizer=tokenizer_fingerprint(codec)).save(path)
    store = Datastore.open(path, vocab_size=49152)
    found = store.matches(context[-16:])            # the longest end of the context that the corpus has
    rows = store.continuations(found, 10, 256)      # [m, 10], what followed there
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftwood.display import readable_size
from draftwood.progress import Progress, report
from draftwood.sources.datastore_file import DatastoreError, MappedDatastore, damaged, map_file, write_file
from draftwood.sources.suffix_array import BYTES_PER_TOKEN, MAX_TOKENS, SEPARATOR, Int32Array, suffix_array
from draftwood.text import TextCodec

PADDED_VOCABULARY = 2048  # a model may have that many more ids than its tokenizer uses
_NUM_CHECKS = 16  # places that are looked at when a file is opened
_CHECKED_TOKENS = 8
_NUM_PROBES = 256  # ids whose text goes into a fingerprint
_PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? Unbelievable: 3.14159, 2024-01-31, 1,000,000!",
    "def main(argv: list[str]) -> int:\n    return 0 if not argv else len(argv)  # \t tabs\r\n\n\n",
    "Größe, façade, naïve, señor, Привет мир, 你好世界, こんにちは, 안녕하세요, مرحبا, नमस्ते, 🙂👩‍👩‍👧",
    '<div class="a">&amp;</div> {"key": [1, 2.5e-3, null]} \\frac{a}{b} https://example.org/?q=1#top',
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatastoreInfo:
    """What is in a datastore and what it was made from."""

    num_documents: int
    num_tokens: int  # separators not counted
    vocab_size: int  # of the tokenizer
    tokenizer: str  # its fingerprint
    sources: tuple[str, ...]


class DatastoreMatch(NamedTuple):
    """A run of tokens that occurs: the stretch of the suffix array where it does."""

    length: int  # tokens that matched
    first: int
    last: int  # exclusive

    @property
    def num_places(self) -> int:
        return self.last - self.first


class Datastore:
    """A corpus that answers what followed the last tokens of a context. It never changes, so requests can share it."""

    def __init__(self, info: DatastoreInfo, tokens: Int32Array, suffixes: Int32Array) -> None:
        self.info = info
        self.tokens = tokens  # [n]
        self.suffixes = suffixes  # [n]
        # The same memory once more: single numbers come out of a memoryview several times faster than out of numpy.
        self._tokens = tokens.data.cast("B").cast("i")
        self._suffixes = suffixes.data.cast("B").cast("i")

    @classmethod
    def open(cls, path: str | Path, *, vocab_size: int | None = None, tokenizer: str | None = None) -> Datastore:
        """Maps the file. With ``vocab_size`` (the target's) or ``tokenizer`` (a fingerprint) it must fit them."""
        mapped = map_file(Path(path).expanduser())
        store = cls(_read_info(mapped), mapped.tokens, mapped.suffixes)
        store._check_content(mapped.path)
        store._check_fit(mapped.path, vocab_size, tokenizer)
        return store

    def save(self, path: str | Path, progress: Progress | None = None) -> None:
        """Writes the file; it appears whole or not at all."""
        info = self.info
        notes = {
            "num_documents": str(info.num_documents),
            "vocab_size": str(info.vocab_size),
            "tokenizer": info.tokenizer,
            "sources": json.dumps(info.sources),
        }
        write_file(Path(path), self.tokens, self.suffixes, notes, progress)

    def matches(self, tail: Sequence[int], max_length: int = 16, min_length: int = 1) -> DatastoreMatch | None:
        """The longest end of ``tail`` that occurs with something behind it, and all places where it does.

        Where an end occurs, all shorter ones do, so the length is found by bisection.
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
        """Where ``run`` occurs with something behind it: an occurrence that ends its document leads nowhere."""
        tokens, suffixes, length = self._tokens, self._suffixes, len(run)
        wanted = list(run)
        # Separators sort first, so whatever is followed by a token starts at ``run`` with the lowest token behind it.
        followed = [*wanted, 0]
        first = bisect_left(suffixes, followed, key=lambda place: tokens[place : place + length + 1].tolist())
        if first == len(suffixes):
            return None
        place = suffixes[first]
        if tokens[place : place + length].tolist() != wanted:
            return None
        last = bisect_right(suffixes, wanted, lo=first, key=lambda place: tokens[place : place + length].tolist())
        return DatastoreMatch(length, first, last)

    def continuations(self, found: DatastoreMatch, max_tokens: int, max_matches: int) -> Int32Array:
        """What followed, one occurrence a row ``[m, max_tokens]``, -1 behind the end of a document.

        Of more than ``max_matches`` occurrences it takes that many, evenly spread. Rows are in ascending order.
        """
        steps = np.arange(min(found.num_places, max_matches))
        chosen = self.suffixes[found.first + steps * found.num_places // len(steps)]
        # Past the end of the corpus the last place counts, and that is a separator.
        places = chosen.astype(np.int64)[:, None] + np.arange(found.length, found.length + max_tokens)
        rows = self.tokens.take(places, mode="clip")
        is_inside = (rows >= 0) & (rows < self.info.vocab_size)
        rows[~np.logical_and.accumulate(is_inside, axis=1)] = SEPARATOR
        return rows

    def _check_content(self, path: Path) -> None:
        """Looks at a few places: a file whose contents were damaged should not be drafted from."""
        n = len(self._tokens)
        indices = np.linspace(0, n - 1, min(n, _NUM_CHECKS)).astype(int).tolist()
        places = [self._suffixes[index] for index in indices]
        sound = self._tokens[n - 1] == SEPARATOR and len(set(places)) == len(places)
        before: list[int] = []
        for place in places:
            run = self._tokens[place : place + _CHECKED_TOKENS].tolist() if 0 <= place < n else []
            run = run[: run.index(SEPARATOR) + 1] if SEPARATOR in run else run
            sound &= bool(run) and before <= run and max(run) < self.info.vocab_size and min(run) >= SEPARATOR
            before = run
        if not sound:
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
            next_step="Build one for this model: draftwood datastore build FILES... --output NAME --model MODEL",
        )


def build_datastore(
    documents: Iterable[Sequence[int] | Int32Array],
    *,
    vocab_size: int,
    tokenizer: str,
    sources: Sequence[str] = (),
    progress: Progress | None = None,
) -> Datastore:
    """A datastore in memory from documents as token ids; empty documents are left out."""
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
    pieces.clear()  # the corpus is in memory once
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
    """Tells tokenizers apart: what they make of some texts, and the text of ids from all over the vocabulary.

    Two files that say the same in different ways have one fingerprint, unlike their bytes.
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
        num_documents = int(mapped.notes["num_documents"])
        return DatastoreInfo(
            num_documents=num_documents,
            num_tokens=len(mapped.tokens) - num_documents,
            vocab_size=int(mapped.notes["vocab_size"]),
            tokenizer=mapped.notes["tokenizer"],
            sources=tuple(map(str, json.loads(mapped.notes["sources"]))),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise damaged(mapped.path, "its notes make no sense") from error


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
