"""Trees grown by the target: below every root, in a small cache, and the labels of their nodes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.models.config import ModelConfig, Rope
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.train.attention.causal import causal_attention
from draftwood.train.base import Batch
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.trees import layer_run, walk
from draftwood.train.trees.grow import grow_trees
from draftwood.train.trees.grow_walk import grow_by_passes
from draftwood.train.trees.labels import Labels, _score_block, find_vocabulary, read_labels
from draftwood.train.trees.layer_run import as_target
from draftwood.train.trees.roots import sample_roots
from draftwood.train.trees.target_trees import Beam, TextTrees
from tests.tools.train import MODEL, random_examples, target_of
from tests.tools.tree import (
    _one_thread,  # noqa: F401 - fixtures
    both_kinds,
    draft_head,
    path_to,
    target_log_probs,
)

# -- growing ---------------------------------------------------------------------------------------------------------


@cache
def target_with_layers(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> NativeTarget:
    """A target that exposes its layers."""
    return tiny_target(model, dtype=dtype, backend="eager")


def beam_by_hand(text: list[int], root: int, beam: Beam, vocabulary: list[int]) -> list[list[tuple[list[int], float]]]:
    """The rows of a tree: paths and their log-probabilities, best first. The first is the root."""
    rows = [[([], 0.0)]]
    for _ in range(beam.depth - 1):
        found = []
        for path, value in rows[-1]:
            said = target_log_probs(target_of(), [*text[: root + 1], *path])
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
        said = target_log_probs(target_of(), [*text[: root + 1], *path])
        own = said[torch.tensor(vocabulary)].softmax(dim=-1)
        best = own.topk(beam.num_kept)
        assert trees.ids[number, node].tolist() == best.indices.tolist()
        torch.testing.assert_close(trees.probs[number, node].float(), best.values, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(trees.rest[number, node], 1.0 - best.values.sum(), atol=1e-4, rtol=0.0)
        assert bool(trees.counts[number, node]) == (int(said.argmax()) in vocabulary)


@both_kinds
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("rows", [6, 1024])
def test_trees_match_beam_search_for_every_root(
    kind: str, lends: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "PASS_ROWS", rows)
    monkeypatch.setitem(layer_run.MAX_ROWS, "cpu", rows)
    head = draft_head(kind)
    beam = Beam(width=3, depth=3, num_kept=9)
    vocabulary = find_vocabulary(head)
    texts = [example.token_ids.tolist() for example in random_examples([7, 11])]
    roots = [[1, 2, 3, 4, 5], [4, 9, 10]]
    grown = grow_trees(target_with_layers() if lends else target_of(), texts, roots, beam, vocabulary)
    ids = list(range(MODEL.vocab_size)) if vocabulary is None else vocabulary.tolist()
    for text, own, trees in zip(texts, roots, grown, strict=True):
        assert trees.roots.tolist() == own
        for number in range(0, len(own), 2):
            check_tree(trees, number, text, beam, ids)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 1},
        {"num_kv_heads": 4, "qk_norm": True},
        {"qkv_bias": True, "o_bias": True, "tied_embeddings": True},
        {"rope": Rope(kind="llama3", factor=4.0, original_context=16)},
    ],
)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), beam=st.builds(Beam, *map(st.just, (2, 3, 4))))
@settings(max_examples=5)
def test_exposed_layers_match_the_target(changes: dict[str, Any], sizes: list[int], beam: Beam) -> None:
    model = replace(MODEL, **changes)
    texts = [example.token_ids.tolist() for example in random_examples([size + 3 for size in sizes])]
    roots = [list(range(1, size)) for size in sizes]
    found, wanted = (grow_trees(target, texts, roots, beam) for target in (target_with_layers(model), target_of(model)))
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own.roots, other.roots)
        same = [(mine == theirs).flatten(1).all(dim=1) for mine, theirs in zip(own[1:4], other[1:4], strict=True)]
        equal = torch.stack(same).all(dim=0)  # [R] below some roots two tokens are nearly tied
        assert int((~equal).sum()) <= 1 + len(equal) // 10
        torch.testing.assert_close(own.probs[equal], other.probs[equal], atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(own.rest[equal], other.rest[equal], atol=1e-4, rtol=0.0)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_exposed_layers_round_like_the_target() -> None:
    """In half precision neither is exact; the fused decoder, which rounds less, is the reference."""
    text = random_examples([60])[0].token_ids.tolist()
    beam, roots = Beam(1, 2, MODEL.vocab_size), list(range(1, 59))
    lending, fused = target_with_layers(dtype=torch.bfloat16), tiny_target(MODEL, dtype=torch.bfloat16)
    with as_target(lending):
        passes = grow_by_passes(lending, [text], [roots], beam, None)
    grown = [*grow_trees(lending, [text], [roots], beam), *passes, *grow_trees(fused, [text], [roots], beam)]
    # Labels of the roots only: deeper paths diverge where two tokens are nearly tied.
    own, own_passes, exact = (
        torch.zeros(len(roots), MODEL.vocab_size).scatter(1, trees.ids[:, 0].long(), trees.probs[:, 0].float())
        for trees in grown
    )
    assert 0.0 < float((own - exact).abs().sum()) < 1.1 * float((own_passes - exact).abs().sum())


@pytest.mark.parametrize("most", [8, 1 << 16])
def test_exposed_layers_match_passes_on_texts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.train.frozen.frozen_target.LAYER_TOKENS", most)
    batch = Batch.of(random_examples([9, 5, 7]))
    taps = (0, 1, MODEL.num_layers)
    found, wanted = (FrozenTarget(target, taps).signals(batch) for target in (target_with_layers(), target_of()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gib", [16, 24, 141])
def test_batch_size_fits_gpu_memory(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model of eight billion parameters; the limit also holds on larger GPUs."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    layers: Any = SimpleNamespace(config=replace(MODEL, **sizes), dtype=torch.bfloat16, device=torch.device("cuda", 0))
    total = gib << 30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    frozen = FrozenTarget(target_with_layers(), (0, 1, 2))
    between_two_products = (4 * sizes["hidden_size"] + 4 * sizes["intermediate_size"]) * layers.dtype.itemsize
    assert total // 64 < frozen._max_tokens(layers) * between_two_products < total // 16
    monkeypatch.setattr("draftwood.train.frozen.frozen_target.LAYER_TOKENS", 100)
    assert frozen._max_tokens(layers) == 100


def test_heads_share_keys_and_values_with_and_without_a_kernel_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(2, 9, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    found = []
    for can in (True, False):
        monkeypatch.setattr("draftwood.train.attention.causal._supports_groups", lambda *_, can=can: can)
        mixed = causal_attention(query, key, value)
        found.append((mixed, *torch.autograd.grad(mixed.square().sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_targets_that_expose_layers() -> None:
    assert target_of().layers() is None  # the fused decoder has packed them
    assert target_with_layers().layers() is not None
    assert tiny_target(replace(MODEL, sliding_window=8), backend="eager").layers() is None


def test_batches_of_roots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows and by bytes; every root occurs once for any limit."""
    texts = [example.token_ids.tolist() for example in random_examples([30, 12, 25, 8, 3])]
    roots = [list(range(1, 29)), [2, 5], list(range(4, 20)), [], [1]]
    layers = target_with_layers().layers()
    assert layers is not None
    wanted = [(text, root) for text, own in enumerate(roots) for root in own]
    shapes = []
    for rows, most_bytes in ((10_000, 1 << 28), (120, 1 << 28), (1, 1 << 28), (10_000, 1 << 19)):
        monkeypatch.setitem(layer_run.MAX_ROWS, "cpu", rows)
        monkeypatch.setattr(layer_run, "MAX_BYTES", most_bytes)
        found = []
        shapes.append([])
        for each in layer_run.slices(layers, texts, roots, 4):
            shapes[-1].append(each.roots.numel() * 4)
            for text, own, size, is_root in zip(each.texts, each.roots, each.sizes, each.is_root, strict=True):
                assert is_root.tolist() == [True] * size + [False] * (len(own) - size)
                found += [(text, root) for root in own.tolist()[:size]]
        assert sorted(found) == wanted
    assert len(shapes[0]) == 1
    assert max(shapes[1]) <= 120
    assert set(shapes[2]) == {4}
    assert len(shapes[3]) > 1


