"""The method `reach`: smooth membership of the text in the head's own trees, its gradients, and its effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from draftwood.errors import OptionError
from draftwood.train.methods.reach import ReachMethod, ReachOptions, accepted_length, follow_text
from draftwood.train.trees.draft_trees import DraftBeam, DraftTrees
from draftwood.train.trees.rewards import Branch
from draftwood.train.trees.roots import counted_roots, sample_roots, texts_of
from tests.tools.train import gradients, losses_of, method_for, random_examples, train, written_examples
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
    trained_head,
)

SMALL: dict[str, Any] = {"roots": 6, "width": 3, "nodes": 8, "depth": 3}


def reach(head: DraftHead, seed: int = 0, **options: Any) -> ReachMethod:
    method = method_for("reach", head, seed=seed, **{**SMALL, **options})
    assert isinstance(method, ReachMethod)
    return method


@both_kinds
def test_objective_matches_loop_over_positions(kind: str) -> None:
    head = trained_head(kind)
    method = reach(head, softness=0.7)
    head.eval()
    example = written_examples(count=2)[0]
    losses = losses_of(method, [example])
    batch, signals = batch_and_signals([example], method.frozen)
    text, taps = read(example, signals)
    roots = sample_roots(counted_roots(batch)[0], 6, texts_of(batch)[0], 0, 0)
    total, accepted = 0.0, 0
    with torch.no_grad():

        def value(root: int, path: tuple[int, ...]) -> float:
            own = head.draft_ids(torch.tensor(path)).tolist()
            said = [head.logits(followed(head, text, taps, root, path[:at])).log_softmax(-1) for at in range(len(path))]
            return sum(float(row[token]) for row, token in zip(said, own, strict=True))

        for root in roots:
            paths = paths_of(*decoding_tree(head, text, taps, root, DraftBeam(3, 8, 3))) - {()}
            edge = min(value(root, path) for path in paths)
            for end in range(root + 2, min(root + 5, len(text) + 1)):
                path = tuple(text[root + 1 : end])
                if min(head.draft_ids(torch.tensor(path)).tolist()) < 0:
                    break
                total += 1.0 / (1.0 + math.exp(-(value(root, path) - edge) / 0.7))
                accepted += path in paths
    assert float(losses.parts["reach"]) == pytest.approx(-total / len(roots), abs=1e-4)
    assert float(losses.parts["accepted"]) == pytest.approx(accepted / len(roots))
    assert accepted > 0
    assert float(losses.total.detach()) == pytest.approx(float(losses.parts["token"]) - total / len(roots), abs=1e-3)


def test_text_ends_at_its_end_and_at_missing_tokens() -> None:
    head = draft_head("eagle3")
    missing = next(token for token in range(256) if int(head.draft_ids(torch.tensor(token))) < 0)
    known = head.target_ids(torch.arange(5)).tolist()
    (example,) = random_examples([8])
    example.token_ids[2:] = [*known, missing]
    batch, _ = batch_and_signals([example], method_for("eagle3", head, steps=1).frozen)
    found = follow_text(head, batch, torch.tensor([[1, 3, 5, 7]]), 4)
    assert found.length.tolist() == [[4, 3, 1, 0]]
    assert found.tokens[0, 1].tolist() == [*known[2:], 0]


def test_accepted_length_follows_the_tree() -> None:
    tokens, parents = torch.tensor([-1, 5, 6, 5, 7]), torch.tensor([0, 0, 0, 1, 3])
    trees = DraftTrees(tokens[None, None], parents[None, None], torch.tensor([0, 1, 1, 2, 3])[None, None])
    for path, length, wanted in (([5, 5, 7], 3, 3), ([5, 5, 7], 2, 2), ([6, 5, 7], 3, 1), ([7, 5, 7], 3, 0)):
        branch = Branch(torch.tensor(path)[None, None], torch.tensor([[length]]))
        assert accepted_length(trees, branch).tolist() == [[wanted]]


@both_kinds
def test_gradients_reach_the_text_and_the_edge(kind: str) -> None:
    """The loss falls by what its gradient promises, which takes both parts of it."""
    head = trained_head(kind)
    method = reach(head, softness=0.5)
    head.eval()
    examples = written_examples(count=2)
    batch, signals = batch_and_signals(examples, method.frozen)
    parameters = list(head.parameters())
    loss, before = method.tree_loss(batch, signals)
    assert loss is not None
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    norm = math.sqrt(sum(float(each.square().sum()) for each in found if each is not None))
    with torch.no_grad():
        for parameter, each in zip(parameters, found, strict=True):
            if each is not None:
                parameter -= 1e-3 / norm * each
    after, logged = method.tree_loss(batch, signals)
    assert after is not None
    assert float((loss - after).detach()) == pytest.approx(1e-3 * norm, rel=0.3)
    assert float(logged["edge"]) != float(before["edge"])


def test_every_parameter_of_the_head_gets_a_gradient() -> None:
    found = gradients(reach(draft_head("eagle3"), token={"steps": 1}), written_examples(count=2))
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in found.values())


def test_training_on_the_term_alone_raises_acceptance() -> None:
    head = moved(trained_head("eagle"), 0.0).requires_grad_(True)
    nothing = {"classification": 1e-9, "regression": 0.0, "noise": 0.0}
    method = reach(head, roots=64, token_loss="eagle", token=nothing)
    head.eval()  # the same positions at every step
    history = train(method, written_examples(count=2), 10, lr=1e-3)
    assert float(history[-1].parts["accepted"]) > float(history[0].parts["accepted"]) + 0.1


def test_text_without_answer_has_only_token_loss() -> None:
    method = reach(draft_head("eagle"))
    examples = random_examples([2])
    losses = losses_of(method, examples)
    assert torch.equal(losses.total, losses_of(method.token_method, examples).total)
    assert "reach" not in losses.parts


def test_positions_differ_between_steps() -> None:
    method = reach(trained_head("eagle"), roots=2, token={"noise": 0.0})
    seen = set()
    for step in range(3):
        method.begin_step(step, 3)
        seen.add(float(losses_of(method, written_examples(count=2)).parts["reach"]))
    assert len(seen) == 3


@pytest.mark.parametrize(("name", "value"), [("roots", 0), ("softness", 0.0), ("nodes", 1), ("weight", -1.0)])
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        ReachOptions(**{name: value})
