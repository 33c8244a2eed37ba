"""Products with 8-bit weights: on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs

import pytest
import torch

from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.quantize import FORMATS, Quantized, quantize_matrix, to_dense
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda import decoder, passes
from draftwood.targets.native.cuda.kernels.rows import EXPAND_BLOCK, expand
from draftwood.targets.native.cuda.products.launch import Gpu, Kind, Product, choose_tiling
from tests.tools.product import product_resources

NAMES = sorted(FORMATS)
on_host = pytest.mark.skipif(INTERPRETED, reason="has nothing to interpret")


@on_host
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


class Case:
    """A product of random rows and 8-bit weights, and its expected value in float64."""

    def __init__(self, kind: str, name: str, dtype: torch.dtype, rows: int, num_in: int, num_out: int) -> None:
        generator = torch.Generator().manual_seed(0)
        gated = kind == "gated"
        weight = torch.randn(num_out * (1 + gated), num_in, generator=generator)
        weight *= torch.rand(len(weight), 1, generator=generator) * 3.0 / num_in**0.5  # a scale per feature
        weight[1] = 0.0
        self.kind, self.dtype, self.rows, self.num_in, self.num_out = kind, dtype, rows, num_in, num_out
        self.weight = Quantized(*(part.to(DEVICE) for part in quantize_matrix(weight, name)))
        self.x = torch.randn(rows, num_in, generator=generator).to(DEVICE, dtype)
        self.bias = torch.randn(num_out, generator=generator).to(DEVICE, dtype)

    def reference(self) -> torch.Tensor:
        values, scales = (part.double() for part in self.weight)
        result = self.x.double() @ (values * scales[:, None]).T
        if self.kind == "gated":
            gate, up = result.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        return result + self.bias.double() if self.kind == "plain" else result

    def launched(self) -> torch.Tensor:
        product = Product(
            self.num_in, self.num_out, self.rows, Gpu(num_processors=8, shared_bytes=100_000), Kind(self.kind),
            dtype=self.dtype, weight_bytes=1,
        )  # fmt: skip
        self.splits = product.tiling.splits
        floats, counters = product.scratch
        kind = torch.float32 if self.kind == "head" else self.dtype
        out = torch.full((self.rows, self.num_out), float("nan"), dtype=kind, device=DEVICE)
        product.launch(
            self.x, self.weight, out, bias=self.bias if self.kind == "plain" else None,
            parts=torch.zeros(floats, device=DEVICE),
            counters=torch.zeros(counters, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        return out


@runs_kernels
@pytest.mark.parametrize("kind", ["plain", "gated", "head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_products(name: str, dtype: torch.dtype, kind: str) -> None:
    sizes = [(3, 768, 40)] if INTERPRETED else [(1, 768, 40), (33, 768, 2048), (64, 1536, 700), (5, 2048, 4096)]
    for rows, num_in, num_out in sizes:
        case = Case(kind, name, dtype, rows, num_in, num_out)
        result, exact = case.launched().double(), case.reference()
        rounding = 1e-5 if kind == "head" else 2 * torch.finfo(dtype).eps  # logits are float32
        assert bool(((result - exact).abs() <= rounding * (1.0 + exact.abs())).all())
        if num_out == 40 and kind != "head":
            assert case.splits > 1  # several programs shared a block


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_expanded_matrices(name: str, dtype: torch.dtype) -> None:

    matrix = quantize_matrix(torch.randn(3, EXPAND_BLOCK + 48).to(DEVICE), name)
    out = torch.empty(matrix.values.shape, dtype=dtype, device=DEVICE)
    expand(*matrix, out, pdl=False)
    assert torch.equal(out, to_dense(matrix, dtype))


@runs_kernels
@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.bfloat16), ("int8", torch.float16)])
def test_a_model(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in a wide pass and a tree in a narrow one, about as accurate as the eager decoder in the same type."""

    length = 65
    if INTERPRETED:  # in the interpreter, where rows are slow
        length = 5
        for module in (decoder, passes):
            monkeypatch.setattr(module, "MAX_ROWS", 4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 1, "num_kv_heads": 1, "num_layers": 1}
    config = replace(TINY_CONFIG, **sizes, vocab_size=131, tied_embeddings=name == "fp8", qkv_bias=True)
    logits = {}
    for backend in ("fused-cuda", "eager", "exact"):
        kind, used = (torch.float32, "eager") if backend == "exact" else (dtype, backend)
        target = tiny_target(config, dtype=kind, device=DEVICE, backend=used, quantize=name, cache_tokens=100)
        sequence = target.open(80)
        prompt = [37 * place % 131 for place in range(length)]
        first = target.forward([Segment(sequence, prompt, chain_parents(length), 2)]).logits.cpu().clone()
        target.keep(sequence, range(length))
        second = target.forward([Segment(sequence, [5, 6, 7], [-1, 0, 0], 3)]).logits.cpu().clone()
        logits[backend] = torch.cat([first, second])
    fused, eager = (float((logits[one] - logits["exact"]).abs().max()) for one in ("fused-cuda", "eager"))
    assert fused <= 1.5 * eager + 0.02
    assert eager < 1.0


@on_host
@pytest.mark.parametrize(("kind", "rows"), [("plain", 1), ("plain", 64), ("gated", 64), ("head", 64)])
@pytest.mark.parametrize(("name", "dtype"), [("fp8e4nv", "bf16"), ("i8", "bf16"), ("fp8e4nv", "fp16")])
def test_no_registers_are_spilled_on_hopper(kind: str, rows: int, name: str, dtype: str) -> None:

    if dtype == "fp16" and kind != "gated":
        pytest.skip("one is enough")
    shared = 227 * 1024
    product = Product(
        4096, {"plain": 4096, "gated": 14336, "head": 128_256}[kind], rows, Gpu(132, shared), Kind(kind),
        dtype=torch.bfloat16, weight_bytes=1, pdl=True,
    )  # fmt: skip
    found = product_resources(product, dtype, name)
    spilled = 96 if (kind, rows) == ("head", 64) else 0  # bytes; narrower steps, or more warps, are slower there
    assert found.stack <= spilled
    together = 1 if product.num_blocks * product.tiling.splits <= 132 else 2  # programs per multiprocessor
    assert found.shared * together <= shared


@on_host
def test_programs_with_8_bit_weights_are_small() -> None:
    """At least two share a processor: widening takes as long as loading."""
    gpu = Gpu(132, 232_448)
    for kind, rows in pairs([Kind.PLAIN, Kind.GATED], [1, 16, 33, 64]):
        for num_in, num_out in [(4096, 14_336), (1536, 8960), (2048, 2048)]:
            tiling = choose_tiling(num_in, num_out, rows, gpu, kind, 1)
            step = tiling.block_out * (2 if kind is Kind.GATED else 1) + 2 * max(16, rows)  # bytes of an input
            assert tiling.num_stages * tiling.block_in * step <= gpu.shared_bytes / 2
            assert num_in % (tiling.splits * tiling.block_in) == 0


@on_host
def test_exact_products_with_8_bit_weights_widen_them_in_one_order() -> None:
    gpu = Gpu(132, 232_448)
    for kind in (Kind.PLAIN, Kind.GATED):
        found = [choose_tiling(4096, 6144, rows, gpu, kind, 1, exact=True) for rows in (1, 16, 17, 64, 65, 300)]
        assert len({tiling.splits for tiling in found}) == 1
        assert {tiling.block_out for tiling in found[:4]} == {64}