def test_labels_outside_a_small_vocabulary_do_not_count() -> None:
    head = draft_head("eagle3")
    text = random_examples([40])[0].token_ids.tolist()
    (trees,) = grow_trees(target_of(), [text], [list(range(1, 39))], Beam(2, 2, 4), find_vocabulary(head))
    assert 0 < int(trees.counts.sum()) < trees.counts.numel()


def test_text_without_roots_has_no_trees_and_frees_cache() -> None:
    texts = [example.token_ids.tolist() for example in random_examples([5, 9])]
    target = tiny_target(MODEL, cache_tokens=4096)
    assert [len(trees.roots) for trees in grow_trees(target_with_layers(), texts, [[], [3]], Beam(2, 3, 4))] == [0, 1]
    first, second = grow_trees(target, texts, [[], [3]], Beam(2, 3, 4))
    assert [len(part) for part in first] == [0] * 7
    assert [part.shape[1:] for part in first] == [part.shape[1:] for part in second]
    assert target.can_open(target.num_slots)


def test_small_cache_processes_fewer_texts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 3))
def test_sampled_roots_are_a_subset(size: int, count: int, seed: int) -> None:
    roots = list(range(5, 5 + size))
    drawn = sample_roots(roots, count, [1, 2, 3], seed)
    assert len(drawn) == min(size, count)
    assert sorted(set(drawn)) == drawn
    assert set(drawn) <= set(roots)


