"""GTO: draft trees of many positions at once, what the target says of them, rewards, groups and the clipped ratio."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftwood.errors import OptionError
from draftwood.growth.neural import GrowthOptions, make_growth
from draftwood.sources.head import EagleModel
from draftwood.sources.neural import DraftSegment
from draftwood.target.base import Segment, chain_parents
from draftwood.target.tiny import tiny_target
from draftwood.train.base import Batch, Example, Signals
from draftwood.train.frozen import FrozenTarget
from draftwood.train.methods.gto import GtoMethod, GtoOptions, frozen_copy
from draftwood.train.trees import walk
from draftwood.train.trees.beam import DraftBeam, DraftTrees, grow_draft_trees
from draftwood.train.trees.branch import branch_log_probs
from draftwood.train.trees.reward import (
    Branch,
    accepted_branch,
    advantages,
    branch_values,
    clipped,
    is_leaf,
    ratios,
    reward,
)
from draftwood.train.trees.roots import drawn_groups, padded
from draftwood.train.trees.run import HeadRun
from draftwood.train.trees.verify import merge, verify_trees

from .conftest import threads
from .train_tools import MODEL, gradients, losses_of, method_for, random_examples, target_of, train, written_examples
from .tree_tools import DraftHead, batch_and_signals, draft_head, followed, read, said_behind

both_kinds = pytest.mark.parametrize("kind", ["eagle", "eagle3"])
SMALL: dict[str, Any] = {"groups": 2, "group_size": 3, "width": 3, "nodes": 8, "depth": 3}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def gto(head: DraftHead, seed: int = 0, **options: Any) -> GtoMethod:
    method = method_for("gto", head, seed=seed, **{**SMALL, **options})
    assert isinstance(method, GtoMethod)
    return method


def moved(head: DraftHead, scale: float = 0.05) -> DraftHead:
    """A copy that is somewhere else by now."""
    other = frozen_copy(head)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return other


@cache
def trained_head(kind: str) -> DraftHead:
    """One that is right at times."""
    head = draft_head(kind)
    method = method_for("eagle", head, noise=0.0) if kind == "eagle" else method_for("eagle3", head, steps=3)
    train(method, written_examples(count=2), 15, lr=3e-3)
    return head


# -- drafting --------------------------------------------------------------------------------------------------------


def drafted_tree(
    head: DraftHead, text: list[int], taps: Tensor, root: int, beam: DraftBeam
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree that decoding would draft."""
    model = EagleModel(head, head.config.taps_for(MODEL.num_layers), 256)
    growth = make_growth("beam", -1, beam.nodes, GrowthOptions(depth=beam.depth, top_k=beam.width))
    sequence = model.open(128)
    assert sequence is not None
    num_run = 0
    while (frontier := growth.frontier()) is not None:
        if frontier.parents == [-1]:
            segment = Segment(sequence, text[1 : root + 1], chain_parents(root), 1)
            top = model.forward([DraftSegment(segment, taps[:root])], beam.width)
            model.keep(sequence, range(root))
        else:
            above = [parent - 1 for parent in frontier.parents]
            segment = Segment(sequence, frontier.tokens, above, len(above), num_run)
            top = model.forward([DraftSegment(segment)], beam.width)
            num_run += len(above)
        growth.grow(top.ids, top.probs())
    tree = growth.tree()
    return list(tree.tokens), list(tree.parents)


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths)


def trees_below(head: DraftHead, batch: Batch, signals: Signals, roots: list[list[int]], beam: DraftBeam) -> DraftTrees:
    with torch.no_grad():
        return grow_draft_trees(head, HeadRun(head, batch, signals, torch.tensor(roots)), beam)


@both_kinds
@pytest.mark.parametrize("beam", [DraftBeam(3, 12, 4), DraftBeam(4, 60, 2), DraftBeam(10, 60, 7), DraftBeam(1, 4, 7)])
def test_trees_are_those_of_decoding(kind: str, beam: DraftBeam) -> None:
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
            assert found == paths_of(*drafted_tree(head, text, taps, root, beam))
            assert len(found) == len(tokens) <= beam.nodes
            assert all(parent < node for node, parent in enumerate(parents) if node)
            assert depths == [0, *(depths[parent] + 1 for parent in parents[1:])]


