"""Draft trees of many positions at once: logits of the target, rewards, branches and groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Batch, Signals
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.losses import evaluator
from draftwood.train.trees import layer_run, walk
from draftwood.train.trees.attention import ancestors_of, tree_attention
from draftwood.train.trees.branch import branch_log_probs
from draftwood.train.trees.draft_trees import DraftBeam, DraftTrees, grow_draft_trees
from draftwood.train.trees.head_run import HeadRun
from draftwood.train.trees.merge import merge
from draftwood.train.trees.rewards import (
    Branch,
    accepted_branch,
    advantages,
    branch_values,
    clipped,
    is_leaf,
    ratios,
    reward,
)
from draftwood.train.trees.roots import sample_groups
from draftwood.train.trees.verify import NO_CHOICE, verify_trees
from tests.tools.train import MODEL, random_examples, target_of
from tests.tools.tree import (
    DraftHead,
    _one_thread,  # noqa: F401 - fixtures
    batch_and_signals,
    both_kinds,
    decoding_tree,
    draft_head,
    followed,
    moved,
    paths_of,
    read,
    target_log_probs,
)

# -- drafting --------------------------------------------------------------------------------------------------------


def trees_below(head: DraftHead, batch: Batch, signals: Signals, roots: list[list[int]], beam: DraftBeam) -> DraftTrees:
    with torch.no_grad():
        return grow_draft_trees(head, HeadRun(head, batch, signals, torch.tensor(roots)), beam)


@both_kinds
@pytest.mark.parametrize("beam", [DraftBeam(3, 12, 4), DraftBeam(4, 60, 2), DraftBeam(10, 60, 7), DraftBeam(1, 4, 7)])
def test_trees_match_decoding(kind: str, beam: DraftBeam) -> None:
    head = draft_head(kind)
    frozen = FrozenTarget.of(target_of(), head)
    examples = random_examples([16, 9])
    batch, signals = batch_and_signals(examples, frozen)
    roots = [[1, 7, 15], [2, 8, 1]]
    trees = trees_below(head, batch, signals, roots, beam)
    for row, example in enumerate(examples):
        text, taps = read(example, signals, row)
        for number, root in enumerate(roots[row]):
            tokens, parents, depths = (part[row, number].tolist() for part in trees)
            found = paths_of(tokens, parents)
            assert found == paths_of(*decoding_tree(head, text, taps, root, beam))
            assert len(found) == len(tokens) <= beam.nodes
            assert all(parent < node for node, parent in enumerate(parents) if node)
            assert depths == [0, *(depths[parent] + 1 for parent in parents[1:])]


# -- verification ----------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("rows", [16, 1024])
def test_node_logits_match_logits_of_their_paths(
    kind: str, lends: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "PASS_ROWS", rows)
    monkeypatch.setitem(layer_run.MAX_ROWS, "cpu", rows)
    monkeypatch.setattr(evaluator, "MAX_LOGITS_ON_CPU", 5 * MODEL.vocab_size)
    target = tiny_target(MODEL, backend="eager") if lends else target_of()
    head = draft_head(kind)
    examples = random_examples([14, 7, 5])
    batch, signals = batch_and_signals(examples, FrozenTarget.of(target_of(), head))
    roots = [[2, 3, 12], [4], []]
    filled = [[2, 3, 12], [4, 1, 1], [1, 1, 1]]
    trees = [trees_below(each, batch, signals, filled, DraftBeam(3, 7, 3)) for each in (head, moved(head))]
    verified = verify_trees(target, [each.token_ids.tolist() for each in examples], roots, trees)
    for tree, said in zip(trees, verified, strict=True):
        for row, number, root in ((0, 0, 2), (0, 2, 12), (1, 0, 4)):
            tokens, parents = tree.tokens[row, number].tolist(), tree.parents[row, number].tolist()
            paths: list[list[int]] = [[]]
            for node in range(len(tokens)):
                if node:
                    paths.append([*paths[parents[node]], tokens[node]])
                text = [*examples[row].token_ids.tolist()[: root + 1], *paths[node]]
                assert int(said.choices[row, number, node]) == int(target_log_probs(target_of(), text).argmax())
                wanted = float(target_log_probs(target_of(), text[:-1])[tokens[node]].exp()) if node else 1.0
                assert float(said.probs[row, number, node]) == pytest.approx(wanted, abs=1e-5)
        assert said.choices[1, 1:].unique().tolist() == said.choices[2].unique().tolist() == [NO_CHOICE]
        assert bool((said.probs[2] == 1.0).all())
    assert target_of().can_open(target_of().num_slots)


def trees_of(*trees: tuple[list[int], list[int]]) -> DraftTrees:
    """For one text: tokens and parents of the tree of every root."""
    depths = []
    for _, parents in trees:
        own = [0]
        for parent in parents[1:]:
            own.append(own[parent] + 1)
        depths.append(own)
    parts = [tokens for tokens, _ in trees], [parents for _, parents in trees], depths
    return DraftTrees(*(torch.tensor([part]) for part in parts))


def test_merged_trees_share_their_nodes() -> None:
    first = trees_of(([-1, 5, 7, 5], [0, 0, 0, 1]), ([-1, 1, 2, 3], [0, 0, 1, 2]))
    second = trees_of(([-1, 7, 5, 9], [0, 0, 0, 2]), ([-1, 1, 2, 3], [0, 0, 1, 2]))
    merged = merge([first, second])
    assert merged.tokens[0].tolist() == [[-1, 5, 7, 5, 9], [-1, 1, 2, 3, -1]]
    assert merged.parents[0].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 2, 0]]
    assert merged.is_node[0].tolist() == [[True] * 5, [True] * 4 + [False]]
    assert [own[0].tolist() for own in merged.numbers] == [[[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 2, 1, 4], [0, 1, 2, 3]]]
    assert merged.height == 3


Tree = tuple[list[int], list[int]]


def random_tree(seed: int, size: int = 7) -> Tree:
    """Tokens and parents, from few tokens so that trees overlap. Siblings are distinct."""
    rng = np.random.default_rng(seed)
    tokens, parents, known = [-1], [0], set()
    while len(tokens) < size:
        place = int(rng.integers(len(tokens))), int(rng.integers(4))
        if place not in known:
            known.add(place)
            parents.append(place[0])
            tokens.append(place[1])
    return tokens, parents


@given(st.integers(1, 3), st.integers(0, 1 << 20))
def test_merged_trees_have_every_path_once(num_roots: int, seed: int) -> None:
    roots = [[random_tree(seed + 3 * root + number) for number in range(3)] for root in range(num_roots)]
    merged = merge([trees_of(*(own[number] for own in roots)) for number in range(3)])
    for root, own in enumerate(roots):
        is_node = merged.is_node[0, root].tolist()
        size = sum(is_node)
        assert is_node == [True] * size + [False] * (len(is_node) - size)
        tokens, parents = merged.tokens[0, root].tolist()[:size], merged.parents[0, root].tolist()[:size]
        assert all(parent < node for node, parent in enumerate(parents) if node)
        assert len(paths_of(tokens, parents)) == size
        assert paths_of(tokens, parents) == set().union(*(paths_of(*tree) for tree in own))
        for number, tree in enumerate(own):
            places = merged.numbers[number][0, root].tolist()
            assert [tokens[place] for place in places] == tree[0]
            assert [parents[place] for place in places[1:]] == [places[parent] for parent in tree[1][1:]]


# -- attention -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 20), st.integers(1, 3), st.integers(1, 3))
def test_nodes_attend_over_the_text_so_far_and_their_path(seed: int, kv_heads: int, group: int) -> None:
    _, parents = random_tree(seed)
    found = ancestors_of(torch.tensor([[parents, parents]]), len(parents))
    for node in range(len(parents)):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        assert found[0, 1, node].nonzero()[:, 0].tolist() == sorted(path)
    last, size, dim = torch.tensor([[1, 3]]), len(parents), 4
    generator = torch.Generator().manual_seed(size)
    query = torch.randn(1, 2, size, kv_heads * group, dim, generator=generator)
    text = tuple(torch.randn(2, 1, 5, kv_heads, dim, generator=generator))
    nodes = tuple(torch.randn(2, 1, 2, size, kv_heads, dim, generator=generator))
    mixed = tree_attention(query, text, nodes, last, found)  # type: ignore[arg-type]
    for root in range(2):
        for node in range(size):
            sees = found[0, root, node]
            key, value = (
                torch.cat([text[part][0, : last[0, root] + 1], nodes[part][0, root, sees]]) for part in range(2)
            )
            key, value = (rows.repeat_interleave(group, dim=1) for rows in (key, value))  # [n, heads, D]
            scores = torch.einsum("hd,nhd->hn", query[0, root, node], key) / math.sqrt(dim)
            wanted = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), value)
            torch.testing.assert_close(mixed[0, root, node], wanted)


# -- a tree by hand --------------------------------------------------------------------------------------------------

#   root -- 10 (0.5) -- 11 (0.4)
#        |           `- 12 (0.1)
#        `- 13 (0.3)
TREE = DraftTrees(*(torch.tensor(each) for each in ([-1, 10, 13, 11, 12], [0, 0, 0, 1, 1], [0, 1, 1, 2, 2])))
PROBS = torch.tensor([1.0, 0.5, 0.3, 0.4, 0.1])


def test_branch_value_is_expected_number_of_tokens() -> None:
    torch.testing.assert_close(branch_values(PROBS, TREE), torch.tensor([0.0, 0.5, 0.3, 0.7, 0.55]))
    assert is_leaf(TREE).tolist() == [False, False, True, True, True]


def test_rewards() -> None:
    branches = [0.7, 0.55, 0.3]
    smooth = {eta: math.log(sum(math.exp(eta * x) for x in branches)) / eta for eta in (1.0, 5.0)}
    assert float(reward(PROBS, TREE, "lse", 1.0)) == pytest.approx(smooth[1.0], rel=1e-6)
    assert float(reward(PROBS, TREE, "lse", 5.0)) == pytest.approx(smooth[5.0], rel=1e-6)
    assert float(reward(PROBS, TREE, "max", 1.0)) == pytest.approx(0.7)
    assert float(reward(PROBS, TREE, "mean", 1.0)) == pytest.approx(sum(branches) / 3)


@pytest.mark.parametrize(
    ("choices", "branch"),
    [
        ([10, 12, 1, 1, 1], [10, 12]),
        ([10, 11, 1, 1, 1], [10, 11]),
        ([10, 13, 1, 1, 1], [10]),
        ([13, 11, 1, 1, 1], [13]),
        ([99, 11, 1, 1, 1], []),
        ([-2, -2, -2, -2, -2], []),
    ],
)
def test_accepted_branch_follows_target_choices(choices: list[int], branch: list[int]) -> None:
    found = accepted_branch(torch.tensor(choices), TREE)
    assert int(found.length) == len(branch)
    assert found.tokens.tolist() == [*branch, *[0] * (2 - len(branch))]


def test_root_only_tree_has_no_reward() -> None:
    alone = DraftTrees(*(torch.tensor([each]) for each in (-1, 0, 0)))
    assert float(reward(torch.ones(1), alone, "lse", 1.0)) == 0.0
    assert int(accepted_branch(torch.tensor([4]), alone).length) == 0


def test_advantages_are_standardised_inside_their_group() -> None:
    found = advantages(torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]]), 0.0001)
    deviation = math.sqrt((4 + 1 + 9) / 3) + 0.0001
    torch.testing.assert_close(found, torch.tensor([[-2 / deviation, -1 / deviation, 3 / deviation], [0.0, 0.0, 0.0]]))
    assert advantages(torch.tensor([[3.0]]), 0.1).tolist() == [[0.0]]


def test_ratios_are_per_token_and_clipped() -> None:
    found = ratios(torch.tensor([-1.0, -3.0, 0.0]), torch.tensor([-2.0, -1.0, 0.0]), torch.tensor([2, 1, 0]))
    torch.testing.assert_close(found, torch.tensor([math.exp(0.5), math.exp(-2.0), 1.0]))
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0])
    torch.testing.assert_close(clipped(ratio, advantage, 0.2), torch.tensor([2.4, -3.0, 1.0, -1.6]))


# -- branches --------------------------------------------------------------------------------------------------------


@both_kinds
def test_branch_probability_is_product_over_tokens(kind: str) -> None:
    head = draft_head(kind)
    examples = random_examples([12])
    batch, signals = batch_and_signals(examples, FrozenTarget.of(target_of(), head))
    text, taps = read(examples[0], signals)
    tokens = head.target_ids(torch.tensor([[3, 50, 99], [7, 7, 0], [0, 0, 0], [1, 2, 3]]))
    branch = Branch(tokens[None], torch.tensor([[3, 2, 0, 3]]))
    roots, is_root = torch.tensor([[2, 9, 4, 1]]), torch.tensor([[True, True, True, False]])
    found = branch_log_probs(head, HeadRun(head, batch, signals, roots), branch, is_root)[0]
    for number, (root, length) in enumerate(((2, 3), (9, 2))):
        path = tokens[number].tolist()[:length]
        own = head.draft_ids(tokens[number])
        said = [
            head.logits(followed(head, text, taps, root, path[:at])).log_softmax(-1)[own[at]] for at in range(length)
        ]
        torch.testing.assert_close(found[number, :length], torch.stack(said), atol=1e-4, rtol=1e-4)
    assert not found[2:].any()
    assert found[1, 2].item() == 0.0


# -- groups ----------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 60)), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_groups_are_adjacent_and_do_not_overlap(eligible: set[int], num_groups: int, size: int, step: int) -> None:
    roots = sorted(eligible)
    members = sample_groups(roots, num_groups, size, [1, 2], 0, step)
    groups = [members[first : first + size] for first in range(0, len(members), size)]
    assert all(group == list(range(group[0], group[0] + size)) for group in groups)
    assert sorted(set(members)) == members
    assert set(members) <= eligible
    runs = "".join("x" if place in eligible else " " for place in range(62)).split()
    assert len(groups) == min(num_groups, sum(len(run) // size for run in runs))


def test_groups_depend_on_seed_step_and_text() -> None:
    roots = list(range(1, 100))
    first = sample_groups(roots, 4, 5, [1, 2], 0, 7)
    assert first == sample_groups(roots, 4, 5, [1, 2], 0, 7)
    others = [
        sample_groups(roots, 4, 5, text, *seeds)
        for text, seeds in (([1, 3], (0, 7)), ([1, 2], (1, 7)), ([1, 2], (0, 8)))
    ]
    assert all(other != first for other in others)
