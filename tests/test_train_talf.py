"""TALF: trees that the target grows, labels, the loss over their nodes, and the store of trees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.errors import DraftwoodError, OptionError
from draftwood.target.tiny import tiny_target
from draftwood.train.base import Example
from draftwood.train.frozen import FrozenTarget
from draftwood.train.methods.talf import TalfMethod, TalfOptions
from draftwood.train.trees import run, walk
from draftwood.train.trees.grow import Beam, TextTrees, grow_trees
from draftwood.train.trees.labels import Labels, _losses_of, read_labels, vocabulary_of
from draftwood.train.trees.roots import counted_roots, drawn_roots

from .conftest import threads
from .train_tools import MODEL, gradients, losses_of, method_for, random_examples, target_of, train, written_examples
from .tree_tools import DraftHead, batch_and_signals, draft_head, followed, path_to, read, said_behind

both_kinds = pytest.mark.parametrize("kind", ["eagle", "eagle3"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def talf(head: DraftHead, seed: int = 0, **options: Any) -> TalfMethod:
    method = method_for("talf", head, seed=seed, **options)
    assert isinstance(method, TalfMethod)
    return method


# -- growing ---------------------------------------------------------------------------------------------------------


def beam_by_hand(text: list[int], root: int, beam: Beam, vocabulary: list[int]) -> list[list[tuple[list[int], float]]]:
    """The rows of a tree: paths and their log-probabilities, best first. The first is the root."""
    rows = [[([], 0.0)]]
    for _ in range(beam.depth - 1):
        found = []
        for path, value in rows[-1]:
            said = said_behind(target_of(), [*text[: root + 1], *path])
            best = sorted(vocabulary, key=lambda token: -float(said[token]))[: beam.width]
            found += [([*path, token], value + float(said[token])) for token in best]
        rows.append(sorted(found, key=lambda each: -each[1])[: beam.width])
    return rows


def check_tree(trees: TextTrees, number: int, text: list[int], beam: Beam, vocabulary: list[int]) -> None:
    root = int(trees.roots[number])
    tokens, parents = trees.tokens[number].tolist(), trees.parents[number].tolist()
    rows = beam_by_hand(text, root, beam, vocabulary)
    paths = [[]] + [path_to(parents, tokens, row, node) for row in range(beam.depth - 1) for node in range(beam.width)]
    assert paths == [path for row in rows for path, _ in row]
    for node, path in enumerate(paths):
        said = said_behind(target_of(), [*text[: root + 1], *path])
        own = said[torch.tensor(vocabulary)].softmax(dim=-1)
        best = own.topk(beam.num_kept)
        assert trees.ids[number, node].tolist() == best.indices.tolist()
        torch.testing.assert_close(trees.probs[number, node].float(), best.values, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(trees.rest[number, node], 1.0 - best.values.sum(), atol=1e-4, rtol=0.0)
        assert bool(trees.counts[number, node]) == (int(said.argmax()) in vocabulary)


@both_kinds
@pytest.mark.parametrize("pass_rows", [6, 1024])
def test_trees_are_those_of_a_beam_for_every_root(kind: str, pass_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "PASS_ROWS", pass_rows)
    head = draft_head(kind)
    beam = Beam(width=3, depth=3, num_kept=9)
    vocabulary = vocabulary_of(head)
    texts = [example.token_ids.tolist() for example in random_examples([7, 11])]
    roots = [[1, 2, 3, 4, 5], [4, 9, 10]]
    grown = grow_trees(target_of(), texts, roots, beam, vocabulary)
    ids = list(range(MODEL.vocab_size)) if vocabulary is None else vocabulary.tolist()
    for text, own, trees in zip(texts, roots, grown, strict=True):
        assert trees.roots.tolist() == own
        for number in range(0, len(own), 2):
            check_tree(trees, number, text, beam, ids)


def test_some_labels_of_a_small_vocabulary_do_not_count() -> None:
    head = draft_head("eagle3")
    text = random_examples([40])[0].token_ids.tolist()
    (trees,) = grow_trees(target_of(), [text], [list(range(1, 39))], Beam(2, 2, 4), vocabulary_of(head))
    assert 0 < int(trees.counts.sum()) < trees.counts.numel()


def test_a_text_without_roots_has_no_trees_and_the_cache_is_free_again() -> None:
    texts = [example.token_ids.tolist() for example in random_examples([5, 9])]
    target = tiny_target(MODEL, cache_tokens=4096, backend="eager")
    first, second = grow_trees(target, texts, [[], [3]], Beam(2, 3, 4))
    assert [len(part) for part in first] == [0] * 7
    assert [part.shape[1:] for part in first] == [part.shape[1:] for part in second]
    assert target.can_open(target.num_slots)


def test_a_small_cache_holds_fewer_texts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [example.token_ids.tolist() for example in random_examples([20, 18, 20, 5])]
    roots = [[3, 4, 19], [10], [], [2, 3, 4]]
    wanted = grow_trees(target_of(), texts, roots, Beam(2, 3, 4))
    monkeypatch.setattr(walk, "PASS_ROWS", 8)
    found = grow_trees(tiny_target(MODEL, cache_tokens=50), texts, roots, Beam(2, 3, 4))
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own.tokens, other.tokens)
        torch.testing.assert_close(own.probs, other.probs)


@given(st.lists(st.integers(1, 200), unique=True).map(sorted), st.integers(1, 9), st.integers(1, 40))
def test_blocks_cover_a_text_up_to_its_last_root(roots: list[int], most_roots: int, more: int) -> None:
    blocks = walk._blocks(0, roots, most_roots, most_roots + more)
    assert [root for block in blocks for root in block.roots] == roots
    assert all(block.start <= root < block.end for block in blocks for root in block.roots)
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])][: len(blocks)]
    assert all(len(block.roots) <= most_roots for block in blocks)
    assert all(block.end - block.start <= most_roots + more for block in blocks if block.roots)


# -- labels ----------------------------------------------------------------------------------------------------------


class Plain:
    """A head whose outputs are its logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


