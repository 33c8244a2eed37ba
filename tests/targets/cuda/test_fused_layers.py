"""The layers that a target on a GPU exposes, against the eager ones: on a GPU if there is one, in Triton's interpreter
everywhere.

The reference is the eager layers in float32 with the same rounded weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.models.config import ModelConfig, Rope
from draftwood.targets.base import Attend
from draftwood.targets.native.weights import Weights, assemble
from tests.tools.cuda import BASE, SMALL, assert_as_accurate, error, named_tensors, new_target
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, resources, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda import layers as fused_layers
from draftwood.targets.native.cuda.layers import FusedLayers
from draftwood.targets.native.eager import EagerLayers

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EVERYTHING: dict[str, Any] = {
    "num_heads": 3 * BASE.num_kv_heads,
    "head_dim": 96,
    "qk_norm": True,
    "qkv_bias": True,
    "o_bias": True,
    "tied_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "head 16": {"head_dim": 16},
    "head 64": {"head_dim": 64},
    "head 96": {"head_dim": 96, "qk_norm": True},
    "head 256": {"head_dim": 256, "qk_norm": True},
    "group of 1": {"num_heads": BASE.num_kv_heads},
    "group of 3": {"num_heads": 3 * BASE.num_kv_heads},
    "two keys": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "llama3 rope": {"rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_context=128)},
    "odd sizes": {"hidden_size": 80, "intermediate_size": 208, "vocab_size": 131},
    "everything": EVERYTHING,
}
CASES = [(variant, dtype) for variant in VARIANTS for dtype in HALVES]
if INTERPRETED:
    CASES = [*((variant, "bfloat16") for variant in VARIANTS), ("everything", "float16")]
SHAPES = [(7,), (2, 5)] if INTERPRETED else [(1,), (700,), (3, 333), (2, 2, 65)]
LARGE_PASS_BYTES = 60 << 30


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In float32: only its last rounding adds to an error."""
    group = query.shape[-2] // key.shape[-2]
    keys, values = (each.float().repeat_interleave(group, dim=-2) for each in (key, value))
    scores = torch.einsum("...qhd,...khd->...hqk", query.float(), keys) * query.shape[-1] ** -0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return torch.einsum("...hqk,...khd->...qhd", weights, values).to(query.dtype)


class Kept:
    """Causal attention that keeps its inputs and copies of them."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, ...]] = []
        self.copies: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, layer: int, *heads: torch.Tensor) -> torch.Tensor:
        assert layer == len(self.given)
        self.given.append(heads)
        self.copies.append(tuple(each.clone() for each in heads))
        return causal(layer, *heads)


def weights_of(config: ModelConfig, dtype: torch.dtype, *, wide: bool = False, quantize: str | None = None) -> Weights:
    named = named_tensors(config)
    used = torch.float32 if wide else dtype
    return assemble(config, lambda name: named[name].to(dtype).to(device=DEVICE, dtype=used), None, quantize)


def tokens_of(config: ModelConfig, shape: tuple[int, ...], first: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions."""
    generator = torch.Generator().manual_seed(sum(shape))
    token_ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(DEVICE)
    return token_ids, torch.arange(first, first + shape[-1], device=DEVICE).expand(shape)


def states_of(layers: EagerLayers, shape: tuple[int, ...], attend: Attend = causal) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(layers.states(*tokens_of(layers.config, shape), attend))


