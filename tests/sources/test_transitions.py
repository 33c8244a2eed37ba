"""The transition table, and how its drafters learn from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree, make_factory
from draftwood.drafters.recycling import RecyclingDrafter, RecyclingOptions
from draftwood.errors import OptionError
from draftwood.sources.rowtable import NOTHING, IdRows, ScoreRows
from draftwood.sources.transitions import SuccessorArrays, TransitionTable
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import VOCAB_SIZE
from draftwood.tree import DraftTree, TreeBuilder
from tests.conftest import logits_after
from tests.tools.engine import make_llm

V, K = 20, 3
OVER_TRANSITIONS = ["goose", "recycling", "iso3", "iso5", "sequoia", "sam+recycling"]

contexts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40)


def rows(*firsts: int) -> tuple[IdRows, ScoreRows]:
    """For each number a row that starts with it."""
    ids = (np.array(firsts, dtype=np.int32)[:, None] + np.arange(K, dtype=np.int32)) % V
    return ids, np.tile(np.array([0.5, 0.3, 0.1], dtype=np.float32), (len(firsts), 1))


def best(table: TransitionTable, previous: int, token: int) -> int | None:
    tokens, _ = table.successors(previous, token)
    return tokens[0] if tokens else None


# -- the table -------------------------------------------------------------------------------------------------------


def test_pair_takes_precedence_over_token() -> None:
    table = TransitionTable(V, K, num_pairs=10)
    table.learn([1, 2], [5, 5], *rows(10, 11))
    tokens, scores = table.successors(1, 5)
    assert tokens == [10, 11, 12]
    assert scores == pytest.approx([0.5, 0.3, 0.1])
    assert best(table, 2, 5) == 11
    assert best(table, 3, 5) == 11  # no such pair: the latest row of the token
    assert best(table, 5, 1) is None  # a pair has an order
    assert table.num_pairs == 2


def test_only_the_token_counts_without_pairs() -> None:
    table = TransitionTable(V, K)
    table.learn([1, 2], [5, 5], *rows(10, 11))
    assert best(table, 1, 5) == best(table, 2, 5) == 11
    assert table.num_pairs == 0


def test_unknown_tokens_have_no_successors() -> None:
    assert TransitionTable(V, K, num_pairs=4).successors(1, 2) == ([], [])


@given(contexts)
def test_table_equals_two_dictionaries(contexts: list[tuple[int, int]]) -> None:
    table = TransitionTable(V, K, num_pairs=100)
    pairs: dict[tuple[int, int], int] = {}
    singles: dict[int, int] = {}
    for start in range(0, len(contexts), 7):
        part = contexts[start : start + 7]
        firsts = [(start + i) % V for i in range(len(part))]
        table.learn([p for p, _ in part], [t for _, t in part], *rows(*firsts))
        pairs.update(zip(part, firsts, strict=True))
        singles.update((token, first) for (_, token), first in zip(part, firsts, strict=True))
    for previous in range(6):
        for token in range(6):
            assert best(table, previous, token) == pairs.get((previous, token), singles.get(token))


def test_oldest_pairs_are_evicted() -> None:
    table = TransitionTable(V, K, num_pairs=2)
    table.learn([1, 2, 3], [5, 5, 5], *rows(10, 11, 12))
    assert best(table, 1, 5) == 12
    assert best(table, 2, 5) == 11
    assert table.num_pairs == 2


def initial_successors() -> SuccessorArrays:
    ids, scores = rows(*range(V))
    ids[7], scores[7] = NOTHING, 0.0
    return SuccessorArrays(ids, scores)


def test_a_table_can_start_from_known_successors() -> None:
    initial = initial_successors()
    table = TransitionTable(V, K, num_pairs=4, initial=initial)
    assert table.successors(1, 4)[0] == [4, 5, 6]
    assert table.successors(1, 7) == ([], [])
    table.learn([1], [4], *rows(15))
    assert best(table, 1, 4) == best(table, 9, 4) == 15
    assert best(table, 1, 5) == 5
    assert (initial.ids == initial_successors().ids).all()  # others start from it as well


def test_initial_successors_are_truncated_to_top_k() -> None:
    table = TransitionTable(V, 2, initial=initial_successors())
    assert table.successors(0, 4)[0] == [4, 5]


@pytest.mark.parametrize("num_pairs", [0, 10])
def test_learned_entries_can_be_restored(num_pairs: int) -> None:
    table = TransitionTable(V, K, num_pairs=num_pairs, initial=initial_successors())
    table.learn([1, 2, 1], [5, 5, 6], *rows(10, 11, 12))
    restored = TransitionTable(V, K, num_pairs=num_pairs)
    assert restored.layout == table.layout
    restored.restore(table.arrays())
    assert restored.num_pairs == table.num_pairs
    for previous, token in ((1, 5), (2, 5), (3, 5), (1, 6), (0, 6)):
        assert restored.successors(previous, token) == table.successors(previous, token)
    assert restored.successors(0, 4) == ([], [])  # an initial row, not a learned one


def test_layout_identifies_compatible_tables() -> None:
    tables = [
        TransitionTable(V, K),
        TransitionTable(V + 1, K),
        TransitionTable(V, K + 1),
        TransitionTable(V, K, num_pairs=5),
    ]
    assert len({table.layout for table in tables}) == 4
    assert TransitionTable(V, K, num_pairs=5).layout == TransitionTable(V, K, num_pairs=6).layout


@pytest.mark.parametrize(("name", "token"), [("tokens", V), ("tokens", -2), ("ids", V), ("pairs.ids", 1 << 30)])
def test_unknown_tokens_are_refused(name: str, token: int) -> None:
    table = TransitionTable(V, K, num_pairs=4)
    table.learn([1], [5], *rows(10))
    arrays = table.arrays()
    arrays[name].flat[0] = token
    with pytest.raises(ValueError, match="tokens that the model does not have"):
        TransitionTable(V, K, num_pairs=4).restore(arrays)


def test_a_file_with_padding_for_a_token_is_refused() -> None:
    table = TransitionTable(V, K, num_pairs=4)
    table.learn([1], [5], *rows(10))
    arrays = {**table.arrays(), "tokens": np.array([NOTHING])}
    with pytest.raises(ValueError, match="tokens that the model does not have"):
        TransitionTable(V, K, num_pairs=4).restore(arrays)


def test_its_size_is_counted() -> None:
    small, large = TransitionTable(V, K), TransitionTable(V, K, num_pairs=1000)
    is_compiled = small.compiled is not None
    assert small.num_bytes == (0 if is_compiled else V * (K * 8 + 1))  # in C only tokens that were seen have a row
    small.learn([0] * V, range(V), *rows(*range(V)))
    assert small.num_bytes >= V * (K * 8 + 1)
    large.learn([0] * V, range(V), *rows(*range(V)))
    before = large.num_bytes
    assert before > small.num_bytes
    large.learn([1, 2], [5, 5], *rows(10, 11))
    assert large.num_bytes > before


# -- drafters --------------------------------------------------------------------------------------------------------


def started(prompt: Sequence[int], **options: Any) -> RecyclingDrafter:
    options = {"top_k": K, "bigrams": True, "static": False, **options}
    memory = TransitionTable(VOCAB_SIZE, K, num_pairs=1000)
    drafter = RecyclingDrafter(RecyclingOptions(**options), None, memory)
    drafter.begin(DraftRequest(prompt, SamplingParams(), np.random.default_rng(0)))
    return drafter


def verified(tree: DraftTree, path: Sequence[int], bonus: int) -> VerifiedTree:
    """The best token of row i of the logits is 100 + i."""
    logits = torch.zeros(len(tree), VOCAB_SIZE)
    logits[torch.arange(len(tree)), 100 + torch.arange(len(tree))] = 9.0
    emitted = [*(tree.tokens[node] for node in path[1:]), bonus]
    return VerifiedTree(tree, logits, logits.argmax(-1).tolist(), path, emitted, None)


def two_of_each() -> DraftTree:
    """0: 2 - (1: 3 - (3: 4), 2: 5 - (4: 3 - (5: 4))). The pair (3, 4) occurs at nodes 3 and 5."""
    builder = TreeBuilder(2)
    first, second = builder.add(0, 3, "x"), builder.add(0, 5, "x")
    builder.add(first, 4, "x")
    builder.add(builder.add(second, 3, "x"), 4, "x")
    return builder.build()


def test_every_verified_node_is_learned() -> None:
    drafter = started([1, 2])
    drafter.observe(verified(two_of_each(), [0], 9))
    memory = drafter.memory
    memory.learn([50], [2], *rows(10))
    assert best(memory, 1, 2) == 100  # the root, after the token before it
    assert best(memory, 2, 3) == 101
    assert best(memory, 2, 5) == 102
    assert best(memory, 5, 3) == 104
    assert best(memory, 3, 4) == 105  # the later of two nodes


def test_accepted_path_wins_for_duplicate_contexts() -> None:
    drafter = started([1, 2])
    drafter.observe(verified(two_of_each(), [0, 1, 3], 9))
    memory = drafter.memory
    assert best(memory, 3, 4) == 103  # not 105 of the rejected node
    assert best(memory, 99, 3) == 101  # by the token alone, not 104
    assert best(memory, 5, 3) == 104  # a separate pair


def test_only_accepted_path_is_learned_if_requested() -> None:
    drafter = started([1, 2], harvest="accepted")
    drafter.observe(verified(two_of_each(), [0, 2], 9))
    memory = drafter.memory
    assert best(memory, 1, 2) == 100
    assert best(memory, 2, 5) == 102
    assert best(memory, 2, 3) is None
    assert best(memory, 3, 4) is None
    assert memory.num_pairs == 2


def test_anchor_follows_the_end_of_the_text() -> None:
    drafter = started([7])
    assert drafter.anchor == (7, 7)
    drafter.observe(verified(DraftTree.root_only(7), [0], 8))
    assert drafter.anchor == (7, 8)
    drafter.observe(verified(DraftTree.chain([8, 3, 4]), [0, 1], 9))
    assert drafter.anchor == (3, 9)
    drafter.observe(verified(DraftTree.root_only(9), [0], 1))
    drafter.memory.learn([50], [9], *rows(10))
    assert best(drafter.memory, 3, 9) == 100


def test_borrowed_logits_are_not_kept() -> None:
    drafter = started([1, 2])
    given = verified(DraftTree.root_only(2), [0], 9)
    drafter.observe(given)
    given.logits.fill_(-1.0)
    assert best(drafter.memory, 1, 2) == 100


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_best_successors_are_learned_at_every_prompt_position(chunk: int) -> None:
    """All pairs of the prompt are different, and the same token follows several others."""
    llm = make_llm(drafter="goose", drafter_options={"top_k": 5}, memory="process", prefill_chunk=chunk)
    prompt = [256, 65, 80, 66, 80, 67, 80, 80, 68, 80, 256, 80, 69]
    params = SamplingParams(max_tokens=1)
    llm.generate([prompt], params)
    memory = llm._default.memory.get(0)
    assert isinstance(memory, TransitionTable)
    assert memory.num_pairs == len(prompt)  # the last one as the root of the first tree
    logits = logits_after(llm._engine.target, prompt)
    probs, ids = logits.softmax(-1).topk(5, dim=-1)
    for place, token in enumerate(prompt):
        tokens, scores = memory.successors(prompt[max(place - 1, 0)], token)
        assert tokens == ids[place].tolist()
        assert scores == pytest.approx(probs[place].tolist(), abs=1e-5)


@pytest.mark.parametrize("drafter", OVER_TRANSITIONS)
def test_more_successors_than_tokens_are_refused(drafter: str) -> None:
    info = tiny_target().info
    with pytest.raises(OptionError, match="top_k is larger than the model's vocabulary"):
        make_factory(drafter, {"top_k": VOCAB_SIZE + 1}, info)


def test_all_tokens_can_be_successors() -> None:
    llm = make_llm(drafter="goose", drafter_options={"top_k": VOCAB_SIZE})
    params = SamplingParams(max_tokens=10)
    assert tokens_of(llm, params, None) == tokens_of(llm, params, "plain")


def tokens_of(llm: LLM, params: SamplingParams, drafter: str | type[Drafter] | None) -> list[int]:
    return llm.generate("ab ab ab", params, drafter=drafter)[0].token_ids
