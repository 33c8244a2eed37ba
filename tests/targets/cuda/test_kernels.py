"""The kernels of a pass of the GPU decoder, one by one, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwood.targets.native.rope import inverse_frequencies
from tests.tools.cuda import SMALL
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.inputs import MAX_MOVES
from draftwood.targets.native.cuda.kernels import rows
from draftwood.targets.native.cuda.kernels.top import new_scratch
from draftwood.targets.native.cuda.products.launch import (
    HALF_SCALE,
    HEAD_BLOCK,
    MAX_ROWS,
    CacheWrite,
    Gpu,
    Heads,
    Hidden,
    Kind,
    Product,
    Rotation,
)
from tests.tools.product import HOPPER, MODELS, product_resources, products_of

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GPU = Gpu(num_processors=8, shared_bytes=100_000)  # few, so that small products are split
EPS = 1e-5
NUM_ROWS = [3, 70] if INTERPRETED else [1, 3, 16, 17, 40, 64, 65, 128, 300]  # above 64: exact products

pytestmark = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:  # once
        run_interpreted(__file__)


def noise(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device=DEVICE, dtype=dtype)


def assert_near(values: torch.Tensor, exact: torch.Tensor, steps: float = 2.0) -> None:
    """Within a few units in the last place of the values, or of the terms they are sums of."""
    eps = max(torch.finfo(values.dtype).eps, 1e-6)
    scale = float(exact.abs().mean())
    torch.testing.assert_close(values.double(), exact.double(), atol=steps * eps * scale, rtol=steps * eps)


def scale_of(dtype: torch.dtype) -> float:
    return HALF_SCALE if dtype == torch.float16 else 1.0


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + (-x).exp())


class Work:
    """A product with all its inputs. Rows beyond its own are NaN and must stay NaN."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_rows: int,
        dtype: torch.dtype,
        kind: Kind = Kind.PLAIN,
        heads: Heads | None = None,
    ) -> None:
        exact = num_rows > MAX_ROWS or num_rows % 2 == 0
        self.product = Product(num_in, num_out, num_rows, GPU, kind, dtype=dtype, eps=EPS, heads=heads, exact=exact)
        floats, counters = self.product.scratch
        self.parts = torch.full((floats,), float("nan"), device=DEVICE)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=DEVICE)
        self.num_rows = num_rows
        rows_of_weight = num_out * (2 if kind is Kind.GATED else 1)
        self.weight = noise(rows_of_weight, num_in, dtype=dtype, scale=num_in**-0.5, seed=1)
        kind_of_out = torch.float32 if kind is Kind.HEAD else dtype
        self.memory = torch.full((num_rows + 2, num_out), float("nan"), dtype=kind_of_out, device=DEVICE)
        self.out = self.memory[:num_rows]

    def run(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        self.product.launch(x, self.weight, self.out, parts=self.parts, counters=self.counters, **options)
        assert (self.counters == 0).all()
        assert self.memory[self.num_rows :].isnan().all()
        return self.out.clone()


def states_to_norm(num_rows: int, width: int, padded: int, dtype: torch.dtype) -> tuple[Hidden, torch.Tensor]:
    """Hidden states as the previous product wrote them in two blocks, and the weight of the norm."""
    states = noise(num_rows, width, dtype=dtype, scale=3.0, seed=2)
    weight = noise(width, dtype=dtype, seed=3) + 1.0
    squares = torch.full((3, padded), float("nan"), device=DEVICE)
    half = width // 2
    squares[0, :num_rows] = states[:, :half].float().square().sum(dim=1)
    squares[1, :num_rows] = states[:, half:].float().square().sum(dim=1)
    scaled = (states.float() * weight.float() * scale_of(dtype)).to(dtype)
    return Hidden(states, scaled, squares), weight


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_normed_product(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    work = Work(96, 80, num_rows, dtype)
    hidden, weight = states_to_norm(num_rows, 96, num_rows + 5, dtype)
    added = noise(80, dtype=dtype, seed=4) if bias else None
    out = work.run(hidden.scaled, squares=hidden.squares, num_squares=2, bias=added)
    exact = norm(hidden.states, weight) @ work.weight.double().t() + (added.double() if added is not None else 0.0)
    assert_near(out, exact, 4.0)


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("width", [96, 576])
def test_a_normed_and_gated_product(num_rows: int, width: int, dtype: torch.dtype) -> None:
    work = Work(width, 48, num_rows, dtype, Kind.GATED)
    hidden, weight = states_to_norm(num_rows, width, num_rows + 5, dtype)
    out = work.run(hidden.scaled, squares=hidden.squares, num_squares=2)
    gate, up = (norm(hidden.states, weight) @ work.weight.double().t()).chunk(2, dim=1)
    assert_near(out, silu(gate) * up, 6.0)


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_in", [64, 1152])
def test_a_product_with_a_residual_is_ready_for_the_next_norm(num_rows: int, num_in: int, dtype: torch.dtype) -> None:
    """Two features are after the last full block."""
    width = 82
    work = Work(num_in, width, num_rows, dtype)
    before = noise(num_rows, width, dtype=dtype, scale=4.0, seed=5)
    work.out.copy_(before)
    groups = work.product.num_groups
    assert groups > 1
    squares = torch.full((groups + 1, num_rows + 3), float("nan"), device=DEVICE)
    hidden = Hidden(work.out, torch.full_like(work.out, float("nan")), squares)
    x, bias, next_norm = (
        noise(*shape, dtype=dtype, seed=6 + seed) for seed, shape in enumerate([(num_rows, num_in), (width,), (width,)])
    )
    out = work.run(x, hidden=hidden, next_norm=next_norm, bias=bias)
    assert_near(out, before.double() + bias.double() + x.double() @ work.weight.double().t())
    assert_near(hidden.scaled, out.double() * next_norm.double() * scale_of(dtype), 1.0)
    assert_near(squares[:groups, :num_rows].sum(dim=0), out.double().square().sum(dim=1), 8.0)
    assert squares[groups].isnan().all()
    assert squares[:, num_rows:].isnan().all()


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_in", [2304] if INTERPRETED else [2304, 32768])
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.GATED])
def test_shared_products_give_the_same_bits_twice(num_rows: int, num_in: int, kind: Kind, dtype: torch.dtype) -> None:
    """Several programs sum a block; their counters are reset afterwards."""
    work = Work(num_in, 64, num_rows, dtype, kind)
    if num_rows <= 16 or num_in > 2304 or num_rows > 64:
        assert work.product.tiling.splits > 1
    x = noise(num_rows, num_in, dtype=dtype, seed=7)
    first, second = work.run(x), work.run(x)
    assert torch.equal(first, second)
    exact = x.double() @ work.weight.double().t()
    if kind is Kind.GATED:
        gate, up = exact.chunk(2, dim=1)
        exact = silu(gate) * up
    assert_near(first, exact)


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_head_product_writes_peaks(num_rows: int, dtype: torch.dtype) -> None:
    vocab_size = 2 * HEAD_BLOCK + 3
    work = Work(64, vocab_size, num_rows, dtype, Kind.HEAD)
    hidden, weight = states_to_norm(num_rows, 64, num_rows + 5, dtype)
    peaks = new_scratch(num_rows + 1, vocab_size, DEVICE).fill_(float("nan"))
    logits = work.run(hidden.scaled, squares=hidden.squares, num_squares=2, peaks=peaks)
    exact = norm(hidden.states, weight) @ work.weight.double().t()
    assert (logits.double() - exact).norm() / exact.norm() < 2 * torch.finfo(dtype).eps
    found = peaks.view(num_rows + 1, 2, 3)
    for block, part in enumerate(logits.split(HEAD_BLOCK, dim=1)):
        top = part.max(dim=1).values
        assert torch.equal(found[:num_rows, 0, block], top)
        torch.testing.assert_close(found[:num_rows, 1, block], (part - top[:, None]).exp().sum(dim=1))
    assert found[num_rows].isnan().all()


