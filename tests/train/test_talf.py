"""TALF: the loss over nodes of trees grown by the target, its gradients, and the store of trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.errors import DraftwoodError, OptionError
from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Example
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.methods.talf import TalfMethod, TalfOptions
from draftwood.train.trees import head_run
from draftwood.train.trees.roots import counted_roots
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
    draft_head,
    followed,
    path_to,
    read,
    target_log_probs,
)


def talf(head: DraftHead, seed: int = 0, **options: Any) -> TalfMethod:
    method = method_for("talf", head, seed=seed, **options)
    assert isinstance(method, TalfMethod)
    return method


# -- the loss --------------------------------------------------------------------------------------------------------


def chance(method: TalfMethod, text: list[int], path: list[int]) -> float:
    """The target's probability of this path, restricted to the head's vocabulary."""
    result = 1.0
    tokens = method.head.target_ids(torch.arange(method.head.config.draft_vocab_size)).tolist()
    for number, token in enumerate(path):
        said = target_log_probs(method.frozen.target, text + path[:number])[tokens].softmax(dim=-1)
        result *= float(said[tokens.index(token)])
    return result


def loss_by_hand(method: TalfMethod, examples: list[Any], width: int, depth: int) -> Tensor:
    """One path and one token at a time."""
    head: Any = method.head
    batch, signals = batch_and_signals(examples, method.frozen)
    roots = counted_roots(batch)
    texts = [example.token_ids.tolist() for example in examples]
    total = torch.zeros(())
    for row, (example, trees) in enumerate(zip(examples, method.store.trees(texts, roots), strict=True)):
        text, taps = read(example, signals, row)
        for number, root in enumerate(trees.roots.tolist()):
            tokens, parents = trees.tokens[number].tolist(), trees.parents[number].tolist()
            paths = [[]] + [path_to(parents, tokens, at, node) for at in range(depth - 1) for node in range(width)]
            for node, path in enumerate(paths):
                if not trees.counts[number, node]:
                    continue
                log_probs = head.logits(followed(head, text, taps, root, path)).log_softmax(dim=-1)
                ids = trees.ids[number, node].long()
                others = torch.ones_like(log_probs, dtype=torch.bool).scatter(0, ids, False)
                loss = -(trees.probs[number, node].float() * log_probs[ids]).sum()
                loss = loss - trees.rest[number, node] * log_probs[others].logsumexp(dim=-1)
                by_path = method.options.weights == "path"
                total = total + loss * (chance(method, text[: root + 1], path) if by_path else 1.0)
    return total / sum(map(len, roots))


@both_kinds
@pytest.mark.parametrize(("layers", "weights"), [(1, "even"), (2, "even"), (1, "path")])
def test_loss_and_gradients_match_loop_over_nodes(kind: str, layers: int, weights: str) -> None:
    head = draft_head(kind, num_layers=layers)
    method = talf(head, width=3, depth=3, labels=7, weights=weights)
    examples = random_examples([8, 6], prompt=3)
    loss = loss_by_hand(method, examples, width=3, depth=3)
    by_hand = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    close = 1e-4 if weights == "even" else 1e-3  # labels are stored in 16 bits
    torch.testing.assert_close(losses_of(method, examples).total, loss, atol=close, rtol=close / 10)
    for (name, found), wanted in zip(gradients(method, examples).items(), by_hand, strict=True):
        assert found is not None, name
        assert float((found - wanted).norm() / wanted.norm()) < close, name


@both_kinds
def test_blocks_and_checkpointing_do_not_change_the_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = talf(draft_head(kind), width=2)
    examples = random_examples([14, 9], seed=1)
    usual = gradients(method, examples)
    monkeypatch.setattr(head_run, "MAX_SCORES", 300)
    method.checkpoints, method.block = True, 3
    for name, found in gradients(method, examples).items():
        torch.testing.assert_close(found, usual[name], atol=2e-4, rtol=1e-3)


@both_kinds
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision(kind: str) -> None:
    """A target in bfloat16 and a head in float32 under autocast."""
    head = draft_head(kind)
    examples = written_examples(count=2)
    usual = float(losses_of(talf(head, width=2), examples).total.detach())
    target = tiny_target(MODEL, dtype=torch.bfloat16)
    method = TalfMethod(TalfOptions(width=2), head, FrozenTarget.of(target, head))
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(method, examples)
    losses.total.backward()
    assert float(losses.total.detach()) == pytest.approx(usual, rel=0.1)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())


def test_loss_with_all_labels_is_full_cross_entropy() -> None:
    head = draft_head("eagle3")
    examples = random_examples([12, 9])
    whole, some, few = (losses_of(talf(head, width=2, labels=kept), examples).total.detach() for kept in (999, 119, 1))
    torch.testing.assert_close(whole, some, atol=2e-2, rtol=2e-3)
    assert float(few) < float(whole)


def test_loss_of_a_text_does_not_depend_on_its_batch() -> None:
    method = talf(draft_head("eagle"), width=2)
    examples = random_examples([14, 9, 3], seed=2)
    alone = [losses_of(method, [example]) for example in examples]
    together = losses_of(method, examples)
    weights = torch.stack([losses.weight for losses in alone])
    mean = (torch.stack([losses.total for losses in alone]) * weights).sum() / weights.sum()
    torch.testing.assert_close(together.total, mean, atol=1e-5, rtol=1e-5)
    assert float(together.weight) == float(weights.sum()) == 12 + 7 + 1


def test_gradients_reach_only_the_head() -> None:
    head = draft_head("eagle3")
    method = talf(head, width=2)
    found = gradients(method, random_examples([10]))
    assert all(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in found.values())
    assert not any(part.requires_grad for part in method.frozen.parts[:3])


@pytest.mark.parametrize("text", [False, True])
def test_texts_without_counted_tokens_have_no_loss(text: bool) -> None:
    method = talf(draft_head("eagle"), text=text)
    losses = losses_of(method, random_examples([6, 2], prompt=6))
    assert float(losses.total.detach()) == float(losses.weight) == 0.0
    assert all(gradient is not None for gradient in gradients(method, random_examples([6], prompt=6)).values())


def test_detached_features_stop_gradients_between_depths() -> None:
    examples = random_examples([10])
    head = draft_head("eagle")
    losses = [losses_of(talf(head, width=2, detach=detach), examples).total for detach in (False, True)]
    assert torch.equal(*losses)
    free, cut = (gradients(talf(head, width=2, detach=detach), examples) for detach in (False, True))
    assert not torch.allclose(free["fc.weight"], cut["fc.weight"], rtol=1e-2)  # type: ignore[arg-type]


def hass_at(head: DraftHead, examples: list[Example], step: int, noise: float) -> Tensor:
    """The classification loss of one HASS step."""
    options = {"classification": 1.0, "regression": 0.0, "top_k_weight": 0.0, "noise": noise, "detach": False}
    losses = [losses_of(method_for("hass", head, steps=n, **options), examples).total for n in (step, step + 1) if n]
    return losses[-1] - (losses[0] if step else 0.0)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_single_path_equals_hass_on_target_texts(noise: float) -> None:
    """On the target's own greedy texts. HASS counts a guess by its place and TALF by its root, so at step j those that
    HASS counts are j places further on."""
    head = draft_head("eagle")
    texts = [example.token_ids for example in written_examples(count=3, length=40)]

    def counted_from(first: int) -> list[Example]:
        return [Example(ids, (np.arange(len(ids)) >= first) & (np.arange(len(ids)) < first + 25)) for ids in texts]

    ours = losses_of(talf(head, width=1, depth=3, labels=999, noise=noise), counted_from(10)).total
    theirs = torch.stack([hass_at(head, counted_from(10 + step), step, noise) for step in range(3)]).sum()
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    flat = [
        torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(head.parameters()))])
        for loss in (ours, theirs)
    ]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 5e-3


def test_training_lowers_the_loss_at_every_depth() -> None:
    method = talf(draft_head("eagle3"), width=2)
    history = train(method, written_examples(count=2), 12, lr=3e-3)
    for name in ("loss", "cross_entropy", "cross_entropy_1", "cross_entropy_2"):
        assert float(history[-1].parts[name]) < 0.9 * float(history[0].parts[name])
    assert method.store.num_grown == 2


# -- guesses after the text ------------------------------------------------------------------------------------------


@both_kinds
def test_text_loss_equals_loss_with_all_roots(kind: str) -> None:
    """With labels of all tokens, guesses at all positions are compared with the same distributions."""
    head = draft_head(kind)
    examples = random_examples([14, 9, 3], seed=3)
    usual, of_text = (talf(head, width=2, labels=999, text=text) for text in (False, True))
    close = 2e-3  # labels of trees are stored in 16 bits
    found, wanted = losses_of(of_text, examples), losses_of(usual, examples)
    torch.testing.assert_close(found.total, wanted.total, atol=close, rtol=close)
    assert found.parts.keys() == wanted.parts.keys()
    if kind == "eagle":  # otherwise guesses outside the draft vocabulary are wrong here and not counted there
        for name, part in found.parts.items():
            torch.testing.assert_close(part, wanted.parts[name], atol=close, rtol=close)
    for (name, one), other in zip(
        gradients(of_text, examples).items(), gradients(usual, examples).values(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=close, rtol=close, msg=name)


@pytest.mark.parametrize("weights", ["even", "path"])
def test_texts_are_learned_at_positions_without_trees(weights: str) -> None:
    """Per text: the mean over its positions replaces that over its roots; deeper nodes as before."""
    head = draft_head("eagle")
    options: dict[str, Any] = {"width": 2, "labels": 999, "weights": weights}

    def total(examples: list[Example], **more: Any) -> Tensor:
        return losses_of(talf(head, **options, **more), examples).total.detach()

    examples = random_examples([14, 9, 4], seed=2)
    wanted, numbers = [], []
    for example in examples:
        nodes = total([example], roots=3) - total([example], roots=3, depth=1)
        wanted.append(total([example], depth=1) + nodes)
        numbers.append(min(3, len(example.token_ids) - 2))
    mean = sum(number * each for number, each in zip(numbers, wanted, strict=True)) / sum(numbers)
    found = losses_of(talf(head, **options, roots=3, text=True), examples)
    torch.testing.assert_close(found.total.detach(), mean, atol=2e-3, rtol=2e-3)
    assert float(found.weight) == sum(numbers)


def test_text_loss_with_small_vocabulary() -> None:
    head = draft_head("eagle3", draft_vocab_size=40)
    examples = random_examples([20, 15], seed=5)
    usual, of_text = (losses_of(talf(head, width=2, labels=999, text=text), examples) for text in (False, True))
    torch.testing.assert_close(of_text.total, usual.total, atol=2e-3, rtol=2e-3)


# -- roots and the store ---------------------------------------------------------------------------------------------


def test_sampled_roots_depend_on_seed_not_epoch() -> None:
    examples = random_examples([40, 6])
    head = draft_head("eagle")
    method = talf(head, roots=8)
    first, second = losses_of(method, examples), losses_of(method, examples[::-1])
    assert float(first.weight) == 8 + 4
    torch.testing.assert_close(first.total, second.total)
    assert method.store.num_grown == 2
    assert not torch.allclose(losses_of(talf(head, seed=1, roots=8), examples).total, first.total)


def test_prepared_trees_are_not_grown_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    head = draft_head("eagle")
    examples = random_examples([9, 12])
    wanted = losses_of(talf(head, roots=4), examples).total
    method = talf(head, roots=4, prepare=True)
    batch, signals = batch_and_signals(examples, method.frozen)
    said: list[tuple[int, int]] = []
    method.prepare([examples[:1], examples[1:]], lambda _, done, total: said.append((done, total)))
    assert said == [(0, 2), (1, 2), (2, 2)]
    talf(head).prepare([examples], lambda *_: pytest.fail("not asked for"))

    def refuse(*_: object) -> None:
        raise AssertionError("the target is asked again")

    monkeypatch.setattr(type(method.frozen.target), "forward", refuse)
    assert torch.equal(method.losses(batch, signals).total, wanted)


def test_noise_is_for_training_only() -> None:
    head, examples = draft_head("eagle"), random_examples([9, 12])
    head.eval()
    assert torch.equal(losses_of(talf_in_evaluation(head, noise=0.5), examples).total,
                       losses_of(talf_in_evaluation(head), examples).total)  # fmt: skip


def talf_in_evaluation(head: DraftHead, **options: Any) -> TalfMethod:
    method = talf(head, **options)
    head.eval()
    return method


def test_trees_are_grown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = talf(draft_head("eagle"))
    examples = random_examples([9, 12])
    batch, signals = batch_and_signals(examples, method.frozen)
    first = method.losses(batch, signals).total

    def refuse(*_: object) -> None:
        raise AssertionError("the target is asked again")

    monkeypatch.setattr(type(method.frozen.target), "forward", refuse)
    assert torch.equal(method.losses(batch, signals).total, first)


def test_target_with_layer_access_runs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the same, also in the precision used for training."""
    examples = random_examples([14, 9, 3], seed=2)
    head = draft_head("eagle3")
    wanted = losses_of(talf(head), examples).total.detach()
    method = TalfMethod(TalfOptions(), head, FrozenTarget.of(tiny_target(MODEL, backend="eager"), head))
    batch, signals = batch_and_signals(examples, method.frozen)

    def refuse(*_: object) -> None:
        raise AssertionError("the target runs a pass")

    monkeypatch.setattr(type(method.frozen.target), "forward", refuse)
    torch.testing.assert_close(method.losses(batch, signals).total.detach(), wanted, atol=1e-3, rtol=1e-3)
    kept = next(iter(method.store._held.values()))
    again = TalfMethod(TalfOptions(), head, method.frozen)
    with torch.autocast("cpu", torch.bfloat16):
        again.losses(batch, signals)
    assert all(torch.equal(*each) for each in zip(kept, next(iter(again.store._held.values())), strict=True))


