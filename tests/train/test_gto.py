"""GTO: the objective over groups of draft trees, its gradients, the effect of its steps, and its options."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.errors import OptionError
from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Example
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.methods.gto import GtoMethod, GtoOptions, copy_frozen
from draftwood.train.trees.branch import branch_log_probs
from draftwood.train.trees.draft_trees import DraftBeam
from draftwood.train.trees.head_run import HeadRun
from draftwood.train.trees.rewards import advantages, ratios
from draftwood.train.trees.roots import padded
from tests.tools.train import (
    MODEL,
    gradients,
    losses_of,
    method_for,
    random_examples,
    target_of,
    train,
    written_examples,
)
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
from tests.tools.tree import trained_head as new_trained_head

trained_head = cache(new_trained_head)
SMALL: dict[str, Any] = {"groups": 2, "group_size": 3, "width": 3, "nodes": 8, "depth": 3}


def gto(head: DraftHead, seed: int = 0, **options: Any) -> GtoMethod:
    method = method_for("gto", head, seed=seed, **{**SMALL, **options})
    assert isinstance(method, GtoMethod)
    return method


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
                float(target_log_probs(target_of(), [*text[: root + 1], *path[:at]])[path[at]])
                for at in range(len(path))
            ]
            values.append(sum(math.exp(sum(said[:at])) for at in range(1, len(path) + 1)))
    return math.log(sum(math.exp(value) for value in values))


def objective_by_hand(method: GtoMethod, example: Example) -> float:
    """The objective of one text, tree by tree."""
    options, head = method.options, method.head
    assert isinstance(head, type(method.reference))
    batch, signals = batch_and_signals([example], method.frozen)
    text, taps = read(example, signals)
    (members,) = method._sample_groups(batch)
    beam = DraftBeam(options.width, options.nodes, options.depth)
    gains, ratio = [], []
    for root in members:
        kept, others = (paths_of(*decoding_tree(each, text, taps, root, beam)) for each in (head, method.reference))
        gains.append(reward_by_hand(text, root, kept) - reward_by_hand(text, root, others) * options.debias)
        branch: tuple[int, ...] = ()
        while (longer := (*branch, int(target_log_probs(target_of(), [*text[: root + 1], *branch]).argmax()))) in kept:
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
def test_objective_matches_loop_over_trees(kind: str, debias: bool) -> None:
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
def test_target_with_layer_access_gives_same_rewards(kind: str) -> None:
    head = moved(trained_head(kind), 0.0).requires_grad_(True)
    lending = FrozenTarget.of(tiny_target(MODEL, backend="eager"), head)
    methods = gto(head), GtoMethod(GtoOptions(**SMALL), head, lending)
    head.load_state_dict(moved(head, 0.02).state_dict())
    first, second = (losses_of(method, written_examples(count=2)) for method in methods)
    assert float(first.parts["accepted"]) == float(second.parts["accepted"]) > 0
    for name in ("reward", "reward_gain", "ratio_away"):
        assert float(second.parts[name]) == pytest.approx(float(first.parts[name]), rel=1e-3, abs=1e-4)
    assert float(second.parts["reward_gain"]) != 0.0


@both_kinds
def test_ratios_are_one_and_loss_zero_before_first_step(kind: str) -> None:
    examples = written_examples(count=2)
    for debias in (True, False):
        method = gto(draft_head(kind), debias=debias)
        losses = losses_of(method, examples)
        assert float(losses.parts["ratio_away"]) == 0.0
        assert float(losses.parts["reward_gain"]) == 0.0
        assert abs(float(losses.parts["gto"])) < 1e-4


@both_kinds
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision(kind: str) -> None:
    """A target in bfloat16 and a head in float32 under autocast: ratios are exactly one here too."""
    head = draft_head(kind)
    target = tiny_target(MODEL, dtype=torch.bfloat16)
    method = GtoMethod(GtoOptions(**SMALL, debias=False), head, FrozenTarget.of(target, head))
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(method, written_examples(count=2))
    losses.total.backward()
    assert float(losses.parts["ratio_away"]) == 0.0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())


def test_gradients_reach_only_the_head() -> None:
    head = draft_head("eagle3")
    method = gto(head, debias=False, token={"steps": 1})
    before = {name: value.clone() for name, value in method.reference.state_dict().items()}
    found = gradients(method, written_examples(count=2))
    assert all(gradient is not None for gradient in found.values())
    assert not any(parameter.requires_grad for parameter in method.reference.parameters())
    assert all(torch.equal(value, before[name]) for name, value in method.reference.state_dict().items())
    alone = gradients(method.token_method, written_examples(count=2))
    assert any(not torch.allclose(found[name], alone[name]) for name in found)  # type: ignore[arg-type]


def test_loss_is_the_weighted_sum_of_its_terms() -> None:
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    method = gto(head, weight=0.7, token_loss="eagle", token={"noise": 0.0})
    head.load_state_dict(moved(head, 0.02).state_dict())
    head.eval()
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    token, tree, found = method.terms(batch, signals)
    losses = method.losses(batch, signals)
    assert tree is not None
    assert float(tree.detach()) != 0.0
    torch.testing.assert_close(losses.total, token.total + 0.7 * tree)
    assert losses.parts.keys() == {*token.parts, *found, "token", "gto", "loss"}


def test_reference_head_shares_only_the_target() -> None:
    head = draft_head("eagle3")
    copy = copy_frozen(head)
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
    """With almost no token loss, so that training comes from the trees."""
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    nothing = {"classification": 1e-9, "regression": 0.0, "noise": 0.0}
    method = gto(head, groups=4, token_loss="eagle", token=nothing, debias=False)
    head.eval()
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    rows = method._sample_groups(batch)
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
            branch_log_probs(h, HeadRun(h, batch, signals, roots), judged.branch, is_root).sum(-1)
            for h in (head, method.reference)
        ]
    away = ratios(*logs, judged.branch.length) - 1.0
    assert float((away * advantage)[counts].mean()) > 0.005
    assert not bool(away[~counts].any())


@both_kinds
def test_drawn_groups_are_trees_at_one_position(kind: str) -> None:
    head = moved(trained_head(kind), 0.0).requires_grad_(True)
    method = gto(head, drawn=True, group_size=4)
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    rows = method._sample_groups(batch)
    assert [len(row) for row in rows] == [2, 2]
    judged = method._judge(batch, signals, padded(rows, 1, torch.device("cpu"))[0], rows)
    assert judged.rewards.shape == judged.branch.length.shape == (2, 8)
    assert judged.branch.tokens.shape == (2, 8, 3)
    in_groups = judged.rewards.view(2, 2, 4)
    assert len(in_groups.unique()) > 4  # trees of a group differ
    torch.testing.assert_close(method.advantages(judged).view(2, 2, 4).sum(-1), torch.zeros(2, 2), atol=1e-4, rtol=0)
    again = method._judge(batch, signals, padded(rows, 1, torch.device("cpu"))[0], rows)
    assert torch.equal(judged.rewards, again.rewards)


def test_tokens_that_all_drawn_trees_accept_get_no_gradient() -> None:
    """The gradient of a group is that of the tokens by which its trees differ."""
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    method = gto(head, drawn=True, groups=1, group_size=4)
    example = written_examples(count=2)[0]
    batch, signals = batch_and_signals([example], method.frozen)
    rows = method._sample_groups(batch)
    roots, is_root = padded(rows * 1, 1, torch.device("cpu"))
    judged = method._judge(batch, signals, roots, rows)
    same = judged._replace(branch=judged.branch._replace(
        tokens=judged.branch.tokens[:, :1].expand(-1, 4, -1), length=torch.ones_like(judged.branch.length)
    ))  # fmt: skip
    loss, _ = method._objective(batch, signals, roots.repeat(1, 4), is_root.repeat(1, 4), same)
    assert len(judged.rewards.unique()) > 1
    found = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    assert max(float(each.abs().max()) for each in found if each is not None) < 1e-4


def test_text_without_groups_has_only_token_loss() -> None:
    method = gto(draft_head("eagle"))
    examples = random_examples([4])
    losses = losses_of(method, examples)
    assert torch.equal(losses.total, losses_of(method.token_method, examples).total)
    assert "gto" not in losses.parts


def test_token_loss_depends_on_head_or_option() -> None:
    assert gto(draft_head("eagle")).token_method.name == "hass"
    assert gto(draft_head("eagle3")).token_method.name == "eagle3"
    assert gto(draft_head("eagle"), token_loss="eagle").token_method.name == "eagle"
    with pytest.raises(OptionError, match="kind"):
        gto(draft_head("eagle"), token_loss="eagle3")
    with pytest.raises(OptionError, match="has no option 'stride'"):
        gto(draft_head("eagle"), token={"stride": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [("groups", 0), ("nodes", 1), ("reward", "sum"), ("eta", 0.0), ("debias", 1), ("epsilon", 1.5), ("token", 3)],
)
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        GtoOptions(**{name: value})