@runs_kernels
def test_embeddings_are_ready_for_the_first_norm(dtype: torch.dtype) -> None:
    table, weight = noise(50, 48, dtype=dtype), noise(48, dtype=dtype)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32, device=DEVICE)
    hidden = Hidden(
        *(torch.full((4, 48), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)),
        noise(3, 16, dtype=torch.float32),
    )
    words, afters = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((4, 2), (4,)))
    words[2, 0], words[2, 1], afters[2] = 0b1001, 0b101, 3  # nodes 0 and 2, then 3 and 6 of the tree
    paths = torch.full((4, 64), -1, dtype=torch.int16, device=DEVICE)
    rows.embed(ids, table, weight, hidden, rows.Ancestors(words, afters, paths), pdl=False)
    assert paths[2, :5].tolist() == [6, 3, 2, 0, -1]
    assert (paths[[0, 1, 3]] == -1).all()
    exact = table[ids.long()]
    assert torch.equal(hidden.states, exact)
    assert_near(hidden.scaled, exact.double() * weight.double() * scale_of(dtype), 1.0)
    assert_near(hidden.squares[0, :4], exact.double().square().sum(dim=1))


class TurningHeads:
    """Three query heads and two key and value heads to rotate. The last of several rows is padding."""

    def __init__(self, num_rows: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
        self.heads = Heads(3, 2, dim, normed)
        self.num_rows, self.num_slots = num_rows, num_rows + 7
        generator = torch.Generator().manual_seed(num_rows)
        slots = torch.randperm(self.num_slots, generator=generator)[:num_rows].to(torch.int32)
        if num_rows > 1:
            slots[-1] = -1
        positions = torch.randint(9, (num_rows,), generator=generator, dtype=torch.int32)
        shape = (2, self.num_slots, dim)
        keys, values = (torch.full(shape, 9.0, dtype=dtype, device=DEVICE) for _ in range(2))
        angles = torch.outer(torch.arange(9).float(), inverse_frequencies(SMALL.rope, dim)).to(DEVICE)
        norms = [noise(dim, dtype=dtype, seed=seed) for seed in (1, 2)] if normed else [None, None]
        rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), *norms, EPS)
        self.cache_write = CacheWrite(rotation, positions.to(DEVICE), slots.to(DEVICE), keys, values)

    def assert_correct(self, projected: torch.Tensor, out: torch.Tensor, steps: float) -> None:
        """``projected [N, heads, D]`` in float64; ``out [N, heads, D]``, of which only the queries are compared."""
        rotation, positions, slots, keys, values = self.cache_write
        used = slots >= 0
        heads = projected[used].clone()
        if rotation.q_norm is not None and rotation.k_norm is not None:
            heads[:, :3] = norm(heads[:, :3], rotation.q_norm)
            heads[:, 3:5] = norm(heads[:, 3:5], rotation.k_norm)
        c, s = (part[positions[used].long()].double().repeat(1, 2)[:, None] for part in rotation[:2])
        low, high = heads.chunk(2, dim=-1)
        turned = heads * c + torch.cat([-high, low], dim=-1) * s
        assert_near(out[used, :3], turned[:, :3], steps)
        where = slots[used].long()
        assert_near(keys[:, where].transpose(0, 1), turned[:, 3:5], steps)
        assert_near(values[:, where].transpose(0, 1), projected[used, 5:], steps)
        others = torch.ones(self.num_slots, dtype=torch.bool, device=DEVICE)
        others[where] = False
        assert (keys[:, others] == 9.0).all()
        assert (values[:, others] == 9.0).all()


