"""The fused CPU decoder: equal to the eager one up to rounding, and equal to itself to the last bit in any batch."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.errors import OptionError
from draftwood.models.config import ModelConfig
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.find_top import top_rows
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.eager import EagerDecoder
from draftwood.targets.native.weights import Weights
from tests.conftest import path_to, threads
from tests.tools.cpu_decoder import BASE, CPU, VARIANTS, Model, fused, random_ids, random_parents, random_weights

pytestmark = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_eager_decoder(variant: str) -> None:
    config = replace(BASE, **VARIANTS[variant])  # type: ignore[arg-type]
    weights = random_weights(config)
    prompts = [random_ids(config, 150, seed=1), random_ids(config, 9, seed=2)]
    parents = [random_parents(23, seed=3), [-1, 0, 0], [-1]]
    taps = (0, 1, config.num_layers)
    results = []
    for kind in (EagerDecoder, CpuDecoder):
        model = Model(kind, config, weights, torch.float32)
        sequences = [*(model.open(prompt) for prompt in prompts), model.open()]
        segments = [
            Segment(sequence, random_ids(config, len(tree), seed=7), tree, min(len(tree), 20))
            for sequence, tree in zip(sequences, parents, strict=True)
        ]
        results.append(model.run(*segments, taps=taps))
    eager, ours = results
    torch.testing.assert_close(ours.logits, eager.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.taps, eager.taps, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.greedy_ids, ours.logits.argmax(dim=-1))


@pytest.mark.parametrize("variant", ["plain", "odd sizes", "untied", "everything"])
def test_bfloat16_weights_are_computed_in_float32(variant: str) -> None:
    """Exactly with vector units; AMX tiles round the inputs of every product to bfloat16."""
    config = replace(BASE, **VARIANTS[variant])  # type: ignore[arg-type]
    halves = random_weights(config, torch.bfloat16)
    rounded = widened(halves, config)
    prompt, tree = random_ids(config, 70, seed=1), random_parents(12, seed=2)
    ids = random_ids(config, 12, seed=3)
    outputs = []
    for kind, weights in ((EagerDecoder, rounded), (CpuDecoder, halves)):
        model = Model(kind, config, weights, torch.float32)
        outputs.append(model.run(Segment(model.open(prompt), ids, tree, 12)).logits)
    if CpuDecoder.instructions() == "AMX":
        assert (outputs[1] - outputs[0]).norm() / outputs[0].norm() < 0.02
    else:
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-4)


def test_the_matrices_of_a_model_may_differ_in_format() -> None:
    """Every matrix carries its own format, also the embeddings and the head."""
    config = replace(BASE, tied_embeddings=False)
    halves = random_weights(config, torch.bfloat16)
    rounded = widened(halves, config)
    halves.layers[0].gate_up = rounded.layers[0].gate_up
    halves.layers[1].o = rounded.layers[1].o
    halves.head = rounded.head
    ids, tree = random_ids(config, 40, seed=3), random_parents(40, seed=2)
    outputs = []
    for kind, weights in ((EagerDecoder, rounded), (CpuDecoder, halves)):
        model = Model(kind, config, weights, torch.float32)
        outputs.append(model.run(Segment(model.open(), ids, tree, 40)).logits)
    tolerance = 0.02 if CpuDecoder.instructions() == "AMX" else 1e-5
    assert (outputs[1] - outputs[0]).norm() / outputs[0].norm() < tolerance


def widened(weights: Weights, config: ModelConfig) -> Weights:
    """The same numbers in float32."""
    wide = copy.deepcopy(weights)
    wide.embed = wide.embed.float()
    wide.head = wide.embed if config.tied_embeddings else wide.head.float()
    wide.norm = wide.norm.float()
    for layer in wide.layers:
        for name in type(layer).__slots__:
            value = getattr(layer, name)
            setattr(layer, name, None if value is None else value.float())
    return wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "variant", ["plain", "group of 3", "window", "head 64", "head 96", "head 128", "odd sizes", "everything"]
)
def test_a_node_does_not_depend_on_its_batch(variant: str, dtype: torch.dtype) -> None:
    """Every node of packed trees is bit-identical to decoding its path alone, one token at a time."""
    config = replace(BASE, **VARIANTS[variant])  # type: ignore[arg-type]
    model = fused(config, dtype)
    prompts = [random_ids(config, length, seed=length) for length in (130, 1, 61)]
    trees = [random_parents(size, seed=size) for size in (21, 70, 4)]
    ids = [random_ids(config, len(tree), seed=5) for tree in trees]
    sequences = [model.open(prompt) for prompt in prompts]
    segments = [
        Segment(sequence, tokens, tree, len(tree)) for sequence, tokens, tree in zip(sequences, ids, trees, strict=True)
    ]
    parts = model.run(*segments).split(segments)
    pick = random.Random(0)
    for prompt, tree, tokens, part in zip(prompts, trees, ids, parts, strict=True):
        for node in pick.sample(range(len(tree)), 3):
            alone = model.open(prompt, chunk=1)
            for step in path_to(tree, node):
                output = model.run(Segment(alone, [tokens[step]], [-1], 1))
                model.cache.keep(alone, [0])
            model.cache.close(alone)
            assert torch.equal(output.logits[0], part.logits[node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decoding_from_kept_path_is_bit_identical(dtype: torch.dtype) -> None:
    """The cache rows that a tree leaves are the rows that plain decoding writes."""
    config = replace(BASE, num_heads=6)
    model = fused(config, dtype)
    prompt, tree = random_ids(config, 90, seed=1), random_parents(40, seed=2)
    ids = random_ids(config, 40, seed=3)
    kept = path_to(tree, 39)
    drafted, plain = model.open(prompt), model.open(prompt)
    model.run(Segment(drafted, ids, tree, 40))
    model.cache.keep(drafted, kept)
    for node in kept:
        model.run(Segment(plain, [ids[node]], [-1], 1))
        model.cache.keep(plain, [0])
    outputs = [model.run(Segment(sequence, [1, 2], [-1, 0], 2)).logits for sequence in (drafted, plain)]
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("head_dim", [24, 48, 96])
def test_rows_with_and_without_shared_keys(head_dim: int) -> None:
    """The last two rows of the tree are computed together; the first 64 positions of one lie in a piece, those of the
    other do not. Heads of three panels, in one width of vectors or another, can be read in place by two rows only."""
    config = replace(BASE, num_heads=6, head_dim=head_dim)
    model = fused(config, torch.bfloat16)
    prompt, ids, tree = random_ids(config, 50, seed=1), random_ids(config, 18, seed=2), [*chain_parents(17), 0]
    logits = model.run(Segment(model.open(prompt), ids, tree, 18)).logits
    assert torch.equal(logits[:17], model.run(Segment(model.open(prompt), ids[:17], chain_parents(17), 17)).logits)
    short = model.run(Segment(model.open(prompt), [ids[0], ids[17]], [-1, 0], 2)).logits
    assert torch.equal(logits[17], short[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 129])
def test_prompt_chunks_of_any_size_give_the_same_bits(chunk: int, dtype: torch.dtype) -> None:
    config = replace(BASE, num_heads=6, sliding_window=100)
    model = fused(config, dtype)
    prompt = random_ids(config, 300, seed=1)
    outputs = [
        model.run(Segment(model.open(prompt, chunk=size), [1, 2, 3], [-1, 0, 0], 3)).logits for size in (300, chunk)
    ]
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_number_of_threads_is_bit_identical(count: int, dtype: torch.dtype) -> None:
    config = replace(BASE, num_heads=6)
    weights = random_weights(config, dtype)
    outputs = []
    for number in (1, count):
        with threads(number):
            model = Model(CpuDecoder, config, weights, dtype)
            sequence = model.open(random_ids(config, 200, seed=1))
            outputs.append(model.run(Segment(sequence, random_ids(config, 33, seed=2), random_parents(33, seed=3), 33)))
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].greedy_ids, outputs[1].greedy_ids)


def test_ties_go_to_the_lower_id() -> None:
    config = replace(BASE, tied_embeddings=False)
    weights = random_weights(config)
    weights.head[70:90] = weights.head[5]
    weights.head[200] = weights.head[5]
    model = Model(CpuDecoder, config, weights, torch.float32)
    output = model.run(Segment(model.open(), list(range(60)), chain_parents(60), 60))
    top = output.logits.max(dim=-1, keepdim=True).values
    lowest = (output.logits == top).int().argmax(dim=-1)
    assert torch.equal(output.greedy_ids, lowest)
    weights.head[:] = weights.head[5]
    model = Model(CpuDecoder, config, weights, torch.float32)
    assert model.run(Segment(model.open(), [1, 2], [-1, 0], 2)).greedy_ids.tolist() == [0, 0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("variant", ["plain", "odd sizes", "odder sizes"])
def test_top_entries_come_with_the_logits(variant: str, count: int) -> None:
    config = replace(BASE, **VARIANTS[variant])
    with threads(count):
        model = fused(config)
        segments = [
            Segment(model.open(), random_ids(config, size, seed=size), random_parents(size, seed=3), size)
            for size in (20, 75)  # more rows than one item of a product has
        ]
        plain = model.run(*segments)
        model.decoder.num_best = min(10, config.vocab_size)
        found = model.run(*segments)
    assert torch.equal(found.logits, plain.logits)
    assert torch.equal(found.greedy_ids, plain.greedy_ids)
    assert plain.top is None
    assert found.top is not None
    expected = top_rows(plain.logits, model.decoder.num_best)
    for own, part in zip((*found.top, found.top.probs()), (*expected, expected.probs()), strict=True):
        np.testing.assert_array_equal(own.view(np.int32), part.view(np.int32))


def test_only_requested_rows_have_logits() -> None:
    model = fused()
    first, second = model.open(), model.open()
    whole = model.run(Segment(first, [1, 2, 3], [-1, 0, 0], 3), Segment(second, [4, 5], [-1, 0], 2))
    some = model.run(Segment(first, [1, 2, 3], [-1, 0, 0], 1), Segment(second, [4, 5], [-1, 0], 0))
    assert torch.equal(some.logits, whole.logits[2:3])
    none = model.run(Segment(first, [1, 2, 3], [-1, 0, 0], 0), taps=(BASE.num_layers,))
    assert none.logits.shape == (0, BASE.vocab_size)
    assert none.taps is not None
    assert none.taps.shape == (3, BASE.hidden_size)


def test_hidden_states_are_not_rounded_and_outlast_the_next_pass() -> None:
    """Rounding or copying the few rows of a tree would take a part of every cycle."""
    model = fused(dtype=torch.bfloat16)
    sequence = model.open([7] * 10)
    taps = model.run(Segment(sequence, [1, 2], [-1, 0], 2), taps=(0, BASE.num_layers)).taps
    assert taps is not None
    assert taps.dtype == torch.float32
    before = taps.clone()
    model.run(Segment(sequence, [3, 4], [-1, 0], 2), taps=(0, BASE.num_layers))
    assert CpuDecoder.keeps_taps
    assert torch.equal(taps, before)


def test_several_roots_hang_off_the_prefix() -> None:
    model = fused()
    sequence = model.open([7] * 10)
    forest = model.run(Segment(sequence, [1, 2, 3], [-1, -1, 1], 3))
    alone = model.run(Segment(sequence, [2, 3], [-1, 0], 2))
    assert torch.equal(forest.logits[1:], alone.logits)


@pytest.mark.parametrize("token_id", [BASE.vocab_size, 1 << 31])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    model = fused()
    with pytest.raises(OptionError, match="vocabulary"):
        model.run(Segment(model.open(), [token_id], [-1], 1))


def test_float16_is_not_supported() -> None:
    assert CpuDecoder.why_declined(BASE, torch.bfloat16, CPU) == ""
    assert "not in float16" in CpuDecoder.why_declined(BASE, torch.float16, CPU)


def _forward_in_child(model: Model, sequence: int, results: Any) -> None:
    results.put(model.run(Segment(sequence, [1] * 20, chain_parents(20), 1)).logits.tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_starts_its_own_threads() -> None:
    with threads(2):
        model = fused()
        sequence = model.open()
        expected = model.run(Segment(sequence, [1] * 20, chain_parents(20), 1)).logits.tolist()
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_forward_in_child, args=(model, sequence, results))
        child.start()
        child.join(timeout=20)
        assert child.exitcode == 0
        assert results.get() == expected
