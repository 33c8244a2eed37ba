"""Blended trees: C and Python agree, trees are best-first and within limits, acceptance is learned."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.compiled import TAIL, CompiledBlend, Harvest, Hints, Learned, load_core, state_of
from draftwood.growth import blend as blend_module
from draftwood.growth.blend import BIAS_STEP, DECAY, STEP, Blend, BlendLimits, PythonBlend, new_blend
from draftwood.growth.priors import NO_PRIORS, as_json, new_learned, parse_priors, shipped_priors
from draftwood.sources import Datastore, build_datastore
from draftwood.sources.hints import (
    DatastoreHints,
    DraftedHints,
    PlaceHints,
    PositionHints,
    SuccessorHints,
    drafted,
    positions,
)
from draftwood.sources.hints import text as text_hints
from draftwood.sources.hints.text import MAX_PLACES, ORDERS, PythonPlaces
from draftwood.sources.transitions import TransitionTable
from draftwood.tree import DraftTree

VOCAB = 60
needs_core = pytest.mark.skipif(load_core() is None, reason="no compiler")


class FixedHints:
    """The same hints after every text."""

    def __init__(self, name: str, tokens: Sequence[int], kinds: Sequence[int], priors: Sequence[float]) -> None:
        self.name, self.priors = name, priors
        self._hints = Hints(tokens, kinds, 0)

    def extend(self, tokens: Sequence[int]) -> None: ...

    def learn(self, seen: Harvest) -> None: ...

    def look(self, _tail: Sequence[int], _depth: int) -> Hints | None:
        return self._hints if self._hints.tokens else None

    def compiled(self) -> None:
        return None


class PythonOnly(SuccessorHints):
    def compiled(self) -> None:
        return None


class AllHints(NamedTuple):
    places: PlaceHints
    positions: PositionHints
    drafted: DraftedHints


def make_hints() -> AllHints:
    return AllHints(PlaceHints(), PositionHints(), DraftedHints("head"))


def python_hints(monkeypatch: pytest.MonkeyPatch) -> AllHints:
    with monkeypatch.context() as patch:
        for module in (text_hints, positions, drafted):
            patch.setattr(module, "load_core", lambda: None)
        return make_hints()


def random_harvest(tree: DraftTree, rng: random.Random, width: int = 6) -> Harvest:
    """A verified tree with an accepted path and random rows."""
    path = [0]
    while (below := tree.children_of(path[-1])) and rng.random() < 0.6:
        path.append(rng.choice(below))
    rows = np.random.default_rng(rng.randrange(1 << 30))
    ids = np.array([rows.permutation(VOCAB)[:width] for _ in tree.tokens], np.int32)
    scores = np.sort(rows.dirichlet([0.3] * (width + 1), size=len(tree))[:, :width], axis=1)[:, ::-1]
    return Harvest(tree, path, len(path), ids, np.ascontiguousarray(scores, np.float32))


def random_text(rng: random.Random, size: int) -> list[int]:
    text = [rng.choice([rng.randrange(VOCAB), rng.randrange(6)]) for _ in range(size)]
    return [*text, *text[size // 4 : size // 2]]


def filled_table(text: Sequence[int], seed: int) -> TransitionTable:
    rng = np.random.default_rng(seed)
    table = TransitionTable(VOCAB, 8, num_pairs=200)
    ids = np.array([rng.permutation(VOCAB)[:8] for _ in text[1:]], np.int32)
    scores = np.sort(rng.dirichlet([0.3] * 9, size=len(text) - 1)[:, :8], axis=1)[:, ::-1]
    table.learn(text[:-1], text[1:], ids, np.ascontiguousarray(scores, np.float32))
    return table


def random_store(rng: random.Random, text: Sequence[int]) -> Datastore:
    """Parts of the text, frequent ones many times, and tokens that the target does not have."""
    starts = [rng.choice([0, 100, rng.randrange(len(text))]) for _ in range(300)]
    documents = [[*text[start : start + rng.randrange(1, 40)], *[VOCAB] * (rng.random() < 0.1)] for start in starts]
    built = build_datastore(documents, vocab_size=VOCAB + 1, tokenizer="")
    return Datastore(replace(built.info, vocab_size=VOCAB), built.tokens, built.suffixes)


@needs_core
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("with_callback", [False, True])
def test_c_and_python_agree(seed: int, with_callback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = load_core()
    assert core is not None
    rng = random.Random(seed)
    text = random_text(rng, 1500)
    table = filled_table(text, seed)
    fast, slow = make_hints(), python_hints(monkeypatch)
    fast.places.extend(text)
    slow.places.extend(text)
    own = PythonOnly(table) if with_callback else SuccessorHints(table)
    store = DatastoreHints(random_store(rng, text))
    sources = [*fast, own, store]
    learned = [new_learned(sources) for _ in range(2)]
    compiled = CompiledBlend(core, sources, learned[0], DECAY, STEP, BIAS_STEP)
    python = PythonBlend([*slow, PythonOnly(table), store], learned[1])
    for _ in range(30):
        tail = text[: rng.randrange(1, len(text))][-40:]
        limits = rng.choice([1, 2, 5, 16, 60]), rng.choice([1, 3, 40]), rng.choice([0.0, 1e-3, 0.2])
        predict(tail, rng, fast.drafted, slow.drafted)
        tree = compiled.tree(tail, *limits)
        assert tree == python.tree(tail, *limits)
        depth = rng.randrange(4)
        assert compiled.guesses(tail, depth) == python.guesses(tail, depth)
        emitted = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        compiled.learn(tail, emitted)
        python.learn(tail, emitted)
        assert_same(*learned)
        seen = random_harvest(tree, rng)
        for hints in (*fast, *slow):
            hints.learn(seen)


def predict(tail: list[int], rng: random.Random, *into: DraftedHints) -> None:
    """Predictions after the text and after a few continuations of it, some of them empty."""
    for hints in into:
        hints.clear()
    for below in ([], [1], [2], [1, 3]):
        ids = np.array(rng.sample(range(VOCAB), 8), np.int32)
        scores = np.array(sorted((rng.random() ** 3 for _ in ids), reverse=True), np.float32) * rng.choice([0, 0.5, 1])
        scores[rng.randrange(1, 9) :] = 0.0
        for hints in into:
            hints.add([*tail, *below], ids, scores)


def assert_same(one: Learned, other: Learned) -> None:
    for ours, theirs in zip(
        [*one.logits, *one.trials, *one.hits], [*other.logits, *other.trials, *other.hits], strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(one.weights, other.weights)


@given(
    text=st.lists(st.integers(0, 5), min_size=2, max_size=80),
    budget=st.integers(1, 40),
    depth=st.integers(1, 8),
    least=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_trees_are_within_limits(text: list[int], budget: int, depth: int, least: float) -> None:
    places = PlaceHints()
    places.extend(text)
    sources = [places, FixedHints("fixed", [7, 8], [1, 2], [0.01, 0.5, 0.3])]
    tree = Blend(sources, new_learned(sources)).tree(text, BlendLimits(budget, depth, least))
    assert tree.tokens[0] == text[-1]
    assert len(tree) <= budget
    assert max(tree.depths) <= depth
    values = [1.0]
    for node in range(1, len(tree)):
        values.append(values[tree.parents[node]] * tree.probs[node])
        siblings = [tree.tokens[other] for other in tree.children_of(tree.parents[node])]
        assert len(set(siblings)) == len(siblings)
        assert values[node] >= least - 1e-12
    assert values[1:] == sorted(values[1:], reverse=True)
    for node in range(len(tree)):
        assert sum(tree.probs[child] for child in tree.children_of(node)) <= 1.0 + 1e-9


def test_agreement_is_worth_more_than_either() -> None:
    priors = [0.02, 0.4]
    sources = [FixedHints("one", [3, 4], [1, 1], priors), FixedHints("other", [4, 5], [1, 1], priors)]
    tree = Blend(sources, new_learned(sources)).tree([1, 2], BlendLimits(4, 1, 0.0))
    assert tree.tokens == (2, 4, 3, 5)
    assert tree.sources[1:] == ("one+other", "one", "other")
    assert tree.probs[1] > 2 * tree.probs[2]


def test_learns_which_source_is_right(make_pair: Callable[[], list[FixedHints]]) -> None:
    sources = make_pair()
    learned = new_learned(sources)
    blend = Blend(sources, learned)
    for number in range(300):
        blend.learn([1, 2], [5 if number % 4 else 9])  # the second source is right in three of four cases
    tree = blend.tree([1, 2], BlendLimits(3, 1, 0.0))
    chances = dict(zip(tree.tokens[1:], tree.probs[1:], strict=True))
    assert chances[5] == pytest.approx(0.75, abs=0.08)
    assert chances.get(3, 0.0) < 0.05


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_core), False])
def test_chances_stay_if_nothing_is_learned(native: bool, make_pair: Callable[[], list[FixedHints]]) -> None:
    sources = make_pair()
    fixed, first = new_learned(sources, learns=False), new_learned(sources)
    blend = new_blend(sources, fixed) if native else PythonBlend(sources, fixed)
    blend.learn([1, 2], [5] * 50)
    assert_same(fixed, first)
    blend = new_blend(sources, first) if native else PythonBlend(sources, first)
    blend.learn([1, 2], [5] * 50)
    assert first.hits[1][1] > fixed.hits[1][1] + 10


@pytest.fixture
def make_pair() -> Callable[[], list[FixedHints]]:
    priors = [0.02, 0.4]
    return lambda: [FixedHints("one", [3], [1], priors), FixedHints("other", [5], [1], priors)]


def test_silence_is_evidence() -> None:
    """A token that an informed source does not list is less likely than one about which it knows nothing."""
    priors = [0.01, 0.4]
    silent = [FixedHints("one", [3], [1], priors), FixedHints("other", [5], [1], priors)]
    ignorant = [FixedHints("one", [3], [1], priors), FixedHints("other", [], [], priors)]
    trees = [Blend(pair, new_learned(pair)).tree([1, 2], BlendLimits(2, 1, 0.0)) for pair in (silent, ignorant)]
    assert trees[0].probs[1] < trees[1].probs[1]


@given(text=st.lists(st.integers(0, 3), max_size=60), tail=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_places_are_those_of_a_search(text: list[int], tail: list[int]) -> None:
    index = PythonPlaces()
    index.extend(text)
    lengths = {}
    for place in range(len(text)):
        matched = 0
        while matched < min(len(tail), place, TAIL) and tail[-1 - matched] == text[place - 1 - matched]:
            matched += 1
        lengths[place] = matched
    expected, longer = [], TAIL + 1
    for size in ORDERS:
        latest = [place for place in sorted(lengths, reverse=True) if lengths[place] >= size][:MAX_PLACES]
        expected += [(text[place], lengths[place]) for place in latest if lengths[place] < longer]
        longer = size if len(tail) >= size else longer
    assert index.find(tail) == expected


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_core), False])
def test_rejected_branches_predict_the_position(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree had 5 -> 6; the text went on with 9, and 6 is still a good guess for the token after it."""
    hints = (make_hints() if compiled else python_hints(monkeypatch)).positions
    if not compiled:
        monkeypatch.setattr(blend_module, "load_core", lambda: None)
    tree = DraftTree((1, 5, 6), (-1, 0, 1), (0, 1, 2), ("root", "a", "a"), (1.0, 0.5, 0.5))
    ids, scores = (
        np.array([[9, 8], [6, 7], [3, 4]], np.int32),
        np.array([[0.6, 0.1], [0.7, 0.2], [0.9, 0.0]], np.float32),
    )
    hints.learn(Harvest(tree, [0], 1, ids, scores))
    sources = [hints]
    grown = Blend(sources, new_learned(sources)).tree([1, 9], BlendLimits(4, 2, 0.0))
    pairs = zip(grown.tokens[1:], grown.parents[1:], strict=True)
    assert {(token, grown.tokens[parent]) for token, parent in pairs} == {(6, 9), (7, 9), (3, 6)}