@runs_kernels
@pytest.mark.parametrize("dim", [16, 96])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("at_once", [2, rows.HEADS_AT_ONCE])
def test_queries_are_rotated_and_keys_are_written_to_slots(
    dim: int, normed: bool, at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program for all heads of a row, or by several."""
    monkeypatch.setattr(rows, "HEADS_AT_ONCE", at_once)
    case = TurningHeads(4, dim, normed, dtype)
    qkv = noise(4, 7 * dim, dtype=dtype)
    before = qkv.view(4, 7, dim).clone()
    rows.rotate_and_store(qkv, case.cache_write, num_heads=3, pdl=False)
    after = qkv.view(4, 7, dim)
    case.assert_correct(before.double(), after, 4.0)
    assert torch.equal(after[3], before[3])


@runs_kernels
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("dim", [16, 24, 64] if INTERPRETED else [16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_a_product_rotates_its_heads(num_rows: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Includes head sizes that do not divide a block. A long input is split among several programs."""
    case = TurningHeads(num_rows, dim, normed, dtype)
    if not case.heads.can_rotate:
        pytest.skip("these are turned by a kernel of their own")
    for num_in in (64, 1536):
        work = Work(num_in, 7 * dim, num_rows, dtype, heads=case.heads)
        x, bias = noise(num_rows, num_in, dtype=dtype, seed=2), noise(7 * dim, dtype=dtype, seed=3)
        out = work.run(x, cache_write=case.cache_write, bias=bias)
        assert out[:, 3 * dim :].isnan().all()
        projected = x.double() @ work.weight.double().t() + bias.double()
        case.assert_correct(projected.view(num_rows, 7, dim), out.view(num_rows, 7, dim), 12.0 if normed else 6.0)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight", ["bf16", "i8", "fp8e4nv"])
def test_no_registers_are_spilled_on_hopper(model: str, weight: str, dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        pytest.skip("one is enough")
    for rows_of_pass in (16, 32, 64):
        found = products_of(model, rows_of_pass, 2 if weight == "bf16" else 1)
        takes = product_resources(next(product for name, product, _ in found if name == "qkv"), weight=weight)
        assert takes.stack == 0, rows_of_pass
        assert takes.shared <= HOPPER.shared_bytes


@runs_kernels
@pytest.mark.parametrize("count", [0, 1, 70, MAX_MOVES])
def test_overlapping_row_moves(count: int, dtype: torch.dtype) -> None:
    """A path that moves down by one or two: most targets are sources of others. Another path moves too."""
    sources = [100 + i + (2 if i > 40 else 1) for i in range(count)]
    targets = list(range(100, 100 + count))
    if count > 10:  # the last three belong to another sequence
        sources[-3:], targets[-3:] = [5, 7, 8], [4, 5, 6]
    keys, values = (noise(2, 1, 110 + MAX_MOVES, 24, dtype=dtype, seed=seed) for seed in (1, 2))
    moves = torch.zeros(1 + 2 * MAX_MOVES, dtype=torch.int32, device=DEVICE)
    moves[0] = count
    moves[1 : 1 + count] = torch.tensor(sources, dtype=torch.int32)
    moves[1 + MAX_MOVES : 1 + MAX_MOVES + count] = torch.tensor(targets, dtype=torch.int32)
    expected = [cache.clone() for cache in (keys, values)]
    for cache in expected:
        cache[:, :, targets] = cache[:, :, sources].clone()
    rows.move_rows(keys, values, moves, pdl=False)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@runs_kernels
@pytest.mark.parametrize("inner", [48, 1030])
def test_gated_rows(inner: int, dtype: torch.dtype) -> None:
    gate_up = noise(3, 2 * inner, dtype=dtype, scale=3.0)
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    out = torch.full((3, inner), float("nan"), dtype=dtype, device=DEVICE)
    rows.gate_rows(gate_up, out, pdl=False)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(out, silu(gate) * up, 1.0)


@runs_kernels
@pytest.mark.parametrize("width", [48, 80])
def test_normed_rows(width: int, dtype: torch.dtype) -> None:
    x, weight = noise(3, width, dtype=dtype, scale=200.0), noise(width, dtype=dtype)
    x[1] = 0.0
    out = torch.full_like(x, float("nan"))
    rows.norm_rows(x, weight, out, EPS, pdl=False)
    assert_near(out, norm(x, weight))
