"""The GPU decoder gives a node the same bits in every pass: kernels one by one, then whole models.

Sums in the interpreter are numpy's, which depend on the sizes of matrices, so most of this needs a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.cuda.attention.ranges import OrderedConfig
from draftwood.targets.native.decoder import PackedSegment
from draftwood.targets.native.target import NativeTarget
from tests.conftest import path_to, prefill, random_parents
from tests.tools.attention import Case
from tests.tools.cuda import (
    BASE,
    LARGE,
    Question,
    assert_as_accurate,
    assert_choices_follow,
    copied,
    ids_of,
    named_tensors,
    new_target,
)
from tests.tools.ordered import OrderedLaunch
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.common import exact_sum
from draftwood.targets.native.cuda.kernels.top import new_scratch
from draftwood.targets.native.cuda.products.launch import Gpu, Hidden, Kind, Product
from draftwood.targets.native.quantize import quantize_matrix
from draftwood.targets.native.weights import assemble

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GPU = Gpu(num_processors=132, shared_bytes=227 * 1024)
NUM_ROWS = (600, 1, 2, 7, 16, 17, 33, 64, 65, 96, 128, 129, 256, 257, 512)  # the first has all rows
TILINGS = [(16, 4, 4), (32, 1, 4), (64, 8, 4), (64, 1, 8), (16, 32, 4)]  # query rows of a tile, programs, warps


def test_the_interpreter() -> None:
    if not INTERPRETED:
        run_interpreted(__file__)


def noise(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device=DEVICE, dtype=dtype)


class Rows:
    """Rows and a weight matrix, multiplied some rows at a time."""

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype, kind: Kind, quantize: str | None = None) -> None:
        most = NUM_ROWS[0]
        self.kind, self.dtype = kind, dtype
        self.x, self.before = noise(most, num_in, dtype=dtype, seed=1), noise(most, num_out, dtype=dtype, seed=2)
        weight = noise(num_out * (1 + (kind is Kind.GATED)), num_in, dtype=dtype, seed=3, scale=num_in**-0.5)
        self.weight = weight if quantize is None else quantize_matrix(weight, quantize)
        self.bytes = 2 if quantize is None else 1
        self.next_norm = noise(num_out, dtype=dtype, seed=4)
        self.squares = noise(9, most, dtype=torch.float32, seed=5).square()

    def run(self, first: int, num_rows: int, residual: bool) -> tuple[torch.Tensor, ...]:
        rows = slice(first, first + num_rows)
        x = self.x[rows].contiguous()
        num_out = self.before.shape[1]
        pdl = torch.cuda.get_device_capability() >= (9, 0)
        product = Product(
            x.shape[1],
            num_out,
            num_rows,
            GPU,
            self.kind,
            dtype=self.dtype,
            weight_bytes=self.bytes,
            eps=1e-5,
            pdl=pdl,
            exact=True,
        )
        floats, counters = product.scratch
        scratch: dict[str, Any] = {
            "parts": torch.full((floats,), float("nan"), device=DEVICE),
            "counters": torch.zeros(counters, dtype=torch.int32, device=DEVICE),
        }
        if residual:
            out = self.before[rows].clone()
            hidden = Hidden(out, torch.zeros_like(out), torch.zeros(product.num_groups, num_rows + 8, device=DEVICE))
            product.launch(x, self.weight, out, hidden=hidden, next_norm=self.next_norm, **scratch)
            return out, hidden.scaled, hidden.squares[:, :num_rows].t()
        out = torch.zeros(num_rows, num_out, device=DEVICE, dtype=torch.float32 if self.kind is Kind.HEAD else x.dtype)
        peaks = new_scratch(num_rows, num_out, DEVICE).fill_(0.0) if self.kind is Kind.HEAD else None
        squares = self.squares[:, rows].contiguous()
        product.launch(x, self.weight, out, squares=squares, num_squares=9, peaks=peaks, **scratch)
        return (out,) if peaks is None else (out, peaks.view(num_rows, -1))


@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("num_in", "num_out", "kind", "residual"),
    [
        (576, 960, Kind.PLAIN, False),
        (576, 576, Kind.PLAIN, True),
        (1536, 576, Kind.PLAIN, True),
        (1536, 1536, Kind.PLAIN, True),
        (8960, 1536, Kind.PLAIN, True),
        (4096, 4096, Kind.PLAIN, True),
        (576, 1536, Kind.GATED, False),
        (1536, 8960, Kind.GATED, False),
        (576, 5003, Kind.HEAD, False),
    ],
)
def test_products(num_in: int, num_out: int, kind: Kind, residual: bool, dtype: str) -> None:
    """Results, sums of squares for the next norm, and peaks of logits."""
    assert_same_rows(Rows(num_in, num_out, HALVES[dtype], kind), residual)


@on_gpu
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("num_in", "num_out", "kind", "residual"),
    [(576, 576, Kind.PLAIN, True), (1536, 1536, Kind.PLAIN, True), (576, 1536, Kind.GATED, False)],
)
def test_products_with_8_bit_weights(num_in: int, num_out: int, kind: Kind, residual: bool, quantize: str) -> None:
    assert_same_rows(Rows(num_in, num_out, torch.bfloat16, kind, quantize), residual)


def assert_same_rows(case: Rows, residual: bool) -> None:
    whole = case.run(0, NUM_ROWS[0], residual)
    for num_rows in NUM_ROWS[1:]:
        for first in {0, NUM_ROWS[0] - num_rows}:
            for part, expected in zip(case.run(first, num_rows, residual), whole, strict=True):
                assert torch.equal(part, expected[first : first + num_rows]), (num_rows, first)


@runs_kernels
def test_exact_sums_do_not_depend_on_the_order() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(values, out, COUNT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        where = tl.arange(0, COUNT)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(out + tl.arange(0, ROWS), exact_sum(tl.load(values + where), COUNT))

    for count in (1, 2, 64, 256):
        values = noise(count, 16, dtype=torch.float32, seed=count).square() * 10.0 ** torch.arange(-8, 8).to(DEVICE)
        values[:, 3] = 0.0
        sums = []
        for order in (torch.arange(count), torch.randperm(count), torch.arange(count).flip(0)):
            out = torch.empty(16, device=DEVICE)
            kernel[(1,)](values[order.to(DEVICE)].contiguous(), out, COUNT=count, ROWS=16)
            sums.append(out)
        assert torch.equal(sums[0], sums[1])
        assert torch.equal(sums[0], sums[2])
        torch.testing.assert_close(sums[0].double(), values.double().sum(dim=0), rtol=1e-4, atol=0.0)


def attention_cases(head_dim: int, group: int, window: int, dtype: torch.dtype, num_words: int) -> list[Case]:
    configs = [
        OrderedConfig(
            group=group, block_m=block_m, block_s=64, splits=splits, num_parts=2 if splits == 1 else 100,
            num_warps=warps, num_stages=2,
        )
        for block_m, splits, warps in TILINGS
    ]  # fmt: skip
    return [
        Case(config=config, num_kv_heads=2, head_dim=head_dim, dtype=dtype, window=window, num_words=num_words)
        for config in configs
    ]


@on_gpu
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4), (128, 6), (96, 1)])
@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", 0), ("float16", 45), ("bfloat16", 300)])
def test_attention(head_dim: int, group: int, dtype: str, window: int) -> None:
    """A tree in all tilings; the same tree grown in two passes; paths of it as a chain after a shorter prefix."""
    rng = random.Random(window + head_dim)
    for seed in range(8):
        prefix = rng.choice([0, 63, 64, 65, 127, 128, 2047, round(2 ** rng.uniform(0.0, 12.0))])
        size = rng.randint(2, 70)
        parents = random_parents(rng, size)
        if seed % 3 == 2:  # deep: paths cross blocks and ranges
            size = 300
            parents = [-1, *(rng.choice([node - 1, max(0, node - 2)]) for node in range(1, size))]
        cases = attention_cases(head_dim, group, window, HALVES[dtype], 11)
        tree = PackedSegment(0, 3, prefix, parents, 1)
        launches = [OrderedLaunch(case, [tree], DEVICE, seed) for case in cases]
        results = [launch.run()[:size] for launch in launches]
        for result in results[1:]:
            assert torch.equal(result, results[0]), (prefix, size)
        after = rng.randint(1, size - 1)
        grown = OrderedLaunch(cases[seed % len(cases)], [tree._replace(after=after)], DEVICE, seed)
        grown.take(launches[0], range(after, size))
        assert torch.equal(grown.run()[: size - after], results[0][after:]), (prefix, size, after)
        for node in rng.sample(range(size), 2):
            path = path_to(parents, node)
            read = rng.randint(0, prefix)  # the rest of the prefix is part of the chain
            length = prefix - read + len(path)
            for case in cases:
                launch = OrderedLaunch(case, [PackedSegment(0, 3, read, chain_parents(length), 1)], DEVICE, seed)
                launch.take(launches[0], [*range(read - prefix, 0), *path])
                assert torch.equal(launch.run()[length - len(path) : length], results[0][path]), (prefix, read, node)


# A tree, a chain whose logits are not wanted, a single node without a prompt.
FEW = Question(prompts=(5, 3, 0), trees=(4, 2, 1), num_logits=(4, 0, 1))
MANY = Question(prompts=(150, 40, 7, 0), trees=(20, 9, 3, 1), num_logits=(20, 0, 2, 1))
EVERYTHING: dict[str, Any] = {
    "num_heads": 3 * BASE.num_kv_heads, "head_dim": 96, "qk_norm": True, "qkv_bias": True, "o_bias": True,
    "sliding_window": 6, "tied_embeddings": False,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "num_heads": 6, "head_dim": 96, "qk_norm": True, "qkv_bias": True, "o_bias": True, "sliding_window": 70,
    },
    "normed heads": {"qk_norm": True, "head_dim": 128},
    "window": {"sliding_window": 37},
    "small": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3},
    "odd sizes": {"hidden_size": 80, "intermediate_size": 208, "vocab_size": 131},
}  # fmt: skip


def logits_of(target: NativeTarget, segments: list[Segment]) -> torch.Tensor:
    return copied(target.forward(segments)).logits


@on_gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_models(variant: str, quantize: str | None) -> None:
    """Every node of random trees in batches has the logits of plain decoding of its path, from a fresh cache."""
    if quantize and variant not in ("plain", "small"):
        pytest.skip("two are enough")
    config = replace(LARGE, **VARIANTS[variant])
    named = named_tensors(config)
    weights = assemble(config, lambda name: named[name].to(DEVICE, torch.bfloat16), quantize=quantize)
    target = NativeTarget("fused-cuda", config, weights, 8192, backend="fused-cuda", exact=True)
    rng = random.Random(variant)
    texts = [ids_of(target, rng, length) for length in (1, 40, 63, 200, 700)]
    sequences = [prefill(target, text[:-1], 1200) if len(text) > 1 else target.open(1200) for text in texts]
    for cycle in range(6):
        most = rng.choice([1, 3, 12, 40, 150])
        chosen = rng.sample(range(len(texts)), rng.randint(1, len(texts)))
        segments = []
        for index in chosen:
            parents = random_parents(rng, rng.randint(1, most))
            ids = [texts[index][-1], *ids_of(target, rng, len(parents) - 1)]
            segments.append(Segment(sequences[index], ids, parents, len(parents)))
        found = logits_of(target, segments)
        first = 0
        for index, segment in zip(chosen, segments, strict=True):
            size = len(segment.parents)
            own, first = found[first : first + size], first + size
            node = rng.randrange(size)
            path = path_to(segment.parents, node)
            text = texts[index][:-1] + [segment.token_ids[at] for at in path]
            assert torch.equal(plain_logits(target, text, len(path), rng), own[path]), (cycle, index)
            target.keep(segment.sequence, path)
            texts[index] = [*text, ids_of(target, rng, 1)[0]]


@runs_kernels
@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_exact_models_are_as_good_as_the_eager_decoder(variant: str) -> None:
    """Trees and a chain after prompts of different lengths, and a pass over more rows than a narrow one has."""
    config = replace(BASE, **(EVERYTHING if variant == "everything" else {}))
    for question in (FEW if INTERPRETED else MANY, Question(prompts=(0, 0), trees=(62, 3), num_logits=(1, 2))):
        fused = question.ask(new_target(config, exact=True))
        eager, right = (question.ask(new_target(config, backend="eager", wide=wide)) for wide in (False, True))
        assert_as_accurate(fused.logits, eager.logits, right.logits)
        assert_choices_follow(fused, question.num_best)


def plain_logits(target: NativeTarget, text: list[int], count: int, rng: random.Random) -> torch.Tensor:
    """Logits of the last ``count`` positions: the text before in chunks of random sizes, then one token at a time."""
    sequence = target.open(len(text))
    done = 0
    while done < len(text) - count:
        size = min(rng.choice([1, 16, 50, 100, 333]), len(text) - count - done)
        target.forward([Segment(sequence, text[done : done + size], chain_parents(size), 0)])
        target.keep(sequence, range(size))
        done += size
    rows = []
    for token in text[done:]:
        rows.append(logits_of(target, [Segment(sequence, [token], [-1], 1)]))
        target.keep(sequence, [0])
    target.close(sequence)
    return torch.cat(rows)
