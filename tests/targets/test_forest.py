"""Several nodes directly after the text: a forest is the same as a tree below the last token of the text."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.targets.base import Segment, Target
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from tests.conftest import path_to, prefill

VARIANTS = {"plain": {}, "window": {"sliding_window": 6}}
fused_cpu = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")


@lru_cache
def target_of(variant: str, backend: str, dtype: torch.dtype = torch.float32) -> NativeTarget:
    config = replace(TINY_CONFIG, **VARIANTS[variant])  # type: ignore[arg-type]
    return tiny_target(config, backend=backend, dtype=dtype)


def random_forest(rng: random.Random, size: int) -> list[int]:
    """Parents in topological order, with some -1."""
    reach = rng.choice([1, 2, 4, size])
    lone = rng.choice([0.1, 0.5, 1.0])
    return [
        -1 if node == 0 or rng.random() < lone else rng.randrange(max(0, node - reach), node) for node in range(size)
    ]


def check(target: Target, seed: int, *, most_text: int, most_nodes: int, exact: bool) -> None:
    rng = random.Random(seed)

    def ids(size: int) -> list[int]:
        return rng.choices(range(3, target.info.vocab_size), k=size)

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.isfinite().all()
        if exact:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    text, parents = ids(rng.randint(1, most_text)), random_forest(rng, rng.randint(1, most_nodes))
    tokens = ids(len(parents))
    capacity = len(text) + len(parents) + 4
    forest, tree = prefill(target, text, capacity), prefill(target, text[:-1], capacity)
    cut = rng.randint(0, len(parents))  # the forest grows in two passes, or in one
    parts = []
    for part, after in ((slice(0, cut), 0), (slice(cut, None), cut)):
        if parents[part]:
            segment = Segment(forest, tokens[part], parents[part], len(parents[part]), after)
            parts.append(target.forward([segment]).logits.clone())
    below = Segment(tree, [text[-1], *tokens], [-1, *[parent + 1 for parent in parents]], len(parents))
    compare(torch.cat(parts), target.forward([below]).logits)

    path = path_to(parents, rng.randrange(len(parents)))
    target.keep(forest, path)
    target.keep(tree, [0, *[node + 1 for node in path]])
    assert target.length(forest) == target.length(tree) == len(text) + len(path)
    after_both = [
        target.forward([Segment(sequence, [5, 6], [-1, -1], 2)]).logits.clone() for sequence in (forest, tree)
    ]
    compare(*after_both)
    target.close(forest)
    target.close(tree)


@fused_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30))
def test_the_same_bits_on_a_cpu(variant: str, dtype: torch.dtype, seed: int) -> None:
    check(target_of(variant, "fused-cpu", dtype), seed, most_text=100, most_nodes=30, exact=True)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 30))
def test_the_eager_decoder(variant: str, seed: int) -> None:
    check(target_of(variant, "eager"), seed, most_text=20, most_nodes=12, exact=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window", "gemma3-window"])
@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_the_transformers_target(name: str, seed: int) -> None:
    pytest.importorskip("transformers")
    from tests.tools import hf as hf_tools

    check(hf_tools.target_of(name), seed, most_text=20, most_nodes=10, exact=False)


def test_forests_have_several_first_nodes() -> None:
    forests = [random_forest(random.Random(seed), 8) for seed in range(50)]
    assert {1, 3, 8} <= {forest.count(-1) for forest in forests}
    assert all(parent < node for forest in forests for node, parent in enumerate(forest))
