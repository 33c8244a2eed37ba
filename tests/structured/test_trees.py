"""Draft trees within a structure: what is cut, what is added, in which order."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood import Structured
from draftwood.structured import GRAMMAR_SOURCE, StructureMatcher, constrain
from draftwood.text.bytes import EOS, ByteTokenizer
from draftwood.tree import DraftTree, Proposal, TreeBuilder
from tests.tools.structured import compile_for

pytest.importorskip("llguidance")

CODEC = ByteTokenizer()
ROOT = ord(" ")


def start(pattern: str, text: str = "") -> StructureMatcher:
    matcher = compile_for(CODEC, Structured(regex=pattern)).start()
    assert matcher.take(text.encode()) == len(text)
    return matcher


def tree_of(*texts: str) -> DraftTree:
    """Guesses along these texts."""
    builder = TreeBuilder(ROOT)
    for text in texts:
        node = 0
        for token in text.encode():
            node = builder.add(node, token, "test", 0.5)
    return builder.build()


def paths(tree: DraftTree) -> set[str]:
    """The texts from the root to every leaf."""
    return {CODEC.decode(tree.path_tokens(leaf)) for leaf in tree.leaves()}


def test_forbidden_guesses_are_cut() -> None:
    matcher = start("[ab]{2,6}")
    assert paths(constrain(tree_of("abc", "ba", "c", "xab"), matcher, 99)) == {"ab", "ba"}
    assert matcher.take(b"abab") == 4  # it is where it was


def test_nothing_follows_the_end() -> None:
    matcher = start("ab|abc{3}", "a")
    assert paths(constrain(tree_of("bx", "bccc" + "d"), matcher, 99)) == {"bccc"}
    tree = DraftTree.chain([ROOT, ord("b"), EOS, ord("b")])
    assert constrain(tree, start("ab*", "a"), 1).tokens == (ROOT, ord("b"), EOS)


def test_forced_text_comes_first_and_follows_guesses() -> None:
    tree = constrain(tree_of("xa", "y"), start("_(xab|yes|zero)", "_"), 99)
    assert paths(tree) == {"xab", "yes"}
    forced = constrain(tree_of("he"), start("_hello( x| y)", "_"), 99)
    assert paths(forced) == {"hello "}
    assert forced.sources[1:] == (GRAMMAR_SOURCE,) * 6  # surer than the guess
    assert forced.parents == tuple(range(-1, 6))


def test_the_tree_stays_within_the_budget() -> None:
    for size in range(2, 12):
        assert len(constrain(tree_of("hel"), start("hello world"), size)) == size
    tree = constrain(tree_of("ax", "bx", "cx"), start("(a|b|c)x{5}"), 8)
    assert len(tree) == 8
    assert tree.sources.count("test") == 3  # the guess of what is forced is surer than the drafter's


def test_a_plain_tree_gets_forced_text() -> None:
    assert paths(constrain(DraftTree.root_only(ROOT), start("abc(d|e)"), 9)) == {"abc"}
    assert len(constrain(DraftTree.root_only(ROOT), start("abc(d|e)"), 1)) == 1


def test_drawn_guesses_stay_without_what_follows_them() -> None:
    proposal = Proposal(np.array([ord("a"), ord("x")]), np.array([0.5, 0.5]))
    builder = TreeBuilder(ROOT)
    for first in "xa":
        node = builder.add(0, ord(first), "test")
        builder.add(node, ord("b"), "test")
    tree = constrain(builder.build({0: proposal}), start("[ay]b+c"), 99)
    assert paths(tree) == {"x", "ab"}
    assert list(tree.proposals) == [0]


def test_forced_text_replaces_drawn_guesses() -> None:
    proposals = [Proposal(np.array(list(text.encode())), np.array([0.5, 0.5])) for text in ("ay", "bx")]
    builder = TreeBuilder(ROOT)
    for first in "ay":
        node = builder.add(0, ord(first), "test")
    for second in "xb":
        builder.add(node, ord(second), "test")
    drawn = builder.build({0: proposals[0], node: proposals[1]})
    tree = constrain(drawn, start("(a|ybc)d"), 99)
    assert paths(tree) == {"ad", "ybcd"}
    assert list(tree.proposals) == [0]
    assert tree.sources[1:3] == ("test", "test")  # drawn guesses are never cut for forced text
    assert len(constrain(drawn, start("(a|ybc)d"), 4)) == 4
    forced = constrain(drawn, start("ybcd"), 99)
    assert paths(forced) == {"ybcd"}
    assert not forced.proposals


def test_the_end_of_a_value_is_guessed() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "m": {"type": "integer"}},
        "required": ["name", "n", "m"],
    }
    structure = compile_for(CODEC, Structured(json_schema={**schema, "additionalProperties": False}))
    for text, guess in [('{"name": "abc', '", "n": '), ('{"name": "a", "n": 3', ', "m": '), ('{"name": "a\\', "")]:
        matcher = structure.start()
        assert matcher.take(text.encode()) == len(text)
        assert CODEC.decode(matcher.closing()) == guess
        assert paths(constrain(DraftTree.root_only(ROOT), matcher, 99)) == {guess}