def assert_all_as_accurate(config: ModelConfig, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    half, wide = weights_of(config, dtype), weights_of(config, dtype, wide=True)
    kinds = FusedLayers(config, half), EagerLayers(config, half), EagerLayers(config, wide)
    keeps = Kept(), Kept(), Kept()
    found = [states_of(layers, shape, kept) for layers, kept in zip(kinds, keeps, strict=True)]
    for states in zip(*found, strict=True):
        assert all(each.shape == (*shape, config.hidden_size) for each in states)
        assert_as_accurate(*(each.flatten(0, -2) for each in states))
    for layer in zip(*(kept.given for kept in keeps), strict=True):
        for heads in zip(*layer, strict=True):  # queries, keys, values
            assert all(each.shape == heads[-1].shape for each in heads)
            assert_as_accurate(*(each.flatten(0, -3).flatten(1) for each in heads))
    logits = [layers.logits(states[-1].flatten(0, -2)) for layers, states in zip(kinds, found, strict=True)]
    assert logits[0].dtype == torch.float32
    assert_as_accurate(*logits)


@runs_kernels
@pytest.mark.parametrize(("variant", "dtype"), CASES)
def test_as_accurate_as_the_eager_layers(variant: str, dtype: str) -> None:
    for shape in SHAPES[-1:] if INTERPRETED else SHAPES:
        assert_all_as_accurate(replace(BASE, **VARIANTS[variant]), HALVES[dtype], shape)


@runs_kernels
@settings(max_examples=4 if INTERPRETED else 30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
def test_rows_of_any_shape(sizes: list[int], qk_norm: bool) -> None:
    """Leading dimensions do not matter."""
    config = replace(SMALL, num_layers=1, num_heads=3, qk_norm=qk_norm)
    assert_all_as_accurate(config, torch.bfloat16, tuple(sizes))


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_states_before_and_after_layers_stay_valid(shape: tuple[int, ...]) -> None:
    """Queries, keys and values stay valid too: callers may still read them."""
    config = replace(BASE, num_layers=3, **EVERYTHING)
    layers = FusedLayers(config, weights_of(config, torch.bfloat16))
    kept = Kept()
    states, copies = [], []
    for hidden in layers.states(*tokens_of(config, shape), kept):
        states.append(hidden)
        copies.append(hidden.clone())
    assert len(states) == 4
    assert len(kept.given) == 3
    for ours, theirs in zip([*states, *sum(kept.given, ())], [*copies, *sum(kept.copies, ())], strict=True):
        assert torch.equal(ours, theirs)
    assert len({state.data_ptr() for state in states}) == 4


@runs_kernels
def test_kept_keys_do_not_keep_other_memory() -> None:
    kept = Kept()
    states_of(FusedLayers(BASE, weights_of(BASE, torch.bfloat16)), (6,), kept)
    for _, key, _ in kept.given:
        assert key.is_contiguous()
        assert key.untyped_storage().nbytes() == key.numel() * key.itemsize


@runs_kernels
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("kind", [EagerLayers, FusedLayers])
def test_no_rows(kind: type[EagerLayers], shape: tuple[int, ...]) -> None:
    layers = kind(SMALL, weights_of(SMALL, torch.bfloat16))
    states = states_of(layers, shape, lambda _, query, key, value: query)
    assert [state.shape for state in states] == 3 * [(*shape, SMALL.hidden_size)]
    assert layers.logits(states[-1].flatten(0, -2)).shape == (0, SMALL.vocab_size)


@runs_kernels
def test_positions_are_those_of_the_rows() -> None:
    """Unordered, large, and with duplicates."""
    config = replace(BASE, num_layers=1)
    half, wide = weights_of(config, torch.bfloat16), weights_of(config, torch.bfloat16, wide=True)
    token_ids, _ = tokens_of(config, (2, 4))
    positions = torch.tensor([[5, 0, 4097, 5], [9, 8, 8, 100_000]], device=DEVICE)
    found = [
        list(layers.states(token_ids, positions, causal))[-1].flatten(0, 1)
        for layers in (FusedLayers(config, half), EagerLayers(config, half), EagerLayers(config, wide))
    ]
    assert_as_accurate(*found)
    other = list(FusedLayers(config, half).states(token_ids, positions.flip(1), causal))[-1].flatten(0, 1)
    assert error(other, found[2]) > 0.05


@runs_kernels
def test_states_that_are_not_contiguous() -> None:
    """Part of a wider matrix, as in training."""
    layers = FusedLayers(SMALL, weights_of(SMALL, torch.float16))
    both = torch.randn(5, 2 * SMALL.hidden_size, device=DEVICE).half()
    part = both[:, SMALL.hidden_size :]
    assert torch.equal(layers.logits(part), layers.logits(part.contiguous()))


@runs_kernels
@pytest.mark.parametrize("quantize", ["int8"])
def test_8_bit_matrices(quantize: str) -> None:
    config = replace(BASE, qkv_bias=True)
    weights = weights_of(config, torch.bfloat16, quantize=quantize)
    fused, eager = (states_of(kind(config, weights), SHAPES[-1])[-1] for kind in (FusedLayers, EagerLayers))
    assert error(fused, eager) < 0.02


@runs_kernels
def test_large_states_in_float16() -> None:
    """Their squares and the sums of squares exceed the range of float16."""
    config = replace(BASE, num_layers=1)
    weights = weights_of(config, torch.float16)
    weights.embed = (weights.embed * 9000.0).clamp(-30_000, 30_000)
    wide = weights_of(config, torch.float16, wide=True)
    wide.embed = weights.embed.float()
    kinds = FusedLayers(config, weights), EagerLayers(config, weights), EagerLayers(config, wide)
    found = [states_of(layers, (4,))[-1] for layers in kinds]
    assert found[0].abs().max() > 15_000
    assert_as_accurate(*found)


@on_gpu
def test_more_elements_than_int32_can_index() -> None:
    """In hidden states, queries to values, and gates: the last rows of a large pass equal those of a small one."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < LARGE_PASS_BYTES:
        pytest.skip("needs more memory")
    config = replace(SMALL, num_layers=1, hidden_size=1024, intermediate_size=512, num_heads=14, head_dim=64)
    layers = FusedLayers(config, weights_of(config, torch.bfloat16))
    num_rows = (1 << 31) // 1024 + 100
    token_ids = torch.arange(num_rows, device=DEVICE) % config.vocab_size
    positions = torch.arange(num_rows, device=DEVICE) % 4096
    many, few = (
        list(layers.states(token_ids[part], positions[part], lambda _, query, key, value: query + key + value))[-1]
        for part in (slice(None), slice(-100, None))
    )
    assert error(many[-100:], few) < 0.01


@runs_kernels
def test_target_with_kernels_exposes_fused_layers() -> None:
    assert type(new_target().layers()) is FusedLayers
    assert type(new_target(backend="eager").layers()) is EagerLayers
    assert new_target(replace(BASE, sliding_window=8)).layers() is None


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_and_stay_in_registers(capability: int) -> None:
    for width in (576, 4096, 16384):
        block = 1 << (width - 1).bit_length()
        types = dict.fromkeys(("hidden", "change", "weight", "sums", "out"), "*bf16")
        used = resources(
            fused_layers._add_and_norm, {**types, "eps": "fp32"}, {"H": width, "BLOCK": block},
            capability=capability, num_warps=fused_layers.norm_warps(block), num_stages=3,
        )  # fmt: skip
        assert used.stack == 0
        assert used.registers <= 128
    for dim in (16, 96, 128, 256):
        block = 1 << (dim // 2 - 1).bit_length()
        types = dict.fromkeys(("qkv", "keys", "cos", "sin", "q_norm", "k_norm"), "*bf16")
        sizes = {"HEADS": 32, "KV": 8, "D": dim, "HALF": dim // 2, "BLOCK": block}
        used = resources(
            fused_layers._rotate, {**types, "num_heads": "i32", "eps": "fp32"},
            {**sizes, "TILE": fused_layers.PAIRS_PER_PROGRAM // block, "QK_NORM": True},
            capability=capability, num_warps=fused_layers.ROTATE_WARPS, num_stages=3,
        )  # fmt: skip
        assert used.stack == 0
        assert used.registers <= 128
