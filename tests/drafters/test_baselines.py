"""The baselines of GOOSE: trees of a fixed shape (`iso3`, `iso5`, `sequoia`, `recycling`), and `sam+recycling`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, VerifiedTree, check_drafter
from draftwood.drafters.isotropic import (
    Iso3Drafter,
    Iso5Drafter,
    RankedDrafter,
    SequoiaDrafter,
    SequoiaOptions,
    parse_acceptance,
)
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.sam_recycling import SuffixRecyclingDrafter
from draftwood.drafters.shapes import TREES, static_tree
from draftwood.drafters.transition import TransitionDrafter
from draftwood.errors import OptionError
from draftwood.growth.spine import BRANCH, SPINE, Anchor
from draftwood.growth.static import fill, fill_breadth_first, lookup_candidates, spine_candidates
from draftwood.sources.context import Match
from draftwood.sources.transitions import TransitionTable
from draftwood.tree import DraftTree
from draftwood.tree.shapes import TreeShape, chain_tree, recycling_tree
from draftwood.tree.theory import sequoia
from tests.tools.engine import PROMPTS, make_llm
from tests.tools.growth import NUM_TOKENS, Table, make_lookup, shapes, tables
from tests.tools.shapes import uniform_tree

VOCAB_SIZE = 300
# Nothing repeats; three tokens repeat, first followed by 12 tokens; six repeat, first followed by 9.
NEW_TEXT = [1, 2, 3]
COPYING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 50, 1, 2, 3]
COPYING_SIX = [1, 2, 3, 4, 5, 6, 7, 8, 50, 1, 2, 3, 4, 5, 6]

AnyDrafter = TypeVar("AnyDrafter", bound=TransitionDrafter)


def full_table(width: int = 10) -> TransitionTable:
    """Every token has likely successors."""
    table = TransitionTable(VOCAB_SIZE, width)
    tokens = np.arange(VOCAB_SIZE)
    ids = (tokens[:, None] * 7 + np.arange(width) * 31 + 11) % VOCAB_SIZE
    scores = np.tile(np.linspace(0.3, 0.02, width), (VOCAB_SIZE, 1))
    table.learn(tokens.tolist(), tokens.tolist(), ids.astype(np.int32), scores.astype(np.float32))
    return table


def begun(
    cls: type[AnyDrafter], prompt_ids: Sequence[int], table: TransitionTable | None = None, **options: Any
) -> AnyDrafter:
    made = cls.Options(**options)
    memory = table or full_table(made.top_k)
    shared = (None, None)
    if cls is SuffixRecyclingDrafter:
        shared = SuffixRecyclingDrafter.share(made, make_llm()._engine.target.info)  # type: ignore[assignment]
    drafter = cls(made, shared, memory)
    drafter.begin(DraftRequest(prompt_ids, SamplingParams(), np.random.default_rng(0)))
    return drafter


def assert_filled_with_ranks(tree: DraftTree, shape: TreeShape, table: TransitionTable, previous: int) -> None:
    """Every node is the successor of its rank."""
    assert tree.parents == shape.parents
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        before = tree.tokens[tree.parents[parent]] if parent else previous
        tokens, scores = table.successors(before, tree.tokens[parent])
        rank = shape.ranks[node]
        assert (tree.tokens[node], tree.probs[node], tree.sources[node]) == (tokens[rank], scores[rank], BRANCH)


# -- filling a shape -------------------------------------------------------------------------------------------------


@given(shapes(), tables(), st.lists(st.integers(0, NUM_TOKENS - 1), max_size=4))
@settings(deadline=None)
def test_shape_is_filled_with_available_candidates(shape: TreeShape, table: Table, spine: list[int]) -> None:
    branches = lookup_candidates(make_lookup(table))
    tree = fill(
        shape, Anchor(0, 1), spine_candidates(spine, [0.9] * len(spine), branches) if spine else branches, "way"
    )
    # By hand: the token of every node of the shape, None where there is none.
    expected: list[tuple[int, ...] | None] = [()]
    for number in range(1, len(shape)):
        path = expected[shape.parents[number]]
        if path is None:
            expected.append(None)
            continue
        tokens = list(table[(0, 1, *path)[-2:]][0])
        if len(path) < len(spine) and list(path) == spine[: len(path)] and is_on_spine(tree, path):
            first = spine[len(path)]
            tokens = [first, *(token for token in tokens if token != first)]
        rank = shape.ranks[number]
        expected.append((*path, tokens[rank]) if rank < len(tokens) else None)
    assert [tuple(tree.path_tokens(node)) for node in range(len(tree))] == [
        path for path in expected if path is not None
    ]
    assert tree.route == ("way" if len(tree) > 1 else "")


def is_on_spine(tree: DraftTree, path: tuple[int, ...]) -> bool:
    node = next(n for n in range(len(tree)) if tuple(tree.path_tokens(n)) == path)
    return all(tree.sources[step] == SPINE for step in tree.path(node)[1:])


@given(tables(), st.integers(1, 40), st.integers(1, 4))
@settings(deadline=None)
def test_breadth_first_fills_levels_in_order(table: Table, budget: int, arity: int) -> None:
    tree = fill_breadth_first(Anchor(0, 1), lookup_candidates(make_lookup(table)), arity, budget)
    assert len(tree) <= budget
    assert list(tree.parents) == sorted(tree.parents)  # and so the depths
    children = tree.children()
    for node in range(tree.parents[-1]):  # the last parent may lack some, later ones have none yet
        before = tree.tokens[tree.parents[node]] if node else 0
        tokens = table[before, tree.tokens[node]][0][:arity]
        assert [tree.tokens[child] for child in children[node]] == tokens


# -- uniform trees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "arity"), [(Iso3Drafter, 3), (Iso5Drafter, 5)])
@pytest.mark.parametrize("budget", [1, 2, 4, 12, 60])
def test_uniform_trees_have_k_children_per_node(cls: type[RankedDrafter], arity: int, budget: int) -> None:
    table = full_table()
    tree = begun(cls, NEW_TEXT, table).propose(budget)
    assert_filled_with_ranks(tree, uniform_tree(arity, budget), table, 2)
    assert tree.route == ("branch" if budget > 1 else "")
    copying = begun(cls, COPYING, table).propose(budget)
    assert copying.parents == tree.parents  # the shape does not depend on the source of a guess
    assert copying.route == ("spine" if budget > 1 else "")


def test_the_copied_token_is_the_first_child_all_the_way_down() -> None:
    tree = begun(Iso3Drafter, COPYING).propose(60)
    node, depth = 0, 0
    while children := tree.children_of(node):
        assert [tree.sources[child] for child in children] == [SPINE] + [BRANCH] * (len(children) - 1)
        node, depth = children[0], depth + 1
        assert (tree.tokens[node], tree.probs[node]) == (COPYING[2 + depth], Match(COPYING[3:], 3).trust()[depth - 1])
    assert depth == 4
    assert tree.sources.count(SPINE) == 4
    assert SPINE not in begun(Iso3Drafter, COPYING, spine=False).propose(60).sources


def test_copied_token_known_to_the_table_appears_once() -> None:
    table = full_table()
    known = table.successors(2, 3)[0][2]
    prompt = [1, 2, 3, known, 50, 1, 2, 3]
    tree = begun(Iso5Drafter, prompt, table).propose(6)
    best = table.successors(2, 3)[0]
    assert tree.tokens[1:] == (known, best[0], best[1], best[3], best[4])


def test_emitted_tokens_are_matched_next() -> None:
    drafter = begun(Iso3Drafter, [1, 2, 3, 4, 5, 50])
    tree = drafter.propose(4)
    assert SPINE not in tree.sources
    drafter.observe(VerifiedTree(tree, torch.zeros(len(tree), VOCAB_SIZE), [0] * len(tree), [0], [1, 2, 3], None))
    assert drafter.propose(4).tokens[:2] == (3, 4)


# -- sequoia ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 12, 60, 64])
@pytest.mark.parametrize("options", [{}, {"acceptance": "0.3,0.25,0.2", "max_depth": 3}, {"acceptance": 0.5}])
def test_sequoia_uses_shape_of_dynamic_programme(budget: int, options: dict[str, Any]) -> None:
    table = full_table()
    made = SequoiaOptions(**options)
    shape = sequoia(parse_acceptance(made.acceptance), budget, made.max_depth)[0]
    tree = begun(SequoiaDrafter, NEW_TEXT, table, **options).propose(budget)
    assert_filled_with_ranks(tree, shape, table, 2)
    assert begun(SequoiaDrafter, COPYING, table, **options).propose(budget).parents == shape.parents


def test_sequoia_reads_measured_tree_once_per_request(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    uniform_tree(4, 40).save(path)
    table = full_table()
    drafter = begun(SequoiaDrafter, NEW_TEXT, table, tree=str(path))
    path.unlink()
    assert_filled_with_ranks(drafter.propose(30), uniform_tree(4, 30), table, 2)
    assert len(drafter.propose(60)) == 40


@pytest.mark.parametrize(
    "acceptance",
    ["0.6,0.5", "-0.1,0.5", "0.5,-0.1", "nan", "0.5,nan", "inf", "", "a few", "0.5;0.1", "0.5,,0.1", None, True, 1.5],
)
def test_invalid_acceptance_is_refused(acceptance: object) -> None:
    with pytest.raises(OptionError, match="acceptance"):
        check_drafter("sequoia", {"acceptance": acceptance})


def test_acceptance_may_sum_to_one() -> None:
    assert parse_acceptance("0.7, 0.2,0.1") == (0.7, 0.2, 0.1)


@pytest.mark.parametrize("drafter", ["iso3", "iso5", "sequoia"])
@pytest.mark.parametrize(
    "options",
    [{"min_ngram": 6}, {"max_draft": 0}, {"top_k": "ten"}, {"spine": "off"}, {"harvest": "none"}, {"static": 1}],
)
def test_invalid_options_of_ranked_trees_are_refused(drafter: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        check_drafter(drafter, options)


# -- recycling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 9, 60, 80, 200])
def test_recycling_fills_the_static_tree_with_ranks(budget: int) -> None:
    table = full_table(8)
    tree = begun(RecyclingDrafter, NEW_TEXT, table).propose(budget)
    assert_filled_with_ranks(tree, recycling_tree().first(budget), table, 2)
    assert len(tree) == min(budget, 80)
    assert tree.route == ("branch" if budget > 1 else "")


def test_recycling_omits_unknown_successors() -> None:
    table = TransitionTable(VOCAB_SIZE, 8)
    drafter = begun(RecyclingDrafter, NEW_TEXT, table)
    assert drafter.propose(80) == DraftTree.root_only(3)
    rows = np.arange(100, 108, dtype=np.int32)[None]
    table.learn([2], [3], rows, np.full((1, 8), 0.1, dtype=np.float32))
    assert drafter.propose(80).tokens == (3, *range(100, 108))
    table.learn([3], [101], rows + 50, np.full((1, 8), 0.1, dtype=np.float32))
    tree = drafter.propose(80)
    below = recycling_tree().num_children[recycling_tree().children()[0][1]]
    assert below > 1
    assert [tree.tokens[child] for child in tree.children_of(2)] == list(range(150, 150 + below))


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"harvest": "some"}, {"bigrams": "no"}, {"tree": None}, {"tree": ""}]
)
def test_invalid_options_of_recycling_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        check_drafter("recycling", options)


# -- trees by name ---------------------------------------------------------------------------------------------------


def test_a_tree_is_a_name_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert static_tree("heuristic") == recycling_tree()
    packaged = TreeShape.load(TREES / "stand.json")[0]
    assert static_tree("stand") == packaged
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = chain_tree(4)
    for name in ("stand", "stand.json", "tree.shape"):
        mine.save(tmp_path / name)
    assert static_tree("stand") == packaged  # a bare name is never a file
    # A dot or a slash makes it a path, never a packaged tree.
    for path in ("stand.json", "./stand.json", "./stand", "~/stand", "tree.shape", str(tmp_path / "stand")):
        assert static_tree(path) == mine
    (tmp_path / "stand").unlink()
    for path in ("./stand", str(tmp_path / "stand"), str(TREES / "stand")):
        with pytest.raises(OptionError, match="cannot be read"):
            static_tree(path)


def test_unknown_tree_error_lists_known_trees() -> None:
    for name in ("heuristics", "", None, 3):
        with pytest.raises(OptionError) as refused:
            static_tree(name)
        assert "heuristic" in str(refused.value)
        assert "stand" in str(refused.value)


@pytest.mark.parametrize("drafter", ["recycling", "sequoia", "sam+recycling"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"format": "another", "version": 1, "parents": [-1], "ranks": [0]}, "not a tree shape"),
        ({"format": "draftwood-tree", "version": 99, "parents": [-1], "ranks": [0]}, "another version"),
        ({"format": "draftwood-tree", "version": 1, "parents": [-1, 5], "ranks": [0, 0]}, "broken"),
        ([1, 2], "not a tree shape"),
    ],
)
def test_a_bad_tree_file_is_refused_before_the_model_loads(
    tmp_path: Path, drafter: str, content: object, why: str
) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(content))
    with pytest.raises(OptionError, match=why):
        LLM(str(tmp_path / "no model here"), drafter=drafter, drafter_options={"tree": str(path)})


# -- sam+recycling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "route"),
    [
        (COPYING_SIX, {}, "bypass"),
        (COPYING_SIX, {"threshold": 6}, "bypass"),
        (COPYING_SIX, {"threshold": 7}, "branch"),
        (COPYING, {}, "branch"),
        (COPYING, {"threshold": 3}, "bypass"),
        (COPYING, {"threshold": 3, "min_match": 4}, "branch"),
        (NEW_TEXT, {"threshold": 1}, "branch"),
    ],
)
def test_a_long_match_is_a_chain_and_a_short_one_a_tree(prompt: list[int], options: dict[str, Any], route: str) -> None:
    table = full_table(8)
    tree = begun(SuffixRecyclingDrafter, prompt, table, **options).propose(60)
    assert tree.route == route
    if route == "bypass":
        assert tree.parents == tuple(range(-1, len(tree) - 1))
        assert set(tree.sources[1:]) == {"suffix"}
        copied = prompt[prompt.index(prompt[-1]) + 1 :]
        assert list(tree.tokens[1 : 1 + len(copied)]) == copied
    else:
        assert tree == begun(RecyclingDrafter, prompt, table).propose(60)


def test_chain_respects_budget_and_max_draft() -> None:
    assert len(begun(SuffixRecyclingDrafter, COPYING_SIX).propose(4)) == 4
    assert len(begun(SuffixRecyclingDrafter, COPYING_SIX).propose(1)) == 1
    assert len(begun(SuffixRecyclingDrafter, COPYING_SIX, max_draft=2).propose(60)) == 3


@pytest.mark.parametrize("options", [{"threshold": 0}, {"max_draft": 0}, {"static_bias": -1}, {"top_k": 0}])
def test_invalid_options_of_sam_recycling_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        check_drafter("sam+recycling", options)


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [12, 60])
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("iso3", {"spine": False}),
        ("iso5", {"bigrams": False}),
        ("sequoia", {"acceptance": "0.2,0.2,0.2", "max_depth": 2}),
        ("sequoia", {"tree": "stand"}),
        ("recycling", {"bigrams": True, "harvest": "accepted"}),
        ("recycling", {"tree": "stand", "top_k": 10}),
        ("sam+recycling", {"threshold": 1}),
        ("sam+recycling", {"threshold": 12}),
    ],
)
def test_greedy_output_is_plain_decoding(drafter: str, options: dict[str, Any], budget: int) -> None:
    with make_llm(drafter=drafter, drafter_options=options, budget=budget) as llm:
        params = SamplingParams(max_tokens=40)
        completions = llm.generate(PROMPTS, params)
        plain = llm.generate(PROMPTS, params, drafter="plain")
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert any(c.stats.accepted_by_source for c in completions)