# -- verification ----------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("pass_rows", [16, 1024])
def test_the_target_says_of_every_node_what_it_says_of_its_path(
    kind: str, pass_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "PASS_ROWS", pass_rows)
    head = draft_head(kind)
    examples = random_examples([14, 7, 5])
    batch, signals = batch_and_signals(examples, FrozenTarget.of(target_of(), head))
    roots = [[2, 3, 12], [4], []]
    filled = [[2, 3, 12], [4, 1, 1], [1, 1, 1]]
    trees = [trees_below(each, batch, signals, filled, DraftBeam(3, 7, 3)) for each in (head, moved(head))]
    verified = verify_trees(target_of(), [each.token_ids.tolist() for each in examples], roots, trees)
    for tree, said in zip(trees, verified, strict=True):
        for row, number, root in ((0, 0, 2), (0, 2, 12), (1, 0, 4)):
            tokens, parents = tree.tokens[row, number].tolist(), tree.parents[row, number].tolist()
            paths: list[list[int]] = [[]]
            for node in range(len(tokens)):
                if node:
                    paths.append([*paths[parents[node]], tokens[node]])
                text = [*examples[row].token_ids.tolist()[: root + 1], *paths[node]]
                assert int(said.choices[row, number, node]) == int(said_behind(target_of(), text).argmax())
                wanted = float(said_behind(target_of(), text[:-1])[tokens[node]].exp()) if node else 1.0
                assert float(said.probs[row, number, node]) == pytest.approx(wanted, abs=1e-5)
    assert target_of().can_open(target_of().num_slots)


def test_merged_trees_share_their_nodes() -> None:
    merged = merge([([-1, 5, 7, 5], [0, 0, 0, 1]), ([-1, 7, 5, 9], [0, 0, 0, 2])])
    assert merged.tokens == [-1, 5, 7, 5, 9]
    assert merged.parents == [-1, 0, 0, 1, 1]
    assert [own.tolist() for own in merged.numbers] == [[0, 1, 2, 3], [0, 2, 1, 4]]


# -- a tree by hand --------------------------------------------------------------------------------------------------

#   root -- 10 (0.5) -- 11 (0.4)
#        |           `- 12 (0.1)
#        `- 13 (0.3)
TREE = DraftTrees(*(torch.tensor(each) for each in ([-1, 10, 13, 11, 12], [0, 0, 0, 1, 1], [0, 1, 1, 2, 2])))
PROBS = torch.tensor([1.0, 0.5, 0.3, 0.4, 0.1])


def test_branches_are_worth_the_tokens_that_are_expected_of_them() -> None:
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
def test_the_accepted_branch_follows_the_targets_choices(choices: list[int], branch: list[int]) -> None:
    found = accepted_branch(torch.tensor(choices), TREE)
    assert int(found.length) == len(branch)
    assert found.tokens.tolist() == [*branch, *[0] * (2 - len(branch))]


def test_a_root_alone_is_worth_nothing() -> None:
    alone = DraftTrees(*(torch.tensor([each]) for each in (-1, 0, 0)))
    assert float(reward(torch.ones(1), alone, "lse", 1.0)) == 0.0
    assert int(accepted_branch(torch.tensor([4]), alone).length) == 0


def test_advantages_are_standardised_inside_their_group() -> None:
    found = advantages(torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]]), 0.0001)
    deviation = math.sqrt((4 + 1 + 9) / 3) + 0.0001
    torch.testing.assert_close(found, torch.tensor([[-2 / deviation, -1 / deviation, 3 / deviation], [0.0, 0.0, 0.0]]))
    assert advantages(torch.tensor([[3.0]]), 0.1).tolist() == [[0.0]]


def test_ratios_are_per_token_and_clipped_where_that_is_worse() -> None:
    found = ratios(torch.tensor([-1.0, -3.0, 0.0]), torch.tensor([-2.0, -1.0, 0.0]), torch.tensor([2, 1, 0]))
    torch.testing.assert_close(found, torch.tensor([math.exp(0.5), math.exp(-2.0), 1.0]))
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0])
    torch.testing.assert_close(clipped(ratio, advantage, 0.2), torch.tensor([2.4, -3.0, 1.0, -1.6]))