logits_of_6 = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


@given(logits_of_6, logits_of_6, st.integers(1, 6))
def test_the_rest_is_one_class(said: list[float], guessed: list[float], kept: int) -> None:
    true, own = torch.tensor([said]), torch.tensor([guessed])
    labels, _ = read_labels(true, None, kept, 1)
    found, _ = _losses_of(Plain(), own, labels.ids, labels.probs, labels.rest)  # type: ignore[arg-type]
    p, q = true.double().softmax(dim=-1)[0], own.double().softmax(dim=-1)[0]
    best = labels.ids[0]
    others = torch.ones(6, dtype=torch.bool).scatter(0, best, False)
    classes = [torch.cat([x[best], x[others].sum()[None]]) if kept < 6 else x[best] for x in (p, q)]
    torch.testing.assert_close(found[0].double(), -(classes[0] * classes[1].log()).sum(), atol=1e-4, rtol=1e-4)
    # Never further from its least value than the whole distributions are.
    distance = found[0] + (classes[0] * classes[0].log()).sum()
    assert distance <= (p * (p.log() - q.log())).sum() + 1e-4


def test_all_tokens_kept_is_the_whole_cross_entropy() -> None:
    head = draft_head("eagle3")
    examples = random_examples([12, 9])
    whole, some, few = (losses_of(talf(head, width=2, labels=kept), examples).total.detach() for kept in (999, 119, 1))
    torch.testing.assert_close(whole, some, atol=2e-2, rtol=2e-3)
    assert float(few) < float(whole)


# -- the loss --------------------------------------------------------------------------------------------------------


def loss_by_hand(method: TalfMethod, examples: list[Any], width: int, depth: int) -> Tensor:
    """A path at a time, a token at a time."""
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
                total = total - (trees.probs[number, node].float() * log_probs[ids]).sum()
                total = total - trees.rest[number, node] * log_probs[others].logsumexp(dim=-1)
    return total / sum(map(len, roots))


@both_kinds
@pytest.mark.parametrize("layers", [1, 2])
def test_loss_and_gradients_are_those_of_a_loop_over_nodes(kind: str, layers: int) -> None:
    head = draft_head(kind, num_layers=layers)
    method = talf(head, width=3, depth=3, labels=7)
    examples = random_examples([8, 6], prompt=3)
    loss = loss_by_hand(method, examples, width=3, depth=3)
    by_hand = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    torch.testing.assert_close(losses_of(method, examples).total, loss, atol=1e-4, rtol=1e-5)
    for (name, found), wanted in zip(gradients(method, examples).items(), by_hand, strict=True):
        assert found is not None, name
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4, name


@both_kinds
def test_blocks_and_checkpoints_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = talf(draft_head(kind), width=2)
    examples = random_examples([14, 9], seed=1)
    usual = gradients(method, examples)
    monkeypatch.setattr(run, "MOST_SCORES", 300)
    method.checkpoints, method.block = True, 3
    for name, found in gradients(method, examples).items():
        torch.testing.assert_close(found, usual[name], atol=1e-5, rtol=1e-4)


@both_kinds
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_in_half_precision(kind: str) -> None:
    """A target in bfloat16, a head in float32 whose products are not."""
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