def test_positions_move_with_the_text() -> None:
    """Predictions of earlier trees stay where the last one has none."""
    hints = PositionHints()
    tree = DraftTree((1, 5, 6, 7), (-1, 0, 1, 2), (0, 1, 2, 3), ("root", *"aaa"), (1.0, 0.5, 0.5, 0.5))
    ids, scores = np.array([[9], [6], [3], [4]], np.int32), np.full((4, 1), 0.8, np.float32)
    hints.learn(Harvest(tree, [0], 1, ids, scores))
    hints.learn(Harvest(DraftTree.root_only(9), [0], 1, ids[:1], scores[:1]))
    sources = [hints]
    tree = Blend(sources, new_learned(sources)).tree([9, 2], BlendLimits(8, 8, 0.0))
    assert tree.tokens == (2, 3, 4)


def test_measured_priors_fit_their_sources() -> None:
    """The shipped priors are used by all sources, and for every state of a guess."""
    sources = [*make_hints(), SuccessorHints(TransitionTable(VOCAB, 4))]
    priors = shipped_priors()
    assert {name: len(rates) for name, rates in priors.rates.items()} == {s.name: len(s.priors) for s in sources}
    assert len(priors.weights) == 3 ** len(sources) - 2 ** len(sources)  # at least one source hints at it
    learned = new_learned(sources)
    for number, source in enumerate(sources):
        rates = np.array(priors.rates[source.name])
        np.testing.assert_allclose(learned.logits[number], np.log(rates / (1 - rates)))
    assert parse_priors(as_json(priors)) == priors


