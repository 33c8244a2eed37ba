"""Weights in the blocks of GGUF files: true to their values, the same bits in any batch."""

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwood.errors import ModelError
from draftwood.models.config import ModelConfig, Rope
from draftwood.models.gguf.stored import StoredTensor
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.base import ForwardOutput, Segment, chain_parents
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.cpu.records import FORMATS
from draftwood.targets.native.decoder import Decoder, pack
from draftwood.targets.native.eager import EagerDecoder
from draftwood.targets.native.stored import assemble_stored
from draftwood.targets.native.weights import assemble
from tests.conftest import threads
from tests.tools.blocks import KIND, random_stored

pytestmark = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")

CPU = torch.device("cpu")
BLOCKS = [name for name in FORMATS if name not in ("F32", "BF16", "F16")]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=259,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    context_length=1024,
    rope=Rope(),
    tied_embeddings=False,
    qkv_bias=True,
    o_bias=False,
    qk_norm=True,
)


class Model:
    """A decoder with its cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder, self.cache = decoder, cache

    def open(self, prompt: list[int], chunk: int = 10_000) -> int:
        sequence = self.cache.open(400)
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            self.run(Segment(sequence, part, chain_parents(len(part)), 0))
            self.cache.keep(sequence, range(len(part)))
        return sequence

    def run(self, *segments: Segment) -> ForwardOutput:
        output = self.decoder.forward(pack(segments, self.cache), ())
        return output._replace(logits=output.logits.clone())


def new_cache(config: ModelConfig) -> KVCache:
    return KVCache(config.num_layers, config.num_kv_heads, config.head_dim, 4096, torch.float32, CPU)


def new_tensors(config: ModelConfig, formats: Mapping[str, str], default: str) -> dict[str, StoredTensor]:
    """Random tensors; the format of a matrix is that of the first key of ``formats`` that its name contains."""
    tensors = {}
    for seed, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 2:
            kind = next((kind for part, kind in formats.items() if part in name), default)
            tensors[name] = random_stored(kind, *shape, seed=seed)
        else:
            values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.1
            values += np.float32("norm" in name)
            tensors[name] = StoredTensor("F32", shape, lambda v=values: v, lambda v=values: v)
    return tensors


def fused(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> Model:
    cache = new_cache(config)
    return Model(CpuDecoder(config, assemble_stored(config, dict(tensors), torch.float32), cache), cache)


def eager(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> Model:
    weights = assemble(config, lambda name: torch.from_numpy(tensors[name].floats()))
    cache = new_cache(config)
    return Model(EagerDecoder(config, weights, cache, CPU), cache)


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=count)


def random_parents(count: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [-1] + [pick.choice([i - 1, pick.randrange(i)]) for i in range(1, count)]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", BLOCKS)
def test_agrees_with_float32(name: str, tied: bool) -> None:
    """Up to the rounding of activations to 8 bits."""
    config = replace(CONFIG, tied_embeddings=tied)
    tensors = new_tensors(config, {}, name)
    ids, tree = random_ids(20, seed=1), random_parents(20, seed=2)
    ours, exact = (
        model.run(Segment(model.open(random_ids(33, seed=3)), ids, tree, 20)).logits
        for model in (fused(config, tensors), eager(config, tensors))
    )
    assert (ours - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize(
    "formats",
    [
        {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q8_0"},
        {"k_proj": "Q5_0", "up_proj": "Q8_0"},
        {"q_proj": "BF16", "gate_proj": "F32", "embed": "F16", "o_proj": "F16"},
        {"embed": "BF16"},
        {"embed": "F32"},
        {"proj": "F16"},
    ],
)
def test_the_tensors_of_a_file_may_differ_in_format(formats: dict[str, str]) -> None:
    tensors = new_tensors(CONFIG, formats, "Q4_K")
    ids = random_ids(7, seed=1)
    ours, exact = (
        model.run(Segment(model.open([5, 6]), ids, chain_parents(7), 7)).logits
        for model in (fused(CONFIG, tensors), eager(CONFIG, tensors))
    )
    assert (ours - exact).norm() / exact.norm() < 0.04


def test_parts_that_do_not_fill_a_step_are_expanded() -> None:
    config = replace(CONFIG, head_dim=8, num_kv_heads=1)  # parts of 8 rows
    tensors = new_tensors(config, {"k_proj": "Q5_0", "o_proj": "F32"}, "Q4_0")
    ids = random_ids(7, seed=1)
    ours, exact = (
        model.run(Segment(model.open([5, 6]), ids, chain_parents(7), 7)).logits
        for model in (fused(config, tensors), eager(config, tensors))
    )
    assert (ours - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("name", BLOCKS)
def test_a_node_does_not_depend_on_its_batch(name: str) -> None:
    """Nodes of packed trees get the bits they get when their paths are decoded one token at a time, alone."""
    model = fused(CONFIG, new_tensors(CONFIG, {}, name))
    prompts = [random_ids(length, seed=length) for length in (70, 1)]
    trees = [random_parents(size, seed=size) for size in (21, 70)]
    ids = [random_ids(len(tree), seed=5) for tree in trees]
    sequences = [model.open(prompt) for prompt in prompts]
    segments = [Segment(s, tokens, tree, len(tree)) for s, tokens, tree in zip(sequences, ids, trees, strict=True)]
    parts = model.run(*segments).split(segments)
    for prompt, tree, tokens, part in zip(prompts, trees, ids, parts, strict=True):
        for node in (len(tree) - 1, len(tree) // 2):
            alone = model.open(prompt, chunk=3)
            for step in path_to(tree, node):
                output = model.run(Segment(alone, [tokens[step]], [-1], 1))
                model.cache.keep(alone, [0])
            model.cache.close(alone)
            assert torch.equal(output.logits[0], part.logits[node])


@pytest.mark.parametrize("count", range(2, 19))
def test_any_number_of_rows_gives_the_same_bits(count: int) -> None:
    model = fused(CONFIG, new_tensors(CONFIG, {"down": "Q6_K", "o_proj": "Q8_0"}, "Q4_1"))
    ids = random_ids(count, seed=1)
    whole = model.run(Segment(model.open([]), ids, [-1] * count, count)).logits
    for row, token in enumerate(ids):
        alone = model.open([])
        assert torch.equal(model.run(Segment(alone, [token], [-1], 1)).logits[0], whole[row])
        model.cache.close(alone)


def test_number_of_threads_is_bit_identical() -> None:
    tensors = new_tensors(CONFIG, {"v_proj": "Q6_K", "up_proj": "Q5_0"}, "Q4_K")
    outputs = []
    for number in (1, 3):
        with threads(number):
            model = fused(CONFIG, tensors)
            sequence = model.open(random_ids(50, seed=1))
            outputs.append(model.run(Segment(sequence, random_ids(33, seed=2), random_parents(33, seed=3), 33)))
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].greedy_ids, outputs[1].greedy_ids)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K", "MXFP4"])
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    tensors = new_tensors(CONFIG, {}, name)
    place = {"Q6_K": 208, "MXFP4": 0, "Q5_1": 2}.get(name, 0)
    rows = tensors["model.layers.1.mlp.down_proj.weight"].read()
    rows[3, place : place + 2] = [0xFF, 0x7F]  # NaN, in 16 bits and as an exponent
    with pytest.raises(ModelError, match=rf"256 x 256 weights in {name} has scales that are not finite"):
        fused(CONFIG, tensors)


def test_values_that_are_not_finite_stay_visible() -> None:
    """Rounding to integers must not turn them into numbers."""
    tensors = new_tensors(CONFIG, {}, "Q8_0")
    tensors["model.norm.weight"].floats()[5] = float("nan")
    model = fused(CONFIG, tensors)
    assert model.run(Segment(model.open([]), [1, 2], [-1, 0], 2)).logits.isnan().all()


def test_formats_without_a_kernel_are_named() -> None:
    assert CpuDecoder.why_not_stored(["Q4_K", "F32"]) == ""
    assert "Q2_K and Q3_K" in CpuDecoder.why_not_stored(["Q2_K", "Q4_K", "Q3_K"])


def test_the_kernel_knows_the_formats_of_the_files() -> None:
    assert set(FORMATS) == set(KIND) - {"Q2_K", "Q3_K"}