def test_a_text_alone_loses_what_it_loses_among_others() -> None:
    method = talf(draft_head("eagle"), width=2)
    examples = random_examples([14, 9, 3], seed=2)
    alone = [losses_of(method, [example]) for example in examples]
    together = losses_of(method, examples)
    weights = torch.stack([losses.weight for losses in alone])
    mean = (torch.stack([losses.total for losses in alone]) * weights).sum() / weights.sum()
    torch.testing.assert_close(together.total, mean, atol=1e-5, rtol=1e-5)
    assert float(together.weight) == float(weights.sum()) == 12 + 7 + 1


def test_gradients_reach_the_head_alone() -> None:
    head = draft_head("eagle3")
    method = talf(head, width=2)
    found = gradients(method, random_examples([10]))
    assert all(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in found.values())
    assert not any(part.requires_grad for part in method.frozen.parts[:3])


def test_nothing_that_counts_is_no_loss() -> None:
    method = talf(draft_head("eagle"))
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


def hass_at(head: DraftHead, examples: list[Example], step: int) -> Tensor:
    """What HASS loses in one of its steps, by classification alone."""
    options = {"classification": 1.0, "regression": 0.0, "top_k_weight": 0.0, "noise": 0.0, "detach": False}
    losses = [losses_of(method_for("hass", head, steps=n, **options), examples).total for n in (step, step + 1) if n]
    return losses[-1] - (losses[0] if step else 0.0)


def test_one_path_is_hass_along_what_the_target_writes() -> None:
    """On the target's own greedy texts. HASS counts a guess by its place and TALF by its root, so at step j those that
    HASS counts are j places further on."""
    head = draft_head("eagle")
    texts = [example.token_ids for example in written_examples(count=3, length=40)]

    def counted_from(first: int) -> list[Example]:
        return [Example(ids, (np.arange(len(ids)) >= first) & (np.arange(len(ids)) < first + 25)) for ids in texts]

    ours = losses_of(talf(head, width=1, depth=3, labels=999), counted_from(10)).total
    theirs = torch.stack([hass_at(head, counted_from(10 + step), step) for step in range(3)]).sum()
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


# -- roots and the store ---------------------------------------------------------------------------------------------


def test_drawn_roots_are_the_same_in_every_epoch_and_others_for_another_seed() -> None:
    examples = random_examples([40, 6])
    head = draft_head("eagle")
    method = talf(head, roots=8)
    first, second = losses_of(method, examples), losses_of(method, examples[::-1])
    assert float(first.weight) == 8 + 4
    torch.testing.assert_close(first.total, second.total)
    assert method.store.num_grown == 2
    assert not torch.allclose(losses_of(talf(head, seed=1, roots=8), examples).total, first.total)


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 3))
def test_drawn_roots_are_some_of_the_roots(size: int, count: int, seed: int) -> None:
    roots = list(range(5, 5 + size))
    drawn = drawn_roots(roots, count, [1, 2, 3], seed)
    assert len(drawn) == min(size, count)
    assert sorted(set(drawn)) == drawn
    assert set(drawn) <= set(roots)


def test_trees_are_grown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = talf(draft_head("eagle"))
    examples = random_examples([9, 12])
    batch, signals = batch_and_signals(examples, method.frozen)
    first = method.losses(batch, signals).total

    def refuse(*_: object) -> None:
        raise AssertionError("the target is asked again")

    monkeypatch.setattr(type(method.frozen.target), "forward", refuse)
    assert torch.equal(method.losses(batch, signals).total, first)


def test_without_room_trees_are_grown_again() -> None:
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


def test_a_head_of_another_vocabulary_has_other_trees(tmp_path: Path) -> None:
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
def test_options_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        TalfOptions(**{name: value})


def test_heads_that_look_ahead_are_refused() -> None:
    head = draft_head("eagle")
    frozen = FrozenTarget.of(target_of(), head)
    object.__setattr__(head.config, "kind", "medusa")
    with pytest.raises(OptionError, match="talf"):
        TalfMethod(TalfOptions(), head, frozen)


def test_labels_name_what_counts() -> None:
    labels, children = read_labels(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([0, 2, 3]), 2, 2)
    assert isinstance(labels, Labels)
    assert labels.ids.tolist() == [[2, 1]]
    assert children.tokens.tolist() == [[3, 2]]
    assert labels.counts.tolist() == [False]
    own = torch.tensor([0.0, 1.0, 2.0]).softmax(dim=-1)
    torch.testing.assert_close(labels.probs[0], own[[2, 1]])
    torch.testing.assert_close(labels.rest[0], own[0])
    torch.testing.assert_close(children.log_probs[0].exp(), torch.tensor([0.0, 3.0, 1.0, 2.0]).softmax(-1)[[3, 2]])