def test_priors_go_by_name_not_by_order() -> None:
    hints = make_hints()
    forward, backward = (new_learned(list(order)) for order in (hints, hints[::-1]))
    one, other = state_of(0b011, 0b001), state_of(0b110, 0b100)  # the first source hints at it, the second is silent
    np.testing.assert_array_equal(forward.weights[:, one, [0, 1, 2]], backward.weights[:, other, [0, 3, 2]])
    assert not np.array_equal(forward.weights[:, one], forward.weights[:, state_of(0b011, 0b011)])


def test_unknown_sources_start_from_their_own_rates() -> None:
    learned = new_learned([FixedHints("other", [5], [1], [0.02, 0.4])])
    np.testing.assert_allclose(learned.hits[0] / learned.trials[0], [0.02, 0.4])
    np.testing.assert_array_equal(learned.weights[:, state_of(1, 1)], [[0.0, 1.0]] * 2)


def test_outcomes_say_which_guesses_were_right() -> None:
    sources = [FixedHints("one", [3, 4], [1, 2], [0.02, 0.4, 0.3]), FixedHints("other", [4], [1], [0.02, 0.4])]
    outcomes = Blend(sources, new_learned(sources)).outcomes([1, 2], [4, 9])
    assert outcomes == [[(1, [1, 0], False), (3, [2, 1], True)], [(1, [1, 0], False), (3, [2, 1], False)]]


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_core), False])
def test_weights_go_by_who_hints_and_whether_one_is_sure(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(blend_module, "load_core", lambda: None)
    for rate, row in ((0.5, 0), (0.9, 1)):
        sources = [FixedHints("one", [3], [1], [0.02, rate]), FixedHints("other", [4], [1], [0.02, 0.4])]
        learned = new_learned(sources, NO_PRIORS)
        learned.weights[row, state_of(0b11, 0b01)] = [-3.0, 0.0, 0.0]
        tree = Blend(sources, learned).tree([1, 2], BlendLimits(3, 1, 0.0))
        chances = dict(zip(tree.tokens[1:], tree.probs[1:], strict=True))
        assert chances[3] == pytest.approx(1 / (1 + np.exp(3.0)))
        odds = 0.6 * np.log(0.4 / 0.6) + 0.6 * np.log(0.02 / 0.98)
        assert chances[4] == pytest.approx(1 / (1 + np.exp(-odds)))
