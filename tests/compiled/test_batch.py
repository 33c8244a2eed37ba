"""What C does for all requests of a batch equals what Python does for one after another."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.compiled import CORE, CompiledSpines, Outcomes, SpineRules, extend_contexts, load_core, observe_spines
from draftwood.config import SamplingParams
from draftwood.drafters import DraftRequest, VerifiedBatch
from draftwood.drafters.blend import BlendDrafter
from draftwood.drafters.blend_options import TABLES, BlendOptions
from draftwood.drafters.goose import BYPASSES, CONSENSUS, GooseDrafter, GooseOptions
from draftwood.engine.tally import TreeCounts
from draftwood.sizing.chances import AcceptanceRecord, new_guesses
from draftwood.sizing.cutting import Cut, Offers, PassCosts, cut_trees
from draftwood.sources.context import CompiledContextMatch, ContextMatch, new_context
from draftwood.sources.transitions import TransitionTable
from draftwood.targets import TopRows
from draftwood.tree import DraftTree, pack_places
from draftwood.verify import accept_greedy
from tests.compiled.test_compiled import K, V, in_python, random_rows, random_tree, tokens_along

pytestmark = pytest.mark.skipif(load_core() is None, reason=f"no core: {CORE.why_unavailable()}")

seeds = st.integers(0, 1 << 30)


def test_packed_tree_is_the_same_tree() -> None:
    tree = random_tree(random.Random(3), 20)
    (again,) = DraftTree.all_in(tree.pack(), [tree.route])
    assert len(again) == len(tree)
    assert again.root == tree.root
    assert [list(column) for column in again.links()] == [list(tree.tokens), list(tree.parents)]
    assert [again.source_of(node) for node in range(len(tree))] == list(tree.sources)
    assert again == tree
    assert not hasattr(again, "unknown")


# -- accepting and counting ------------------------------------------------------------------------------------------


@given(st.integers(1, 9), seeds)
@settings(max_examples=100)
def test_paths_of_a_batch(count: int, seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, 30) for _ in range(count)]
    choices = [[rng.randint(1, 9) for _ in range(len(tree))] for tree in trees]
    first_rows = [sum(map(len, trees[:index])) for index in range(count)]
    flat = array("q", [token for own in choices for token in own])
    places = pack_places(trees)
    rows, lengths = array("q", first_rows), array("q", bytes(8 * count))
    paths, emitted = array("i", bytes(4 * len(flat))), array("i", bytes(4 * len(flat)))
    core = load_core()
    assert core is not None
    core.accept(count, places, *[part.buffer_info()[0] for part in (rows, flat, paths, emitted, lengths)])
    start = 0
    for tree, own, length in zip(trees, choices, lengths, strict=True):
        expected = accept_greedy(tree, own)
        assert tuple(paths[start : start + length]) == expected.path
        assert emitted[start : start + length].tolist() == expected.token_ids(tree)
        start += length


@given(st.integers(1, 80), seeds)
@settings(max_examples=50)
def test_counts_of_trees(num_cycles: int, seed: int) -> None:
    rng = random.Random(seed)
    compiled, python = TreeCounts(), TreeCounts()
    for _ in range(num_cycles):
        tree = random_tree(rng, 12)
        path = tree.path(rng.randrange(len(tree)))
        num_emitted = rng.randint(1, len(path))
        for counts in (compiled, python):
            counts.note(tree, path[1 : num_emitted + 1], num_emitted)
        with mock.patch("draftwood.engine.tally.load_core", return_value=None):
            python.routes  # noqa: B018 - counts now
    names = [name for name in vars(TreeCounts) if isinstance(getattr(TreeCounts, name), property)]
    assert len(names) == 8
    for name in names:
        if name != "calibration":
            assert getattr(compiled, name) == getattr(python, name)
    one, other = compiled.calibration, python.calibration
    np.testing.assert_allclose(one.bins, other.bins)
    assert list(one.sources) == list(other.sources)
    for source in one.sources:
        np.testing.assert_allclose(one.sources[source], other.sources[source])
        assert one.error_of(source) == pytest.approx(other.error_of(source))
    assert sum(compiled.routes.values()) == num_cycles


# -- cutting ---------------------------------------------------------------------------------------------------------


def cut_both(
    trees: Sequence[DraftTree],
    limits: Sequence[tuple[int, int]],
    costs: PassCosts,
    lessons: Sequence[float],
    texts: Sequence[Sequence[int]],
) -> tuple[Cut, Cut]:
    """After the trees were followed by the tokens of ``texts``."""
    offers = Offers(trees, *zip(*limits, strict=True), lessons)
    one, other = AcceptanceRecord(0.9), AcceptanceRecord(0.9)
    compiled = [new_guesses(AcceptanceRecord(0.8, one), one) for _ in trees]
    with in_python():
        python = [new_guesses(AcceptanceRecord(0.8, other), other) for _ in trees]
    for guesses in (compiled, python):
        for each, tree, text in zip(guesses, trees, texts, strict=True):
            each.note(tree, text)
    return cut_trees(compiled, offers, costs), cut_trees(python, offers, costs)


@given(st.integers(1, 7), st.integers(0, 3), st.sampled_from([0.0, 1e-3, 0.2]), st.sampled_from([0.0, 0.1, 3.0]), seeds)
@settings(max_examples=150, deadline=None)
def test_trees_of_a_batch_are_cut_alike(count: int, others: int, slope: float, fixed: float, seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, 40) for _ in range(count)]
    limits = [(rng.randint(1, 40), rng.randint(0, 12)) for _ in trees]
    seconds = array("d", [1.0 + slope * n * rng.choice([1.0, 1.5]) for n in range(others + sum(map(len, trees)))])
    costs = PassCosts(seconds, others, 1.3 * others, fixed, rng.choice([0.0, 0.01]))
    lessons = [rng.choice([0.0, 0.02, 0.5]) for _ in trees]
    texts = [[*tree.path_tokens(rng.randrange(len(tree))), 999] for tree in trees]
    ours, theirs = cut_both(trees, limits, costs, lessons, texts)
    assert ours.trees == theirs.trees
    assert ours.expected == theirs.expected
    for tree, (room, max_depth) in zip(ours.trees, limits, strict=True):
        assert len(tree) <= room
        assert max(tree.depths) <= max_depth
        assert DraftTree(*tree._fields()) == tree  # valid


# -- drafting and learning -------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=30), st.booleans(), st.integers(1, 12))
def test_matches_are_the_same(blocks: list[list[int]], repeat: bool, limit: int) -> None:
    compiled, python = new_context(range(1, 5), repeat=repeat), ContextMatch(range(1, 5), repeat=repeat)
    assert isinstance(compiled, CompiledContextMatch)
    for block in blocks:
        compiled.extend(block)
        python.extend(block)
        assert compiled.match(limit) == python.match(limit)
    assert compiled.tokens == python.tokens
    if python.tokens:
        assert compiled.last == python.last


def test_long_text_is_indexed_again() -> None:
    rng = random.Random(0)
    compiled, python = new_context(range(2, 5)), ContextMatch(range(2, 5))
    for _ in range(600):
        block = [rng.randrange(12) for _ in range(rng.randint(1, 9))]
        compiled.extend(block)
        python.extend(block)
        assert compiled.match(8) == python.match(8)


def test_contexts_are_extended_together() -> None:
    texts = [[1, 2, 3, 1, 2], [7], [4, 4, 4]]
    together = [new_context([1, 2]) for _ in texts]
    extend_contexts(
        [each.index for each in together if isinstance(each, CompiledContextMatch)],
        Outcomes([DraftTree.root_only(0)] * 3, [(0,)] * 3, texts),
    )
    assert [each.tokens for each in together] == texts


@given(st.booleans(), st.sampled_from([0, 3, 100]), seeds)
@settings(max_examples=60)
def test_tables_learn_the_trees_of_a_batch(is_shared: bool, num_pairs: int, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    ours = [TransitionTable(V, K, num_pairs=num_pairs) for _ in range(1 if is_shared else count)]
    theirs = [TransitionTable(V, K, num_pairs=num_pairs) for _ in ours]
    for _ in range(6):
        trees = [random_token_tree(rng) for _ in range(count)]
        paths = [tree.path(rng.randrange(len(tree))) for tree in trees]
        befores = [rng.randrange(V) for _ in trees]
        rows = random_rows(rng, 2 + sum(map(len, trees)))
        first_rows = [1 + sum(map(len, trees[:index])) for index in range(count)]
        spines = list[CompiledSpines]()
        for index, (before, tree) in enumerate(zip(befores, trees, strict=True)):
            table = ours[0 if is_shared else index].compiled
            assert table is not None
            spines.append(CompiledSpines(SpineRules(), table, None, 0.0))
            spines[-1].start(before, tree.root)
        observe_spines(spines, Outcomes(trees, paths, [[0]] * count), first_rows, *rows)
        for index, (tree, path, first) in enumerate(zip(trees, paths, first_rows, strict=True)):
            own = [part[first : first + len(tree)] for part in rows]
            theirs[0 if is_shared else index].learn_tree(befores[index], tree.tokens, tree.parents, path, *own)
    for mine, other in zip(ours, theirs, strict=True):
        assert {name: part.tolist() for name, part in mine.arrays().items()} == {
            name: part.tolist() for name, part in other.arrays().items()
        }


def random_token_tree(rng: random.Random) -> DraftTree:
    tree = random_tree(rng, 12)
    return DraftTree.unchecked(
        tuple([token % V for token in tree.tokens]), tree.parents, tree.depths, tree.sources, tree.probs
    )


goose_options = st.fixed_dictionaries(
    {
        "spine": st.sampled_from(["context", "off"]),
        "min_ngram": st.integers(1, 2),
        "max_draft": st.integers(1, 12),
        "repeat": st.booleans(),
        "bypass": st.sampled_from(BYPASSES),
        "bypass_length": st.integers(1, 6),
        "consensus": st.sampled_from(CONSENSUS),
        "spine_share": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "spine_branches": st.booleans(),
        "branch_depth": st.integers(1, 4),
        "bigrams": st.booleans(),
        "smoothing": st.sampled_from([0.1, 0.3, 1.0]),
    }
)


@given(goose_options, st.integers(1, 4), seeds)
@settings(max_examples=60, deadline=None)
def test_goose_drafts_and_learns_alike(options: dict[str, Any], count: int, seed: int) -> None:
    """Requests of one batch in C, against single requests in Python, over several cycles."""
    rng = random.Random(seed)
    known = GooseOptions(**options, top_k=K)
    prompts = [[rng.randrange(V) for _ in range(rng.randint(2, 30))] for _ in range(count)]

    def begun(prompt: Sequence[int]) -> GooseDrafter:
        drafter = GooseDrafter(known, None, TransitionTable(V, K, num_pairs=40 if known.bigrams else 0))
        drafter.begin(DraftRequest(prompt, SamplingParams(), np.random.default_rng(0)))
        return drafter

    together = [begun(prompt) for prompt in prompts]
    with in_python():
        alone = [begun(prompt) for prompt in prompts]
    assert all(drafter.learns_in_batch for drafter in together)
    assert not any(drafter.learns_in_batch for drafter in alone)
    for _ in range(8):
        budgets = [rng.choice([1, 2, 9, 25]) for _ in prompts]
        trees = GooseDrafter.propose_batch(together, budgets)
        assert trees == [drafter.propose(budget) for drafter, budget in zip(alone, budgets, strict=True)]
        emitted = [[token % V for token in tokens_along(tree, rng)] for tree in trees]
        paths = [accept_path(tree, tokens) for tree, tokens in zip(trees, emitted, strict=True)]
        first_rows = [sum(map(len, trees[:index])) for index in range(count)]
        ids, scores = random_rows(rng, sum(map(len, trees)))
        top = TopRows(np.maximum(ids, 0), np.log(np.maximum(scores, 1e-3)), np.zeros(len(ids), np.float32))
        GooseDrafter.observe_batch(together, VerifiedBatch(Outcomes(trees, paths, emitted), first_rows, top))
        for drafter, tree, path, tokens, first in zip(alone, trees, paths, emitted, first_rows, strict=True):
            own = top.at(slice(first, first + len(tree)))
            drafter.observe(mock.Mock(tree=tree, path=path, emitted=tokens, best=lambda *_, own=own: own))
        assert [one.spine_rate for one in together] == [one.spine_rate for one in alone]
        assert [one.anchor for one in together] == [one.anchor for one in alone]


@given(
    st.sampled_from([TABLES, "context", "transition", "position", "position+context"]),
    st.booleans(),
    st.integers(1, 4),
    seeds,
)
@settings(max_examples=60, deadline=None)
def test_blend_drafts_and_learns_alike(sources: str, has_shared_table: bool, count: int, seed: int) -> None:
    """Requests of one batch in C, against single requests in Python, over several cycles."""
    rng = random.Random(seed)
    options = BlendOptions(sources=sources, top_k=K)
    prompts = [[rng.randrange(V) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    info = mock.Mock(vocab_size=V, num_parameters=1)
    info.name = "none"

    def begun() -> list[BlendDrafter]:
        shared, tables = BlendDrafter.share(options, info), [TransitionTable(V, K, num_pairs=40) for _ in prompts]
        drafters = [
            BlendDrafter(options, shared, tables[0 if has_shared_table else index]) for index in range(len(prompts))
        ]
        for drafter, prompt in zip(drafters, prompts, strict=True):
            drafter.begin(DraftRequest(prompt, SamplingParams(), np.random.default_rng(0)))
        return drafters

    together = begun()
    with in_python():
        alone = begun()
    assert all(drafter.learns_in_batch for drafter in together)
    assert not any(drafter.learns_in_batch for drafter in alone)
    for _ in range(8):
        budgets = [rng.choice([1, 2, 9, 25]) for _ in prompts]
        trees = BlendDrafter.propose_batch(together, budgets)
        assert trees == BlendDrafter.propose_batch(alone, budgets)
        emitted = [[token % V for token in tokens_along(tree, rng)] for tree in trees]
        paths = [accept_path(tree, tokens) for tree, tokens in zip(trees, emitted, strict=True)]
        first_rows = [sum(map(len, trees[:index])) for index in range(count)]
        ids, scores = random_rows(rng, sum(map(len, trees)))
        top = TopRows(np.maximum(ids, 0), np.log(np.maximum(scores, 1e-3)), np.zeros(len(ids), np.float32))
        BlendDrafter.observe_batch(together, VerifiedBatch(Outcomes(trees, paths, emitted), first_rows, top))
        for drafter, tree, path, tokens, first in zip(alone, trees, paths, emitted, first_rows, strict=True):
            own = top.at(slice(first, first + len(tree)))
            drafter.observe(mock.Mock(tree=tree, path=path, emitted=tokens, best=lambda *_, own=own: own))
        assert [one.anchor for one in together] == [one.anchor for one in alone]
    learned = [next(iter(group[0].shared.states.values())).learned for group in (together, alone)]
    np.testing.assert_array_equal(learned[0].weights, learned[1].weights)


def accept_path(tree: DraftTree, emitted: Sequence[int]) -> list[int]:
    path = [0]
    for token in emitted[:-1]:
        child = tree.child_with(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path
