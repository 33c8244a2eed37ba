"""Stop strings and text for any split into tokens and pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.engine.stopping import StopStrings, StopTokens
from draftwood.text.bytes import ByteTokenizer
from draftwood.text.incremental import IncrementalDecoder

CODEC = ByteTokenizer()


@given(
    st.text(alphabet="ab ", max_size=30),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_incremental_stop_strings_match_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    watcher = StopStrings(stops)
    shown, stopped, rest = "", False, text
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        # The engine feeds the text of one token at a time; here pieces have any size.
        before = len(text) - len(rest) - len(piece)
        more, stopped = watcher.feed(piece)
        shown += more
        assert text.startswith(shown)
        assert len(shown) <= before + len(piece)
    if stopped:
        seen = text[: len(text) - len(rest)]
        assert shown == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert not any(stop in shown for stop in stops)
    else:
        assert shown + watcher.flush() == text
        assert not any(stop in text for stop in stops)


def test_the_start_of_a_stop_string_is_held_back() -> None:
    watcher = StopStrings(["###"])
    assert watcher.feed("text #") == ("text ", False)
    assert watcher.feed("#") == ("", False)
    assert watcher.feed("x") == ("##x", False)
    assert watcher.feed("###after") == ("", True)


@given(st.binary(max_size=60))
@example("aé漢😀z".encode())
@example(b"\xff\xfe\xf0\x9f\x98")
@example(b"\xe6" * 30)
@example(b"\xf0" * 8 + b"\x9f\x98\x80")
@example("漢😀".encode() + b"\xff" * 9 + "😀".encode())
def test_incremental_decoding_matches_whole_decoding(data: bytes) -> None:
    decoder = IncrementalDecoder(CODEC)
    pieces = [*map(decoder.push, data), decoder.flush()]
    assert "".join(pieces) == CODEC.decode(list(data))


@given(st.text(max_size=30))
def test_pieces_of_valid_text_are_whole_characters(text: str) -> None:
    decoder = IncrementalDecoder(CODEC)
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text or "\ufffd" in text
    assert decoder.flush() == "" or "\ufffd" in text


def test_stop_tokens() -> None:
    stop = StopTokens(SamplingParams(stop_token_ids=(5,)), [9], max_tokens=4)
    assert [stop.first([1, 5, 1], 0), stop.first([9], 0), stop.first([1], 2), stop.first([1, 1, 1], 2)] == [
        (2, "stop"),
        (1, "stop"),
        (1, None),
        (2, "length"),
    ]
    assert stop.first([1, 9], 2) == (2, "stop")
    assert StopTokens(SamplingParams(ignore_eos=True), [9], 4).first([9], 0) == (1, None)


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=20),
)
def test_the_search_finds_what_a_search_of_the_whole_text_does(stops: list[str], parts: list[str]) -> None:
    watcher = StopStrings(stops)
    shown, whole = "", ""
    for part in parts:
        whole += part
        piece, stopped = watcher.feed(part)
        shown += piece
        found = [whole.find(stop) for stop in stops if stop in whole]
        assert stopped == bool(found)
        if stopped:
            assert shown == whole[: min(found)]
            return
        held = len(whole) - len(shown)
        assert held == max(n for n in range(len(whole) + 1) if n == 0 or any(s.startswith(whole[-n:]) for s in stops))
        assert whole.startswith(shown)
    assert shown + watcher.flush() == whole