def test_trees_are_grown_again_without_space() -> None:
    method = talf(draft_head("eagle"), memory_mb=0)
    examples = random_examples([9])
    losses = [losses_of(method, examples).total for _ in range(2)]
    assert torch.equal(*losses)
    assert method.store.num_grown == 2


def test_trees_in_a_folder_are_read_by_the_next_run(tmp_path: Path) -> None:
    head = draft_head("eagle3")
    examples = random_examples([9, 12])
    first = talf(head, folder=str(tmp_path))
    losses = losses_of(first, examples).total
    again = talf(head, folder=str(tmp_path))
    assert torch.equal(losses_of(again, examples).total, losses)
    assert (first.store.num_grown, again.store.num_grown) == (2, 0)
    other = talf(head, folder=str(tmp_path), width=2)
    losses_of(other, examples)
    assert other.store.num_grown == 2


def test_heads_with_different_vocabularies_have_different_trees(tmp_path: Path) -> None:
    examples = random_examples([9])
    for seed in (0, 1):
        method = talf(draft_head("eagle3", seed), folder=str(tmp_path))
        losses_of(method, examples)
        assert method.store.num_grown == 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    head = draft_head("eagle")
    losses_of(talf(head, folder=str(tmp_path)), random_examples([9]))
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(b"nothing")
    with pytest.raises(DraftwoodError, match="cannot be read"):
        losses_of(talf(head, folder=str(tmp_path)), random_examples([9]))


@settings(max_examples=20)
@given(st.sampled_from(["width", "depth", "labels"]), st.sampled_from([0, -1, 1.5, True, "4"]))
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        TalfOptions(**{name: value})


def test_path_weights_need_all_children_in_labels() -> None:
    TalfOptions(weights="path", width=4, labels=4)
    with pytest.raises(OptionError, match="labels = 3, width = 4"):
        TalfOptions(weights="path", width=4, labels=3)
    with pytest.raises(OptionError, match="'odd'"):
        TalfOptions(weights="odd")


def test_multi_token_heads_are_refused() -> None:
    head = draft_head("eagle")
    frozen = FrozenTarget.of(target_of(), head)
    object.__setattr__(head.config, "kind", "medusa")
    with pytest.raises(OptionError, match="talf"):
        TalfMethod(TalfOptions(), head, frozen)