# -- groups ----------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 60)), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_groups_are_adjacent_and_do_not_overlap(eligible: set[int], num_groups: int, size: int, step: int) -> None:
    roots = sorted(eligible)
    members = drawn_groups(roots, num_groups, size, [1, 2], 0, step)
    groups = [members[first : first + size] for first in range(0, len(members), size)]
    assert all(group == list(range(group[0], group[0] + size)) for group in groups)
    assert sorted(set(members)) == members
    assert set(members) <= eligible
    runs = "".join("x" if place in eligible else " " for place in range(62)).split()
    assert len(groups) == min(num_groups, sum(len(run) // size for run in runs))


def test_groups_follow_from_seed_step_and_text() -> None:
    roots = list(range(1, 100))
    first = drawn_groups(roots, 4, 5, [1, 2], 0, 7)
    assert first == drawn_groups(roots, 4, 5, [1, 2], 0, 7)
    others = [
        drawn_groups(roots, 4, 5, text, *seeds)
        for text, seeds in (([1, 3], (0, 7)), ([1, 2], (1, 7)), ([1, 2], (0, 8)))
    ]
    assert all(other != first for other in others)


# -- the objective ---------------------------------------------------------------------------------------------------


@both_kinds
def test_a_branch_is_as_likely_as_its_tokens_one_by_one(kind: str) -> None:
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
        torch.testing.assert_close(found[number], torch.stack(said).sum(), atol=1e-4, rtol=1e-4)
    assert found[2:].tolist() == [0.0, 0.0]


@torch.no_grad()
def log_prob_by_hand(head: DraftHead, text: list[int], taps: Tensor, root: int, branch: tuple[int, ...]) -> float:
    own_ids = head.draft_ids(torch.tensor(branch, dtype=torch.int64)).tolist()
    said = [head.logits(followed(head, text, taps, root, branch[:at])).log_softmax(-1) for at in range(len(branch))]
    return sum(float(each[own]) for each, own in zip(said, own_ids, strict=True))


def reward_by_hand(text: list[int], root: int, paths: set[tuple[int, ...]]) -> float:
    values = []
    for path in paths:
        if path and not any(longer[:-1] == path for longer in paths if longer):
            said = [
                float(said_behind(target_of(), [*text[: root + 1], *path[:at]])[path[at]]) for at in range(len(path))
            ]
            values.append(sum(math.exp(sum(said[:at])) for at in range(1, len(path) + 1)))
    return math.log(sum(math.exp(value) for value in values))


def objective_by_hand(method: GtoMethod, example: Example) -> float:
    """Of one text, tree by tree."""
    options, head = method.options, method.head
    assert isinstance(head, type(method.reference))
    batch, signals = batch_and_signals([example], method.frozen)
    text, taps = read(example, signals)
    (members,) = method._groups(batch)
    beam = DraftBeam(options.width, options.nodes, options.depth)
    gains, ratio = [], []
    for root in members:
        kept, others = (paths_of(*drafted_tree(each, text, taps, root, beam)) for each in (head, method.reference))
        gains.append(reward_by_hand(text, root, kept) - reward_by_hand(text, root, others) * options.debias)
        branch: tuple[int, ...] = ()
        while (longer := (*branch, int(said_behind(target_of(), [*text[: root + 1], *branch]).argmax()))) in kept:
            branch = longer
        logs = [log_prob_by_hand(each, text, taps, root, branch) for each in (head, method.reference)]
        ratio.append(math.exp((logs[0] - logs[1]) / max(len(branch), 1)))
    size = options.group_size
    total = 0.0
    for first in range(0, len(gains), size):
        own = gains[first : first + size]
        mean = sum(own) / size
        deviation = math.sqrt(sum((gain - mean) ** 2 for gain in own) / size) + options.delta
        for gain, s in zip(own, ratio[first : first + size], strict=True):
            advantage = (gain - mean) / deviation
            total -= min(s * advantage, min(max(s, 1 - options.epsilon), 1 + options.epsilon) * advantage)
    return total / len(gains)


@both_kinds
@pytest.mark.parametrize("debias", [True, False])
def test_the_objective_is_that_of_a_loop_over_trees(kind: str, debias: bool) -> None:
    head = moved(trained_head(kind), 0.0).requires_grad_(True)
    method = gto(head, debias=debias, delta=1e-2, epsilon=0.1)
    head.load_state_dict(moved(head, 0.02).state_dict())
    example = written_examples(count=2)[0]
    losses = losses_of(method, [example])
    assert float(losses.parts["accepted"]) > 0
    assert float(losses.parts["ratio_away"]) > 1e-3
    wanted = objective_by_hand(method, example)
    assert float(losses.parts["gto"]) == pytest.approx(wanted, abs=2e-3)
    assert float(losses.total.detach()) == pytest.approx(float(losses.parts["token"]) + 0.5 * wanted, abs=2e-3)


@both_kinds
def test_without_a_step_ratios_are_one_and_the_loss_is_nothing(kind: str) -> None:
    examples = written_examples(count=2)
    for debias in (True, False):
        method = gto(draft_head(kind), debias=debias)
        losses = losses_of(method, examples)
        assert float(losses.parts["ratio_away"]) == 0.0
        assert float(losses.parts["reward_gain"]) == 0.0
        assert abs(float(losses.parts["gto"])) < 1e-4


@both_kinds
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_in_half_precision(kind: str) -> None:
    """A target in bfloat16, a head in float32 whose products are not: ratios are exactly one there too."""
    head = draft_head(kind)
    target = tiny_target(MODEL, dtype=torch.bfloat16)
    method = GtoMethod(GtoOptions(**SMALL, debias=False), head, FrozenTarget.of(target, head))
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(method, written_examples(count=2))
    losses.total.backward()
    assert float(losses.parts["ratio_away"]) == 0.0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())


def test_gradients_reach_the_head_alone() -> None:
    head = draft_head("eagle3")
    method = gto(head, debias=False, token={"steps": 1})
    before = {name: value.clone() for name, value in method.reference.state_dict().items()}
    found = gradients(method, written_examples(count=2))
    assert all(gradient is not None for gradient in found.values())
    assert not any(parameter.requires_grad for parameter in method.reference.parameters())
    assert all(torch.equal(value, before[name]) for name, value in method.reference.state_dict().items())
    alone = gradients(method.token_method, written_examples(count=2))
    assert any(not torch.allclose(found[name], alone[name]) for name in found)  # type: ignore[arg-type]


def test_the_reference_shares_the_target_and_nothing_else() -> None:
    head = draft_head("eagle3")
    copy = frozen_copy(head)
    assert copy.parts.embed is head.parts.embed
    with torch.no_grad():
        head.fc.weight += 1.0
    assert not torch.equal(copy.fc.weight, head.fc.weight)
    assert torch.equal(copy.target_ids(torch.arange(120)), head.target_ids(torch.arange(120)))


def test_a_few_steps_raise_the_reward() -> None:
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    method = gto(head, groups=4, token_loss="eagle", token={"noise": 0.0})
    head.eval()  # the same groups at every step
    history = train(method, written_examples(count=2), 10, lr=1e-3)
    assert float(history[-1].parts["reward"]) > float(history[0].parts["reward"]) + 0.03
    assert float(history[-1].parts["reward_gain"]) > 0.03


def test_good_branches_become_likelier_and_bad_ones_less_likely() -> None:
    """With next to no token loss, so that it is the trees that teach."""
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    nothing = {"classification": 1e-9, "regression": 0.0, "noise": 0.0}
    method = gto(head, groups=4, token_loss="eagle", token=nothing, debias=False)
    head.eval()
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    rows = method._groups(batch)
    roots, is_root = padded(rows, 1, torch.device("cpu"))
    judged = method._judge(batch, signals, roots, rows)
    advantage = advantages(judged.rewards.view(2, -1, 3), method.options.delta).view_as(roots)
    assert bool(is_root.all())
    counts = judged.branch.length > 0
    assert bool((advantage[counts] > 0.5).any())
    assert bool((advantage[counts] < -0.2).any())
    train(method, written_examples(count=2), 4, lr=1e-4)
    with torch.no_grad():
        logs = [
            branch_log_probs(h, HeadRun(h, batch, signals, roots), judged.branch, is_root)
            for h in (head, method.reference)
        ]
    away = ratios(*logs, judged.branch.length) - 1.0
    assert float((away * advantage)[counts].mean()) > 0.005
    assert not bool(away[~counts].any())


def test_a_text_without_groups_has_its_token_loss() -> None:
    method = gto(draft_head("eagle"))
    examples = random_examples([4])
    losses = losses_of(method, examples)
    assert torch.equal(losses.total, losses_of(method.token_method, examples).total)
    assert "gto" not in losses.parts


def test_the_token_loss_is_that_of_the_heads_kind_or_the_one_asked_for() -> None:
    assert gto(draft_head("eagle")).token_method.name == "hass"
    assert gto(draft_head("eagle3")).token_method.name == "eagle3"
    assert gto(draft_head("eagle"), token_loss="eagle").token_method.name == "eagle"
    with pytest.raises(OptionError, match="kind"):
        gto(draft_head("eagle"), token_loss="eagle3")
    with pytest.raises(OptionError, match="no such options"):
        gto(draft_head("eagle"), token={"stride": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [("groups", 0), ("nodes", 1), ("reward", "sum"), ("eta", 0.0), ("debias", 1), ("epsilon", 1.5), ("token", 3)],
)
def test_options_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        GtoOptions(**{name: value})
