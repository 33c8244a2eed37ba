"""The datastore: the suffix array, queries, building and the file. Its drafter: test_retrieval.py."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftwood.errors import DraftwoodError
from draftwood.sources import datastore
from draftwood.sources.datastore import Datastore, DatastoreInfo, build_datastore, tokenizer_fingerprint
from draftwood.sources.datastore_file import DatastoreError
from draftwood.sources.suffix_array import SEPARATOR, suffix_array
from draftwood.text.bytes import ByteTokenizer
from tests.tools.datastore import VOCAB, store_of

documents = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), min_size=1, max_size=6)
runs = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def joined(corpus: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in corpus for token in (*document, SEPARATOR)]


def followed(corpus: Sequence[Sequence[int]], run: Sequence[int]) -> list[tuple[int, ...]]:
    """Continuations of every occurrence of the run, by a scan of all documents."""
    ends = [
        tuple(document[place + len(run) :])
        for document in corpus
        for place in range(len(document))
        if list(document[place : place + len(run)]) == list(run)
    ]
    return sorted(end for end in ends if end)


# -- the suffix array ------------------------------------------------------------------------------------------------


@given(documents)
def test_suffix_array_is_a_sort_of_the_suffixes(corpus: list[list[int]]) -> None:
    tokens = joined(corpus)

    def up_to_separator(place: int) -> tuple[list[int], int]:
        return tokens[place : tokens.index(SEPARATOR, place) + 1], place

    assert suffix_array(np.array(tokens, np.int32)).tolist() == sorted(range(len(tokens)), key=up_to_separator)


def test_equal_documents_and_long_repeats_are_sorted() -> None:
    tokens = np.array([*[7] * 300, SEPARATOR] * 2, np.int32)
    suffixes = suffix_array(tokens)
    assert suffixes[:2].tolist() == [300, 601]
    assert suffixes[-2:].tolist() == [0, 301]  # the longest runs, the earlier one first
    assert sorted(suffixes.tolist()) == list(range(602))


def test_sorting_reports_progress() -> None:
    steps: list[tuple[str, int, int]] = []
    build_datastore([[1, 2, 3] * 40], vocab_size=4, tokenizer="", progress=lambda *step: steps.append(step))
    assert "memory" in steps[0][0]
    sorting = steps[1:]
    assert {(label, total) for label, _, total in sorting} == {("sorting 121 tokens", 121)}
    assert [done for _, done, _ in sorting] == sorted(done for _, done, _ in sorting)
    assert sorting[-1][1] == 121


# -- queries ---------------------------------------------------------------------------------------------------------


@given(documents, runs)
@settings(max_examples=300)
def test_find_returns_all_occurrences_with_continuation(corpus: list[list[int]], run: list[int]) -> None:
    store, expected = store_of(corpus), followed(corpus, run)
    found = store.find(run)
    if found is None:
        assert not expected
    else:
        assert (found.length, found.num_places) == (len(run), len(expected))
        rows = store.continuations(found, 30, 1000)
        assert [tuple(t for t in row if t != SEPARATOR) for row in rows.tolist()] == expected


@given(documents, runs, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=300)
def test_longest_suffix_of_the_tail_matches(
    corpus: list[list[int]], tail: list[int], max_length: int, min_length: int
) -> None:
    lengths = [n for n in range(min_length, min(max_length, len(tail)) + 1) if followed(corpus, tail[-n:])]
    found = store_of(corpus).matches(tail, max_length, min_length)
    assert (found.length if found else None) == max(lengths, default=None)
    if found:
        assert found.num_places == len(followed(corpus, tail[-found.length :]))


def test_continuations_never_cross_into_another_document() -> None:
    store = store_of([[1, 2, 3], [1, 2], [1, 2, 0, 1]])
    found = store.find([1, 2])
    assert found is not None
    assert store.continuations(found, 4, 10).tolist() == [[0, 1, -1, -1], [3, -1, -1, -1]]
    assert store.find([3]) is None  # it occurs, but nothing follows
    assert store.find([3, 1]) is None


def test_many_occurrences_are_sampled_evenly() -> None:
    store = store_of([[1, 0]] * 30 + [[1, 2]] * 60 + [[1, 3]] * 10)
    found = store.find([1])
    assert found is not None
    rows = store.continuations(found, 1, 10)
    assert Counter(rows[:, 0].tolist()) == {0: 3, 2: 6, 3: 1}


def test_an_empty_tail_matches_nothing() -> None:
    assert store_of([[1, 2]]).matches([]) is None


# -- building --------------------------------------------------------------------------------------------------------


def test_build_skips_and_counts_empty_documents() -> None:
    store = store_of([[], [1, 2], [], [3]])
    assert store.tokens.tolist() == [1, 2, -1, 3, -1]
    assert store.info == DatastoreInfo(
        num_documents=2, num_tokens=3, vocab_size=VOCAB, tokenizer="abc", sources=("x.txt", "y")
    )


@pytest.mark.parametrize("corpus", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused(corpus: list[list[int]]) -> None:
    with pytest.raises(DatastoreError, match="The corpus is empty"):
        store_of(corpus)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(DatastoreError, match="outside the vocabulary"):
        store_of([[1, token]])


def test_a_corpus_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastore, "MAX_TOKENS", 5)
    store_of([[1, 2, 3, 1]])
    with pytest.raises(DatastoreError, match=r"too large(.|\n)*6 tokens"):
        store_of([[1, 2], [3, 1]])


def test_fingerprints_distinguish_tokenizers() -> None:
    class Shifted(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [(i + 1) % 256 for i in super().encode(text, add_special=add_special)]

    class Renamed(ByteTokenizer):
        def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
            return super().decode([(i + 1) % 256 for i in ids])

    class Larger(ByteTokenizer):
        vocab_size = 259

    prints = [tokenizer_fingerprint(codec()) for codec in (ByteTokenizer, Shifted, Renamed, Larger)]
    assert len(set(prints)) == 4
    assert tokenizer_fingerprint(ByteTokenizer()) == prints[0]


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "some.draftwood-datastore"
    store_of([[1, 2, 3, 1, 2], [2, 2, 1], [0, 3]]).save(path)
    return path


def test_datastore_round_trips_through_file(saved: Path) -> None:
    made, opened = store_of([[1, 2, 3, 1, 2], [2, 2, 1], [0, 3]]), Datastore.open(saved)
    assert opened.info == made.info
    assert opened.tokens.tolist() == made.tokens.tolist()
    assert opened.suffixes.tolist() == made.suffixes.tolist()
    assert opened.find([2]) == made.find([2])
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_the_file_is_a_safetensors_file(saved: Path) -> None:
    with safe_open(saved, framework="numpy") as file:
        assert file.get_tensor("tokens").tolist() == Datastore.open(saved).tokens.tolist()
        assert file.get_tensor("suffixes").dtype == np.int32
        notes = file.metadata()
    assert (notes["format"], notes["version"], notes["tokenizer"]) == ("draftwood-datastore", "1", "abc")
    assert (notes["vocab_size"], notes["num_documents"]) == ("4", "3")
    assert json.loads(notes["sources"]) == ["x.txt", "y"]


def test_file_is_memory_mapped(saved: Path) -> None:
    store = Datastore.open(saved)
    assert not store.tokens.flags.owndata
    assert not store.tokens.flags.writeable
    # Changes of the file are visible in the store: the data is not copied.
    content = bytearray(saved.read_bytes())
    place = content.index(struct.pack("<5i", 1, 2, 3, 1, 2))
    with saved.open("r+b") as handle:
        handle.seek(place)
        handle.write(struct.pack("<i", 3))
    assert store.tokens[0] == 3
    assert store._tokens[0] == 3


def test_replacing_the_file_does_not_affect_open_datastore(saved: Path) -> None:
    store = Datastore.open(saved)
    store_of([[3, 3, 3]]).save(saved)
    assert store.tokens.tolist()[:3] == [1, 2, 3]
    assert Datastore.open(saved).tokens.tolist() == [3, 3, 3, -1]


def test_an_interrupted_save_leaves_the_old_file(saved: Path) -> None:
    before = saved.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_of([[3, 3, 3]]).save(saved, interrupt)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_unwritable_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(DraftwoodError, match="cannot be written"):
        store_of([[1]]).save(tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def with_header(path: Path, change: Any) -> Path:
    """The file with a changed header in front of the same tensors."""
    content = path.read_bytes()
    room = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + room])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + room :])
    return path


def test_missing_file_error_names_build_command(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match=r"does not exist(.|\n)*draftwood datastore build"):
        Datastore.open(tmp_path / "none")


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"plain text that is longer than a header's length", bytes(64), b"\x02" + bytes(7) + b"[]"],
)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DatastoreError, match="This file is not a datastore"):
        Datastore.open(tmp_path / "file")


def test_other_safetensors_files_and_folders_are_refused(saved: Path) -> None:
    with pytest.raises(DatastoreError, match="cannot be read"):
        Datastore.open(saved.parent)
    with_header(saved, lambda header: header["__metadata__"].update(format="pt"))
    with pytest.raises(DatastoreError, match="This file is not a datastore"):
        Datastore.open(saved)


def test_another_version_is_refused(saved: Path) -> None:
    with_header(saved, lambda header: header["__metadata__"].update(version="2"))
    with pytest.raises(DatastoreError, match=r"another version(.|\n)*version 2"):
        Datastore.open(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("suffixes"),
        lambda header: header["tokens"].update(dtype="I64"),
        lambda header: header["tokens"].update(shape=[3]),
        lambda header: header["tokens"].update(shape=["13"]),
        lambda header: header["tokens"].update(data_offsets=[-8, 44]),
        lambda header: header["tokens"].update(data_offsets=[0, 20], shape=[5]),
        lambda header: header["__metadata__"].pop("vocab_size"),
        lambda header: header["__metadata__"].update(num_documents="many"),
        lambda header: header["__metadata__"].update(sources="{"),
        lambda header: header["__metadata__"].update(vocab_size="2"),
    ],
)
def test_damaged_headers_are_refused(change: Any, saved: Path) -> None:
    with pytest.raises(DatastoreError, match="The datastore is damaged"):
        Datastore.open(with_header(saved, change))


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_truncated_files_are_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "store"
    store_of([[1, 2, 3, 1, 2], [2, 2, 1], [0, 3]]).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DatastoreError, match=r"damaged|not a datastore"):
        Datastore.open(path)


@pytest.mark.parametrize(("start", "stop"), [(-104, -52), (-52, None)])
@pytest.mark.parametrize("value", [2**30, -2, 0])
def test_damaged_tensors_are_refused(start: int, stop: int | None, value: int, saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[start:stop] = struct.pack("<13i", *[value] * 13)
    saved.write_bytes(content)
    with pytest.raises(DatastoreError, match="damaged"):
        Datastore.open(saved)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store_of([[1, 2]], vocab_size=5000).save(path)
    for size in (5000, 5064):  # models round their vocabularies up
        Datastore.open(path, vocab_size=size, tokenizer="abc")
    for options in ({"vocab_size": 4999}, {"vocab_size": 50_000}, {"tokenizer": "abd"}):
        with pytest.raises(DatastoreError, match=r"tokenizer of another model(.|\n)*draftwood datastore build"):
            Datastore.open(path, **options)  # type: ignore[arg-type]


def test_ids_beyond_the_vocabulary_are_never_drafted(saved: Path) -> None:
    store = Datastore.open(saved)
    tokens = store.tokens.copy()
    tokens[2] = 4_000  # damage that opening did not detect
    damaged = Datastore(store.info, tokens, store.suffixes)
    found = damaged.find([1, 2])
    assert found is not None
    assert max(damaged.continuations(found, 5, 10).ravel().tolist()) < VOCAB
