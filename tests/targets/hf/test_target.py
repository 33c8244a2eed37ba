"""The transformers target against the bare models: tiny, random, built from configurations."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", reason="the transformers target needs the extra 'hf'")

from draftwood.errors import CapabilityError, OptionError  # noqa: E402
from draftwood.sizing.costs import LARGEST_TREE  # noqa: E402
from draftwood.targets.base import Segment, chain_parents  # noqa: E402
from draftwood.targets.hf import HFTarget  # noqa: E402
from tests.conftest import path_to  # noqa: E402
from tests.tools.hf import (  # noqa: E402
    CONFIGS,
    CONTEXT,
    GROUPED,
    LAYERS,
    VOCAB,
    build,
    close_to,
    every_model,
    plain,
    prefill,
    target_of,
    text_of,
    tree_of,
)


@every_model
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), prefix_len=st.integers(0, 24), size=st.integers(1, 14))
def test_every_node_of_a_tree_gets_the_logits_of_its_path(name: str, seed: int, prefix_len: int, size: int) -> None:
    target, rng = target_of(name), random.Random(seed)
    prefix = text_of(rng, prefix_len)
    tokens, parents = tree_of(rng, size)
    sequence = prefill(target, prefix)[0] if prefix else target.open(CONTEXT)
    output = target.forward([Segment(sequence, tokens, parents, size)])
    target.close(sequence)
    for node in range(size):
        path = [tokens[i] for i in path_to(parents, node)]
        close_to(output.logits[node], plain(target, [*prefix, *path])[-1])
    assert output.logits.dtype == torch.float32
    assert output.greedy_ids.tolist() == output.logits.argmax(-1).tolist()


@every_model
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    target, rng = target_of(name), random.Random(1)
    # Different capacities and an early close scatter the extents over the pool, out of order.
    hole = target.open(40)
    opened = [prefill(target, text_of(rng, 5 + 9 * i), capacity=40 + i)[0] for i in range(2)]
    target.close(hole)
    opened.append(prefill(target, text_of(rng, 11), capacity=40)[0])
    segments = []
    for i, sequence in enumerate(opened):
        tokens, parents = tree_of(rng, 4 + 3 * i)
        segments.append(Segment(sequence, tokens, parents, (2 + i, len(tokens), 0)[i]))
    alone = [target.forward([segment]) for segment in segments]
    together = target.forward(segments).split(segments)
    for one, packed in zip(alone, together, strict=True):
        close_to(packed.logits, one.logits)
    assert [len(part.logits) for part in together] == [2, 7, 0]
    for sequence in opened:
        target.close(sequence)


@every_model
def test_the_kept_cache_equals_a_fresh_prefill(name: str) -> None:
    target, rng = target_of(name), random.Random(2)
    text = text_of(rng, 6)
    sequence, _ = prefill(target, text)
    for _ in range(5):
        tokens, parents = tree_of(rng, 12)
        target.forward([Segment(sequence, tokens, parents, 12)])
        path = path_to(parents, rng.randrange(12))
        target.keep(sequence, path)
        text.extend(tokens[node] for node in path)
        assert target.length(sequence) == len(text)
    later = text_of(rng, 3)
    output = target.forward([Segment(sequence, later, chain_parents(3), 3)])
    close_to(output.logits, plain(target, [*text, *later])[-3:])
    target.close(sequence)


@every_model
def test_chunked_prefill_equals_one_pass(name: str) -> None:
    target, rng = target_of(name), random.Random(3)
    text = text_of(rng, 29)
    for chunk in (1, 5, 29):
        sequence, logits = prefill(target, text, chunk)
        close_to(logits, plain(target, text))
        target.close(sequence)


@every_model
def test_truncate_and_fork(name: str) -> None:
    target, rng = target_of(name), random.Random(4)
    text, other, third = text_of(rng, 20), text_of(rng, 4), text_of(rng, 4)
    sequence, _ = prefill(target, text)
    copy = target.fork(sequence, 60)
    target.truncate(sequence, 13)
    assert (target.length(sequence), target.length(copy)) == (13, 20)
    segments = [Segment(sequence, other, chain_parents(4), 4), Segment(copy, third, chain_parents(4), 4)]
    cut, forked = target.forward(segments).split(segments)
    close_to(cut.logits, plain(target, [*text[:13], *other])[-4:])
    close_to(forked.logits, plain(target, [*text, *third])[-4:])
    target.close(sequence)
    target.close(copy)


@every_model
def test_taps_are_the_inputs_of_layers_and_the_last_output_before_the_norm(name: str) -> None:
    target, rng = target_of(name), random.Random(6)
    text = text_of(rng, 12)
    with torch.no_grad():
        states = target._model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    decoder = target._model.get_decoder()
    norm = next(
        getattr(decoder, field)
        for field in ("norm", "ln_f", "final_layer_norm", "final_layernorm")
        if hasattr(decoder, field)
    )
    sequence = target.open(CONTEXT)
    target.set_taps([2, 0, LAYERS])
    try:
        taps = target.forward([Segment(sequence, text, chain_parents(12), 0)]).taps
    finally:
        target.set_taps([])
        target.close(sequence)
    assert taps is not None
    third, first, last = taps.split(32, dim=-1)
    close_to(third, states[2][0])
    close_to(first, states[0][0])
    with torch.no_grad():
        close_to(norm(last), states[-1][0])


def test_taps_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OptionError, match="0 to 3"):
        target_of("llama").set_taps([4])


@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_bfloat16(name: str) -> None:
    target, rng = HFTarget(build(CONFIGS[name]()).to(torch.bfloat16)), random.Random(7)
    exact = target_of(name)
    text = text_of(rng, 20)
    sequence, logits = prefill(target, text, chunk=6)
    assert target.info.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    error = (logits - plain(exact, text)).norm() / plain(exact, text).norm()
    assert error < 0.1
    target.close(sequence)


@every_model
def test_info(name: str) -> None:
    target = target_of(name)
    info = target.info
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (VOCAB, 32, LAYERS)
    assert (info.context_length, info.eos_token_ids) == (CONTEXT, (2,))
    assert info.backend == "transformers"
    assert info.can_tap
    heads = 4 if name in ("gpt2", "gpt_neox", "phi") else 2
    assert info.cache_bytes_per_token == LAYERS * heads * 8 * 2 * 4
    assert info.num_parameters == sum(p.numel() for p in target._model.parameters())
    assert target.num_slots == 16 * (CONTEXT + LARGEST_TREE)  # each with space for a tree


def test_a_full_cache_raises() -> None:
    target = HFTarget(build(CONFIGS["llama"]()), cache_tokens=40)
    first = target.open(30)
    assert not target.can_open(11)
    with pytest.raises(CapabilityError, match="no room"):
        target.open(11)
    with pytest.raises(CapabilityError, match="outgrows"):
        target.forward([Segment(first, [3] * 31, chain_parents(31), 0)])
    target.close(first)
    assert target.can_open(40)


def test_positions_beyond_the_context_are_refused() -> None:
    target = target_of("gpt2")
    sequence = target.open(CONTEXT + 8)
    with pytest.raises(CapabilityError, match="beyond the context"):
        target.forward([Segment(sequence, [3] * (CONTEXT + 1), chain_parents(CONTEXT + 1), 0)])
    target.close(sequence)


def test_the_cache_grows_with_use() -> None:
    target = HFTarget(build(transformers.LlamaConfig(**GROUPED | {"max_position_embeddings": 2000})), max_batch=2)
    assert target._cache.rows[0][0].shape[2] == 256
    text = text_of(random.Random(8), 300)
    sequence, logits = prefill(target, text, chunk=100, capacity=2000)
    assert target._cache.rows[0][0].shape[2] == 512
    close_to(logits, plain(target, text))
    target.close(sequence)
