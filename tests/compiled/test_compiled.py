"""The drafting core in C equals the Python implementation: the same tables, trees and tree sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.compiled import CORE, load_core, table
from draftwood.growth.spine import Anchor, SpineBudget, grow_spine_tree
from draftwood.sizing.chances import CompiledGuesses, PythonGuesses
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import Experience, Load, Sizer
from draftwood.sources.rowtable import NOTHING, IdRows, ScoreRows
from draftwood.sources.transitions import CompiledTiers, PythonTiers, SuccessorArrays, TransitionTable
from draftwood.tree import DraftTree, TreeBuilder
from tests.conftest import random_parents
from tests.tools.sizing import PROFILES, cut

pytestmark = pytest.mark.skipif(load_core() is None, reason=f"no core: {CORE.why_unavailable()}")

V, K = 6, 3
Contexts = list[tuple[int, int]]

contexts = st.lists(st.tuples(st.integers(0, V - 1), st.integers(0, V - 1)), max_size=12)
seeds = st.integers(0, 1 << 30)


WITH_CORE = (
    "sources.transitions",
    "sources.context",
    "sources.hints.text",
    "sources.hints.positions",
    "sources.hints.drafted",
    "sizing.chances",
    "growth.blend",
)


@contextmanager
def in_python() -> Iterator[None]:
    """Behave as on a machine without a compiler."""
    with ExitStack() as patches:
        for module in WITH_CORE:
            patches.enter_context(mock.patch(f"draftwood.{module}.load_core", return_value=None))
        yield


def two_tables(*, num_pairs: int, initial: SuccessorArrays | None = None) -> tuple[TransitionTable, TransitionTable]:
    compiled = TransitionTable(V, K, num_pairs=num_pairs, initial=initial)
    with in_python():
        python = TransitionTable(V, K, num_pairs=num_pairs, initial=initial)
    assert isinstance(compiled._tiers, CompiledTiers)
    assert isinstance(python._tiers, PythonTiers)
    return compiled, python


def random_rows(rng: random.Random, count: int) -> tuple[IdRows, ScoreRows]:
    """Successors best first, with few distinct scores for ties; some rows are short."""
    ids, scores = np.full((count, K), NOTHING, np.int32), np.zeros((count, K), np.float32)
    for row in range(count):
        size = rng.randint(0, K)
        ids[row, :size] = rng.sample(range(V), size)
        scores[row, :size] = sorted((rng.choice([0.005, 0.1, 0.3, 0.5, 1.0]) for _ in range(size)), reverse=True)
    return ids, scores


def initial_successors(rng: random.Random) -> SuccessorArrays | None:
    return rng.choice([None, SuccessorArrays(*random_rows(rng, V))])


def learn(tables: Sequence[TransitionTable], written: Contexts, rng: random.Random) -> None:
    rows = random_rows(rng, len(written))
    for each in tables:
        each.learn([previous for previous, _ in written], [token for _, token in written], *rows)


def assert_same_content(compiled: TransitionTable, python: TransitionTable) -> None:
    ours, theirs = compiled.arrays(), python.arrays()
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].tolist()) == (array.dtype, array.tolist()), name
    assert compiled.num_pairs == python.num_pairs
    assert compiled.layout == python.layout
    for previous in range(V):
        for token in range(V):
            assert compiled.successors(previous, token) == python.successors(previous, token)


# -- tables ----------------------------------------------------------------------------------------------------------


@given(st.lists(contexts, max_size=12), st.integers(0, 40), st.integers(1, 40), seeds)
def test_tables_are_equal_after_any_calls(calls: list[Contexts], num_pairs: int, later: int, seed: int) -> None:
    rng = random.Random(seed)
    with mock.patch.multiple(table, FIRST_ROWS=1, FIRST_BITS=1):  # so that they grow
        both = two_tables(num_pairs=num_pairs, initial=initial_successors(rng))
        for written in calls:
            learn(both, written, rng)
            assert_same_content(*both)
        others = two_tables(num_pairs=later if num_pairs else 0)
        for each, other in zip(others, both[::-1], strict=True):
            each.restore(other.arrays())  # each reads what the other wrote
        assert_same_content(*others)
        for written in calls:
            learn(others, written, rng)
            assert_same_content(*others)


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(0, 20), seeds)
def test_tables_learn_trees_identically(sizes: list[int], num_pairs: int, seed: int) -> None:
    """Nodes off the path are learned first, then those on it."""
    rng = random.Random(seed)
    both = two_tables(num_pairs=num_pairs)
    (by_rows, _) = two_tables(num_pairs=num_pairs)
    for size in sizes:
        tokens, parents = [rng.randrange(V) for _ in range(size)], random_parents(rng, size)
        path = [rng.randrange(size)]
        while path[0]:
            path.insert(0, parents[path[0]])
        before, (ids, scores) = rng.randrange(V), random_rows(rng, size)
        for each in both:
            each.learn_tree(before, tokens, parents, path, ids, scores)
        assert_same_content(*both)
        order = sorted(range(size), key=lambda node: (node in path, node))
        previous = [tokens[parents[node]] if node else before for node in order]
        by_rows.learn(previous, [tokens[node] for node in order], ids[order], scores[order])
        assert_same_content(both[0], by_rows)


def test_compiled_tables_refuse_invalid_trees() -> None:
    table, _ = two_tables(num_pairs=4)
    ids, scores = random_rows(random.Random(0), 3)
    for tokens, parents, path in (
        ([0, 1, V], [-1, 0, 1], [0]),
        ([0, 1, 2], [-1, 2, 1], [0]),
        ([0, 1, 2], [-1, -1, 1], [0]),
        ([0, 1, 2], [-1, 0, 1], [0, 3]),
        ([0, 1, 2], [-1, 0, 1], [0, 2, 1]),
    ):
        with pytest.raises(IndexError):
            table.learn_tree(0, tokens, parents, path, ids, scores)
    with pytest.raises(ValueError, match="rows"):
        table.learn_tree(0, [0, 1], [-1, 0], [0], ids, scores)
    assert table.num_pairs == 0


@pytest.mark.parametrize("num_pairs", [3000, 60_000])
def test_large_tables_are_equal(num_pairs: int) -> None:
    rng = np.random.default_rng(0)
    vocab_size = 500
    compiled = TransitionTable(vocab_size, K, num_pairs=num_pairs)
    with in_python():
        python = TransitionTable(vocab_size, K, num_pairs=num_pairs)
    for size in (1, 20_000, 7, 30_000, 3000, 1):
        before, tokens = rng.integers(0, vocab_size, (2, size)).tolist()
        rows = rng.integers(0, vocab_size, (size, K)).astype(np.int32), rng.random((size, K)).astype(np.float32)
        compiled.learn(before, tokens, *rows)
        python.learn(before, tokens, *rows)
    ours, theirs = compiled.arrays(), python.arrays()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    for previous, token in rng.integers(0, vocab_size, (3000, 2)).tolist():
        assert compiled.successors(previous, token) == python.successors(previous, token)


def test_unknown_tokens_are_refused_before_any_write() -> None:
    for num_pairs in (0, 4):
        compiled = TransitionTable(V, K, num_pairs=num_pairs)
        for token in (V, -1):
            with pytest.raises(IndexError, match="of 6"):
                compiled.learn([1, 1], [2, token], *random_rows(random.Random(0), 2))
        assert compiled.successors(1, 2) == ([], [])
        assert compiled.successors(1, V) == compiled.successors(1, -1) == ([], [])
        assert compiled.num_pairs == 0


@pytest.mark.parametrize(("rows", "width", "previous"), [(1, K, 2), (2, K + 1, 2), (2, K, 1)])
def test_rows_of_wrong_shape_are_refused(rows: int, width: int, previous: int) -> None:
    compiled = TransitionTable(V, K, num_pairs=4)
    with pytest.raises(ValueError, match="rows"):
        compiled.learn([1] * previous, [2, 2], np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32))


def test_non_contiguous_rows_are_supported() -> None:
    ids, scores = np.arange(20, dtype=np.int64).reshape(4, 5) % V, np.linspace(1, 0, 20).reshape(4, 5)
    scores.setflags(write=False)
    both = two_tables(
        num_pairs=4, initial=SuccessorArrays(np.ones((V, 5), np.int32).T[:K].T, np.ones((V, K), np.float32))
    )
    for each in both:
        each.learn([1, 2], [3, 4], ids[::2, 1:4], scores[::2, 1:4])
    assert_same_content(*both)


@pytest.mark.parametrize("shape", [(V, K - 1), (V - 1, K)])
def test_too_small_initial_table_is_refused(shape: tuple[int, int]) -> None:
    initial = SuccessorArrays(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    for tables in (in_python(), mock.patch.object(table, "FIRST_ROWS", 1)):
        with tables, pytest.raises(ValueError, match="6 tokens"):
            TransitionTable(V, K, initial=initial)


def test_a_compiled_table_stays_within_its_memory() -> None:
    compiled = TransitionTable(V, K, num_pairs=100)
    assert compiled.num_bytes == 0
    learn([compiled], [(1, 2)], random.Random(0))
    one, successors = compiled.num_bytes, 8 * K
    learn([compiled], [(1, 4), (3, 4)], random.Random(0))  # two pairs and a token
    assert (
        compiled.num_bytes == one + 2 * (table.KEY_BYTES + table.LINK_BYTES + successors) + table.KEY_BYTES + successors
    )
    pair_bytes = table.KEY_BYTES + table.LINK_BYTES + 4 * 4  # with up to four slots
    assert pair_bytes <= 140  # the limit is rowtable.ENTRY_BYTES


# -- trees -----------------------------------------------------------------------------------------------------------


@given(
    contexts,
    st.lists(st.integers(0, V - 1), max_size=25),
    st.integers(1, 70),
    st.sampled_from([0.0, 0.15, 0.3, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([1e-9, 0.01, 0.2]),
    st.integers(1, 6),
    st.booleans(),
    seeds,
)
@settings(max_examples=300)
def test_trees_are_the_same_node_by_node(
    written: Contexts,
    spine: list[int],
    budget: int,
    ratio: float,
    share: float,
    min_score: float,
    depth: int,
    spine_branches: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    both = two_tables(num_pairs=8, initial=initial_successors(rng))
    learn(both, written, rng)
    trust = [rng.choice([0.3, 0.5, 0.8, rng.random()]) for _ in spine]
    plan = SpineBudget(ratio, share, min_score, depth, spine_branches=spine_branches)
    compiled, python = (grow_spine_tree(Anchor(2, 1), spine, trust, each.successors, budget, plan) for each in both)
    assert compiled == python
    assert checked(compiled) == compiled


def checked(tree: DraftTree) -> DraftTree:
    """The same tree, rebuilt by the checking constructor."""
    return DraftTree(tree.tokens, tree.parents, tree.depths, tree.sources, tree.probs, route=tree.route)


# -- sizes -----------------------------------------------------------------------------------------------------------


def random_tree(rng: random.Random, max_size: int) -> DraftTree:
    builder = TreeBuilder(0)
    edges = [0.0, 0.02, 0.35, 0.5, 0.9, 1.0, rng.random()]  # between kinds
    probs, sources = rng.choice([edges, [0.1], [0.3]]), rng.choice(["abc", "a"])  # with equal values, ties matter
    for parent in random_parents(rng, rng.randint(1, max_size))[1:]:
        builder.add(min(parent, len(builder) - 1), rng.randint(1, 9), rng.choice(sources), rng.choice(probs))
    return builder.build()


def tokens_along(tree: DraftTree, rng: random.Random) -> list[int]:
    path = tree.path(rng.randrange(len(tree)))
    return [*(tree.tokens[node] for node in path[1 : 1 + rng.randint(0, 9)]), rng.choice([3, 99])]


@given(st.sampled_from(sorted(PROFILES)), st.booleans(), st.integers(1, 25), seeds)
@settings(max_examples=100)
def test_sizes_are_the_same_whatever_was_learned(costs: str, calibrated: bool, num_cycles: int, seed: int) -> None:
    """Two requests of one drafter alternate; new sources appear in between."""
    rng = random.Random(seed)
    compiled = two_requests(PROFILES[costs], calibrated)
    with in_python():
        python = two_requests(PROFILES[costs], calibrated)
    assert isinstance(compiled[0]._guesses, CompiledGuesses)
    assert isinstance(python[0]._guesses, PythonGuesses)
    for _ in range(num_cycles):
        which, tree, emitted_by = rng.randrange(2), random_tree(rng, 40), rng.random()
        ours, theirs = compiled[which], python[which]
        assert ours._guesses.chances(tree) == theirs._guesses.chances(tree)
        load, context, seconds = Load(rng.choice([0, 5]), rng.choice([0.0, 2.5])), rng.choice([0, 700]), rng.random()
        part = cut(ours, tree, load, context, seconds)
        assert part == cut(theirs, tree, load, context, seconds)
        assert (ours.expected, ours.wanted) == (theirs.expected, theirs.wanted)
        emitted = tokens_along(tree, random.Random(emitted_by))
        ours.note(tree, part, emitted)
        theirs.note(tree, part, emitted)
    tree = random_tree(rng, 40)
    assert [one._guesses.chances(tree) for one in compiled] == [one._guesses.chances(tree) for one in python]


def test_nodes_of_sources_that_nobody_has_seen_have_their_first_chance() -> None:
    """Their counts get memory before they are read."""
    (compiled, _) = two_requests(PROFILES["free"])
    with in_python():
        (python, _) = two_requests(PROFILES["free"])
    for number in range(40):
        tree = DraftTree.chain([1, 2, 3], f"first seen here {number}", [1.0, 0.5, 0.5])
        assert compiled._guesses.chances(tree) == python._guesses.chances(tree)


def two_requests(costs: CostProfile, is_calibrated: bool = False) -> list[Sizer]:
    drafter = Experience(is_calibrated=is_calibrated)
    return [Sizer(LiveCosts(costs), drafter), Sizer(LiveCosts(costs), drafter)]


# -- the library -----------------------------------------------------------------------------------------------------


def test_python_fallback_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CORE, "_state", None)
    monkeypatch.setenv("DRAFTWOOD_NO_KERNEL", "1")
    assert load_core() is None
    assert "DRAFTWOOD_NO_KERNEL" in CORE.why_unavailable()
    assert isinstance(TransitionTable(V, K)._tiers, PythonTiers)
    assert isinstance(two_requests(PROFILES["free"])[0]._guesses, PythonGuesses)


def test_it_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(CORE, "_state", None)
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    assert load_core() is load_core() is not None
    assert [path.name.split("-")[0] for path in (tmp_path / "kernels").iterdir()] == ["core"]