# -- labels ----------------------------------------------------------------------------------------------------------


class Plain:
    """A head whose outputs are the logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


logits_of_6 = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6)


@given(logits_of_6, logits_of_6, st.integers(1, 6))
def test_remaining_tokens_are_one_class(said: list[float], guessed: list[float], kept: int) -> None:
    true, own = torch.tensor([said]), torch.tensor([guessed])
    labels, _ = read_labels(true, None, kept, 1)
    found, _ = _score_block(Plain(), own, labels.ids, labels.probs, labels.rest)  # type: ignore[arg-type]
    p, q = true.double().softmax(dim=-1)[0], own.double().softmax(dim=-1)[0]
    best = labels.ids[0]
    others = torch.ones(6, dtype=torch.bool).scatter(0, best, False)
    classes = [torch.cat([x[best], x[others].sum()[None]]) if kept < 6 else x[best] for x in (p, q)]
    torch.testing.assert_close(found[0].double(), -(classes[0] * classes[1].log()).sum(), atol=1e-4, rtol=1e-4)
    # The excess over the minimum is never larger than for the full distributions.
    distance = found[0] + (classes[0] * classes[0].log()).sum()
    assert distance <= (p * (p.log() - q.log())).sum() + 1e-4


def test_labels_mark_counted_positions() -> None:
    labels, children = read_labels(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([0, 2, 3]), 2, 2)
    assert isinstance(labels, Labels)
    assert labels.ids.tolist() == [[2, 1]]
    assert children.tokens.tolist() == [[3, 2]]
    assert labels.counts.tolist() == [False]
    own = torch.tensor([0.0, 1.0, 2.0]).softmax(dim=-1)
    torch.testing.assert_close(labels.probs[0], own[[2, 1]])
    torch.testing.assert_close(labels.rest[0], own[0])
    torch.testing.assert_close(children.log_probs[0].exp(), torch.tensor([0.0, 3.0, 1.0, 2.0]).softmax(-1)[[3, 2]])
