"""Lookahead decoding: the mask of the window, the source of its n-grams, the limits of the pool, exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, VerifiedTree
from draftwood.drafters.lookahead import LookaheadDrafter, LookaheadOptions, fit_window
from draftwood.errors import OptionError
from draftwood.sources.lookahead import JacobiWindow, NgramPool
from draftwood.tree import DraftTree, TreeBuilder
from draftwood.tree.layout import ancestor_mask
from draftwood.verify import accept_greedy
from tests.conftest import logits_after
from tests.tools.engine import (
    PROMPTS,
    llm,  # noqa: F401 - fixtures
    make_llm,
    reference,
)

# -- the pool --------------------------------------------------------------------------------------------------------


def test_pool_returns_latest_first_without_duplicates() -> None:
    pool = NgramPool(per_token=3, limit=100)
    for last in (1, 2, 3, 1):
        pool.add((7, last))
    pool.add((8, 0))
    assert pool.starting_with(7) == [(7, 1), (7, 3), (7, 2)]
    pool.add((7, 9))
    assert pool.starting_with(7) == [(7, 9), (7, 1), (7, 3)]  # the oldest was evicted
    assert pool.starting_with(5) == []
    assert len(pool) == 4


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1)), max_size=60),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_pool_is_bounded_and_forgets_the_oldest(ngrams: list[tuple[int, ...]], per_token: int, limit: int) -> None:
    pool = NgramPool(per_token, limit)
    kept: list[tuple[int, ...]] = []  # oldest first
    for ngram in ngrams:
        pool.add(ngram)
        kept = [old for old in kept if old != ngram] + [ngram]
        siblings = [old for old in kept if old[0] == ngram[0]]
        if len(siblings) > per_token:
            kept.remove(siblings[0])
        kept = kept[-limit:]
        assert len(pool) == len(kept)
        for token in range(4):
            assert pool.starting_with(token) == [old for old in reversed(kept) if old[0] == token]


def test_pool_reads_the_end_of_a_long_text() -> None:
    pool = NgramPool(per_token=2, limit=3)
    pool.add_text([1, 2], 3)
    assert len(pool) == 0
    pool.add_text(range(10), 3)
    assert [pool.starting_with(token) for token in (4, 5, 6, 7)] == [[], [(5, 6, 7)], [(6, 7, 8)], [(7, 8, 9)]]


# -- the window ------------------------------------------------------------------------------------------------------


def window_of(columns: Sequence[tuple[int, ...]], depth: int) -> JacobiWindow:
    window = JacobiWindow([0] * len(columns), depth)
    window.columns = list(columns)
    return window


def placed(window: JacobiWindow, root: int = 99) -> DraftTree:
    builder = TreeBuilder(root)
    window.place(builder, "window", 0.1)
    return builder.build()


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (4, 1), (1, 3), (5, 4)])
def test_window_nodes_follow_the_lookahead_mask(width: int, depth: int) -> None:
    cells = [(row, column) for column in range(width) for row in range(depth)]
    window = window_of([tuple(row * 100 + column for row in range(depth)) for column in range(width)], depth)
    tree = placed(window, root=-1)
    node = {(0, -1): 0} | {(token // 100, token % 100): i for i, token in enumerate(tree.tokens) if i}
    mask = ancestor_mask(tree.parents)
    assert len(tree) == 1 + width * depth == 1 + len(window)
    for row, column in cells:
        seen = {(0, -1)} | {(r, c) for r, c in cells if (r == 0 and c <= column) or (r <= row and c == column)}
        assert set(np.flatnonzero(mask[node[row, column]])) == {node[cell] for cell in seen}
        assert tree.depths[node[row, column]] == 1 + column + row


columns_of_a_window = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)


@given(columns_of_a_window)
def test_equal_guesses_share_a_node_and_are_found_again(columns: list[tuple[int, ...]]) -> None:
    window = window_of(columns, 4)
    tree = placed(window)
    assert len(tree) <= 1 + len(window)
    for index, (column, end) in enumerate(zip(columns, window.last_nodes(tree), strict=True)):
        assert end is not None
        assert tree.path_tokens(end) == [first for first, *_ in columns[: index + 1]] + list(column[1:])


@given(columns_of_a_window, st.data())
def test_cut_tree_keeps_correct_last_nodes(columns: list[tuple[int, ...]], data: st.DataObject) -> None:
    window = window_of(columns, 4)
    whole = placed(window)
    cut = whole.first(data.draw(st.integers(1, len(whole)))).limit_depth(data.draw(st.integers(0, 10)))
    paths = {tuple(cut.path_tokens(node)) for node in range(len(cut))}
    for before, after in zip(window.last_nodes(whole), window.last_nodes(cut), strict=True):
        wanted = whole.path_tokens(before or 0)
        if after is None:
            assert tuple(wanted) not in paths
        else:
            assert cut.path_tokens(after) == wanted


def test_columns_fill_then_shift_and_wait_for_missing_answers() -> None:
    window = JacobiWindow([1, 2], depth=2)
    assert window.advance([10, None]) == []
    assert window.columns == [(1, 10), (2,)]
    assert window.advance([11, 20]) == [(1, 10, 11)]
    assert window.columns == [(10, 11), (2, 20)]
    assert window.advance([None, 21]) == [(2, 20, 21)]
    assert window.columns == [(10, 11), (20, 21)]
    window.shrink(width=1, depth=1)
    assert window.columns == [(11,)]


# -- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "shape"),
    [(1, (0, 4)), (3, (0, 4)), (4, (1, 1)), (8, (1, 3)), (9, (1, 4)), (60, (7, 4)), (121, (15, 4)), (500, (15, 4))],
)
def test_the_window_takes_half_of_a_small_budget(budget: int, shape: tuple[int, int]) -> None:
    assert fit_window(LookaheadOptions(), budget) == shape


def test_window_uses_budget_left_by_candidates() -> None:
    assert fit_window(LookaheadOptions(guesses=2), 60) == (12, 4)  # 59 positions less two candidates of four


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"ngram": 1}, {"guesses": 0}, {"pool_limit": 0}, {"window": 2.5}, {"prompt_ngrams": 1}]
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        LookaheadOptions(**wrong)  # type: ignore[arg-type]


# -- a scripted target -----------------------------------------------------------------------------------------------

SIZE = 101  # size of the scripted vocabulary
Script = Callable[[Sequence[int]], int]


def by_last_token(text: Sequence[int]) -> int:
    """One cycle through all tokens but one: no token repeats within a hundred."""
    return text[-1] * 2 % SIZE


def by_whole_text(text: Sequence[int]) -> int:
    """One token more or less gives another answer."""
    value = len(text)
    for token in text:
        value = (value * 31 + token + 7) % 10_007
    return value % SIZE


class Cycle(NamedTuple):
    drafter: LookaheadDrafter
    text: list[int]  # before the cycle, the root last
    columns: list[tuple[int, ...]]  # before the cycle
    verified: VerifiedTree


def cycles(
    script: Script, options: LookaheadOptions, prompt: list[int], budget: int, cuts: Sequence[int] = ()
) -> Iterator[Cycle]:
    """Run the drafter against a script; cycle i verifies only the first ``cuts[i]`` nodes."""
    drafter = LookaheadDrafter(options, None)
    drafter.begin(DraftRequest(prompt, SamplingParams(), np.random.default_rng(3)))
    text, index = list(prompt), 0
    while True:
        tree = drafter.propose(budget)
        assert len(tree) <= budget
        assert tree.tokens[0] == text[-1]
        tree = tree.first(cuts[index]) if index < len(cuts) else tree
        choices = [script([*text, *tree.path_tokens(node)]) for node in range(len(tree))]
        logits = torch.nn.functional.one_hot(torch.tensor(choices), SIZE).float()
        accepted = accept_greedy(tree, choices)
        verified = VerifiedTree(tree, logits, logits.argmax(-1).tolist(), accepted.path, accepted.token_ids(tree), None)
        columns = list(drafter._window.columns) if drafter._window else []
        drafter.observe(verified)
        yield Cycle(drafter, text, columns, verified)
        text, index = [*text, *verified.emitted], index + 1


def test_jacobi_ngrams_alone_run_ahead_of_a_text_that_never_repeats() -> None:
    prompt = np.random.default_rng(0).permutation(np.arange(1, SIZE))[:20].tolist()
    emitted: list[int] = []
    num_cycles = 0
    for cycle in cycles(by_last_token, LookaheadOptions(prompt_ngrams=False), prompt, 60):
        emitted += cycle.verified.emitted
        num_cycles += 1
        if len(emitted) > 80:
            break
    assert len(set(emitted)) == len(emitted)
    assert len(emitted) / num_cycles > 1.3


@given(
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=8),
    st.integers(1, 40),
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(2, 5),
)
@settings(max_examples=60, deadline=None)
def test_pooled_ngrams_end_with_choice_after_their_column(
    prompt: list[int], budget: int, cuts: list[int], ngram: int
) -> None:
    """For any verified part of a tree; the script depends on every token before a node."""
    options = LookaheadOptions(ngram=ngram, prompt_ngrams=False, window=5, guesses=4)
    run = cycles(by_whole_text, options, prompt, budget, cuts)
    depth = fit_window(options, budget).depth
    pooled: set[tuple[int, ...]] = set()
    for number, cycle in zip(range(12), run, strict=False):
        firsts = [column[0] for column in cycle.columns]
        assert cycle.drafter._window is not None
        moved = zip(cycle.columns, cycle.drafter._window.columns, strict=True)
        for index, (before, after) in enumerate(moved):
            answer = by_whole_text([*cycle.text, *firsts[: index + 1], *before[1:]])
            assert after == (*before, answer)[-depth:] or (number < len(cuts) and after == before)
            if len(before) == depth:
                pooled.add((*before, answer))
        assert set(cycle.drafter._pool._all) <= pooled


def test_text_enters_the_pool_if_enabled() -> None:
    prompt = [5, 6, 7, 8]
    for wanted in (True, False):
        options = LookaheadOptions(prompt_ngrams=wanted, ngram=3)
        first = next(cycles(by_whole_text, options, prompt, 1))  # without a window, only the text
        text = [*first.text, *first.verified.emitted]
        expected = {tuple(text[start : start + 3]) for start in range(len(text) - 2)} if wanted else set()
        assert set(first.drafter._pool._all) == expected


def test_candidates_keep_their_tag_where_the_window_agrees() -> None:
    drafter = LookaheadDrafter(LookaheadOptions(ngram=3, window=2, guesses=8), None)
    drafter.begin(DraftRequest([4, 4, 4], SamplingParams(), np.random.default_rng(0)))
    for token in range(10, 18):
        drafter._pool.add((4, token, 0))
    drafter._pool.add((4, 5, 6))
    drafter._first_row = [10 + 1, 3]  # the oldest candidate still in the pool, and a guess of the window
    tree = drafter.propose(60)
    assert tree.tokens[:3] == (4, 5, 6)  # the latest first
    tags = dict(zip((tuple(tree.path_tokens(node)) for node in range(len(tree))), tree.sources, strict=True))
    assert tags[11,] == tags[11, 0] == "pool"
    assert tags[11, 3] == "window"
    assert max(tree.depths) == 2


# -- the tiny model --------------------------------------------------------------------------------------------------


class RecordingDrafter(LookaheadDrafter):
    """Records the text and the columns before each cycle, and the n-grams the cycle pooled."""

    records: list[tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]]]] = []  # noqa: RUF012 - for the test

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._text = list(request.prompt_ids)

    def observe(self, verified: VerifiedTree) -> None:
        assert self._window is not None
        columns = list(self._window.columns)
        self._pool = NgramPool(100, 100)
        super().observe(verified)
        self.records.append((self._text, columns, list(self._pool._all)))
        self._text = [*self._text, *verified.emitted]


def test_ngrams_are_the_models_own_continuations_of_the_columns() -> None:
    RecordingDrafter.records = []
    options = {"window": 4, "ngram": 4, "prompt_ngrams": False}
    llm = make_llm(drafter=RecordingDrafter, drafter_options=options, budget=40)
    llm.generate("the cat sat", SamplingParams(max_tokens=24, seed=1, ignore_eos=True))
    num_ngrams = 0
    for text, columns, pooled in RecordingDrafter.records[:12]:  # before the end of the output cuts the trees
        expected = []
        for index, column in enumerate(columns):
            if len(column) == 3:
                seen = [*text, *(other[0] for other in columns[: index + 1]), *column[1:]]
                expected.append((*column, int(logits_after(llm._engine.target, seen)[-1].argmax())))
        assert set(pooled) == set(expected)
        num_ngrams += len(expected)
    assert num_ngrams >= 4 * 8  # two cycles fill the window, every further one gives four


# -- exactness -------------------------------------------------------------------------------------------------------


def test_greedy_output_is_plain_decoding(llm: LLM) -> None:
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=40), drafter=LookaheadDrafter)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == reference(llm, prompt, 40)


@pytest.mark.parametrize("budget", [*range(1, 13), 60, "auto"])
def test_every_budget_gives_plain_output(budget: int | str) -> None:
    with make_llm(budget=budget) as llm:
        params = SamplingParams(max_tokens=30, seed=2)
        plain = llm.generate(PROMPTS[:4], params)
        drafted = llm.generate(PROMPTS[:4], params, drafter=LookaheadDrafter)
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
        if budget != "auto":
            assert all(c.stats.mean_tree_size <= budget for c in drafted)


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_a_seed_gives_the_same_text_as_plain_decoding(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.95, repetition_penalty=1.1, seed=11)
    plain = llm.generate(PROMPTS, params)
    drafted = llm.generate(PROMPTS, params, drafter=LookaheadDrafter)
    assert [c.token_ids for c in plain] == [c.token_ids for c in drafted]


def test_batch_equals_one_by_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params, drafter=LookaheadDrafter)
    alone = [llm.generate(prompt, params, drafter=LookaheadDrafter)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.stats.drafted_nodes for c in together] == [c.stats.drafted_nodes for c in alone]


def test_guesses_of_pool_and_window_are_accepted() -> None:
    with make_llm(budget=60) as llm:
        params = SamplingParams(max_tokens=120, seed=3, ignore_eos=True)
        stats = [c.stats for c in llm.generate(PROMPTS, params, drafter=LookaheadDrafter)]
    accepted = sum((s.accepted_by_source for s in stats), start=type(stats[0].accepted_by_source)())
    assert set(accepted) == {"pool", "window"}
    assert sum(s.output_tokens for s in stats) / sum(s.cycles for s in stats) > 1.1
