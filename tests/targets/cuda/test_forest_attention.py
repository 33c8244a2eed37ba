"""Attention of trees below many positions of texts, in one kernel, against float64: on the GPU if there is one, and
in Triton's interpreter everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.heads import Eagle3Head, EagleHead
from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Batch
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.trees import attention
from draftwood.train.trees.attention import children_of, tree_attention
from draftwood.train.trees.head_run import HeadRun
from draftwood.train.trees.layer_run import TextRun, TreeRun, as_target
from tests.tools.head import random_head
from tests.tools.train import MODEL, random_examples
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, resources, run_interpreted, runs_kernels

pytest.importorskip("triton")
from draftwood.targets.native.cuda import attention as cuda_attention
from draftwood.targets.native.cuda.attention import forest
from draftwood.targets.native.cuda.products.launch import Gpu

HALF = [torch.bfloat16, torch.float16]
HOPPER, AMPERE, ADA = 227 << 10, 163 << 10, 99 << 10  # maximum bytes of shared memory per program


class Shape(NamedTuple):
    """B texts of S tokens, R roots in each, k nodes below a root that attend to m; query heads per key head, and
    dimensions."""

    texts: int
    length: int
    roots: int
    width: int
    below: int
    kv_heads: int
    group: int
    dim: int


class Forest(NamedTuple):
    """The inputs of the kernel. NaN wherever nothing may be read."""

    query: Tensor
    text: tuple[Tensor, Tensor]
    nodes: tuple[Tensor, Tensor]
    last: Tensor
    ancestors: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, seed: int, roots: str = "anywhere") -> Forest:
        """Queries, keys and values are views of joint rows, as a projection writes them; values of the text are not."""
        generator = torch.Generator().manual_seed(seed)
        heads = shape.kv_heads * shape.group
        last = torch.randint(0, shape.length, (shape.texts, shape.roots), generator=generator)
        if roots == "in order":
            last = last.sort().values
        elif roots != "anywhere":
            last.fill_({"first": 0, "last": shape.length - 1}[roots])
        seen = torch.rand(shape.texts, shape.roots, shape.width, shape.below, generator=generator) < 0.4
        text = torch.randn(2, shape.texts, shape.length, shape.kv_heads, shape.dim, generator=generator)
        behind = torch.arange(shape.length) > last.amax(dim=1, keepdim=True)  # [B, S]
        text[:, behind] = float("nan")
        nodes = torch.randn(2, shape.texts, shape.roots, shape.below, shape.kv_heads, shape.dim, generator=generator)
        query = 2 * torch.randn(shape.texts, shape.roots, shape.width, heads, shape.dim, generator=generator)
        joint_nodes = torch.cat([torch.full_like(nodes[0], float("nan")), nodes[0], nodes[1]], dim=-2)
        joint_query = torch.cat([query, torch.full_like(query, float("nan"))], dim=-2)
        joint_text = torch.cat([torch.full_like(text[0], float("nan")), text[0]], dim=-2)
        joint_nodes, joint_query, joint_text, value = (
            each.to(DEVICE, dtype) for each in (joint_nodes, joint_query, joint_text, text[1])
        )
        _, key, node_value = joint_nodes.chunk(3, dim=-2)
        return cls(
            joint_query[..., :heads, :],
            (joint_text[..., shape.kv_heads :, :], value),
            (key, node_value),
            last.to(DEVICE),
            seen.to(DEVICE),
        )

    def expected(self) -> Tensor:
        """In float64, head by head."""
        group = self.query.shape[3] // self.text[0].shape[2]
        query = self.query.double()
        text, nodes = (
            [rows.double().nan_to_num().repeat_interleave(group, dim=-2) for rows in each]
            for each in (self.text, self.nodes)
        )
        num_text = text[0].shape[1]
        over_text = torch.einsum("brkhd,bshd->brkhs", query, text[0])
        over_nodes = torch.einsum("brkhd,brmhd->brkhm", query, nodes[0])
        behind = torch.arange(num_text, device=DEVICE) > self.last[..., None]  # [B, R, S]
        over_text = over_text.masked_fill(behind[:, :, None, None], float("-inf"))
        over_nodes = over_nodes.masked_fill(~self.ancestors[..., None, :], float("-inf"))
        weights = (torch.cat([over_text, over_nodes], dim=-1) * query.shape[-1] ** -0.5).softmax(dim=-1)
        of_text, of_nodes = weights[..., :num_text], weights[..., num_text:]
        mixed = torch.einsum("brkhs,bshd->brkhd", of_text, text[1])
        return mixed + torch.einsum("brkhm,brmhd->brkhd", of_nodes, nodes[1])


def assert_correct(given: Forest) -> None:
    found = forest.forest_attention(*given)
    assert found.shape == given.query.shape
    assert found.dtype == given.query.dtype
    tolerance = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), given.expected(), atol=tolerance, rtol=tolerance)


SHAPES = {
    "one of everything": Shape(1, 1, 1, 1, 1, 1, 1, 16),
    "several roots to a tile": Shape(2, 70, 13, 2, 5, 1, 3, 64),
    "several tiles to a root": Shape(1, 65, 2, 43, 70, 1, 3, 16),
    "tiles that end within roots": Shape(1, 90, 5, 9, 11, 2, 7, 64),
    "many small roots": Shape(1, 130, 150, 1, 1, 1, 1, 16),
    "nodes of many steps": Shape(1, 20, 3, 4, 66, 2, 3, 96),
    "no group": Shape(2, 33, 6, 5, 7, 2, 1, 128),
    "a group of 7": Shape(1, 128, 7, 4, 4, 1, 7, 128),
    "heads of 80": Shape(1, 40, 4, 3, 9, 2, 2, 80),
    "heads of 8": Shape(1, 40, 4, 3, 9, 2, 2, 8),
    "heads of 256": Shape(1, 40, 4, 3, 9, 1, 2, 256),
}
LARGE = {
    "TALF": Shape(3, 700, 333, 4, 8, 8, 3, 128),
    "GTO": Shape(2, 1000, 61, 50, 70, 2, 4, 128),
    "GTO, heads of 64": Shape(4, 513, 40, 29, 71, 3, 7, 64),
    "heads of 96": Shape(1, 300, 100, 7, 13, 8, 1, 96),
    "heads of 256": Shape(2, 300, 40, 20, 33, 4, 2, 256),
}


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@runs_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name: str) -> None:
    for dtype in HALF[len(name) % 2 :][:1] if INTERPRETED else HALF:
        assert_correct(Forest.random(SHAPES[name], dtype, seed=len(name)))


@runs_kernels
@pytest.mark.parametrize("roots", ["first", "last"])
def test_roots_at_the_ends_of_texts(roots: str) -> None:
    for length in (1, 63, 64, 65, 127):
        assert_correct(Forest.random(Shape(2, length, 5, 3, 4, 1, 2, 16), torch.float16, length, roots))


@runs_kernels
@pytest.mark.parametrize("root", [0, 62, 63, 64, 126])
def test_tokens_after_a_root_are_masked(root: int) -> None:
    """This includes tokens that another root of the same tile attends to."""
    given = Forest.random(Shape(1, 140, 2, 3, 4, 1, 2, 16), torch.float16, 7, "last")
    given.last[0, 0] = root
    given.text[1][:, root + 1 :] *= 1000
    given.nodes[1][:, 1] *= 1000
    found, expected = forest.forest_attention(*given)[:, 0], given.expected()[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=0.004, rtol=0.004)


@runs_kernels
@settings(max_examples=6 if INTERPRETED else 100)
@given(
    st.builds(
        Shape,
        *(st.integers(1, most) for most in (2, 140, 12, 12, 40, 2)),
        group=st.sampled_from([1, 3, 7]),
        dim=st.sampled_from([16, 64, 96]),
    ),
    st.sampled_from(HALF),
    st.integers(0, 999),
)
def test_forests_of_all_kinds(shape: Shape, dtype: torch.dtype, seed: int) -> None:
    assert_correct(Forest.random(shape, dtype, seed))


@runs_kernels
def test_nodes_without_ancestors_see_only_the_text() -> None:
    """For example padding below a root."""
    given = Forest.random(Shape(1, 30, 3, 4, 6, 1, 2, 16), torch.bfloat16, 1)
    assert_correct(given._replace(ancestors=torch.zeros_like(given.ancestors)))


@runs_kernels
def test_views_of_any_kind() -> None:
    """Blocks of roots, transposed heads, and a last dimension with gaps."""
    given = Forest.random(Shape(2, 50, 9, 3, 6, 2, 2, 32), torch.float16, 2)
    apart = given.query.new_empty(*given.query.shape, 2)
    apart[..., 0] = given.query
    turned = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in given.text)
    assert_correct(given._replace(query=apart[..., 0], text=turned))
    some = slice(2, 7)
    assert_correct(
        Forest(
            given.query[:, some],
            given.text,
            tuple(each[:, some] for each in given.nodes),  # type: ignore[arg-type]
            given.last[:, some],
            given.ancestors[:, some],
        )
    )


@runs_kernels
def test_empty_inputs() -> None:
    given = Forest.random(Shape(1, 5, 2, 1, 1, 1, 1, 16), torch.float16, 3)
    empty = given._replace(query=given.query[:, :0], last=given.last[:, :0], ancestors=given.ancestors[:, :0])
    assert forest.forest_attention(*empty).shape == (1, 0, 1, 1, 16)


@on_gpu
@pytest.mark.parametrize("roots", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_equals_the_reference_at_full_size(name: str, dtype: torch.dtype, roots: str) -> None:
    given = Forest.random(LARGE[name], dtype, 4, roots)
    assert_correct(given)
    assert torch.equal(forest.forest_attention(*given), forest.forest_attention(*given))


@on_gpu
def test_more_elements_than_int32_can_index() -> None:
    """The last text, whose elements lie beyond that limit, gives the same bits as alone."""
    one = Forest.random(Shape(1, 20, 4000, 8, 1, 1, 8, 128), torch.bfloat16, 5)
    texts = (1 << 31) // one.query.numel() + 2
    query, last, ancestors = (repeated(each, texts) for each in (one.query, one.last, one.ancestors))
    query[:-1] = 0
    text, nodes = (tuple(repeated(each, texts) for each in rows) for rows in (one.text, one.nodes))
    found = forest.forest_attention(query, text, nodes, last, ancestors)  # type: ignore[arg-type]
    assert torch.equal(found[-1:], forest.forest_attention(*one))


def repeated(rows: Tensor, count: int) -> Tensor:
    """Repeat [1, ...] along the first dimension."""
    return rows.expand(count, *rows.shape[1:]).contiguous()


# -- where it is used ------------------------------------------------------------------------------------------------


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], tuple[Tensor, Tensor]]:
    """Results with the kernel, which must be used, and without."""

    def run(compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        calls = []
        kernel = forest.forest_attention
        monkeypatch.setattr(cuda_attention, "forest_attention", lambda *given: calls.append(1) or kernel(*given))
        fused = compute()
        used = len(calls)
        monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
        eager = compute()
        assert used == len(calls) > 0
        return fused, eager

    return run


def assert_near(fused: Tensor, eager: Tensor, dtype: torch.dtype) -> None:
    """Equal up to half precision, with a margin for layers that amplify differences."""
    away, size = (float(each.float().norm()) for each in (fused - eager, eager))
    assert away < 4 * torch.finfo(dtype).eps * size


def step_tokens(step: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tokens and parents of the nodes of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, shape, generator=generator)
    parents = torch.randint(0, shape[-1] if step else 1, shape, generator=generator)
    return tokens.to(DEVICE), parents.to(DEVICE)


@runs_kernels
def test_the_target_gives_the_same_result(both_ways: Any) -> None:
    target = tiny_target(dtype=torch.float16, device=DEVICE, backend="eager")
    layers = target.layers()
    assert layers is not None
    token_ids = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    roots = torch.tensor([[0, 7, 20], [3, 4, 11]], device=DEVICE)
    is_node = torch.ones(2, 3, 5, dtype=torch.bool, device=DEVICE)
    is_node[0, 1, 3:] = False

    def run() -> Tensor:
        with as_target(target):
            trees = TreeRun(TextRun(layers, token_ids), roots)
            ancestors = torch.zeros(2, 3, 1, 0, dtype=torch.bool, device=DEVICE)
            found = []
            for step in range(3):
                tokens, parents = step_tokens(step, (2, 3, 5))
                ancestors = children_of(ancestors, parents)
                found.append(trees.step(tokens, ancestors, is_node))
            return torch.cat(found)

    fused, eager = both_ways(run)
    assert_near(fused, eager, torch.float16)


@runs_kernels
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_gives_the_same_result(both_ways: Any, kind: str) -> None:
    """In float32, which autocast converts to half precision."""
    head = random_head(kind, MODEL).to(DEVICE)
    assert isinstance(head, EagleHead | Eagle3Head)
    batch = Batch.of(random_examples([16, 9]), DEVICE)
    signals = FrozenTarget.of(tiny_target(MODEL, device=DEVICE), head).signals(batch)
    roots = torch.tensor([[1, 7, 15], [2, 8, 1]], device=DEVICE)

    def run() -> Tensor:
        trees = HeadRun(head, batch, signals, roots)
        return torch.stack([trees.step(*step_tokens(step, (2, 3, 4))) for step in range(3)])

    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        fused, eager = both_ways(run)
    assert_near(fused, eager, torch.bfloat16)


@runs_kernels
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_head_without_gradients_rounds_as_with_gradients(kind: str) -> None:
    """Bit-identical: GTO divides one by the other."""
    head = random_head(kind, MODEL).to(DEVICE)
    assert isinstance(head, EagleHead | Eagle3Head)
    batch = Batch.of(random_examples([16, 9]), DEVICE)
    signals = FrozenTarget.of(tiny_target(MODEL, device=DEVICE), head).signals(batch)
    roots = torch.tensor([[1, 7, 15], [2, 8, 1]], device=DEVICE)
    found = []
    for wants_gradients in (True, False):
        with torch.set_grad_enabled(wants_gradients), torch.autocast(DEVICE.type, torch.bfloat16):
            trees = HeadRun(head, batch, signals, roots, fused=False)
            found.append(torch.stack([trees.step(*step_tokens(step, (2, 3, 4))) for step in range(3)]))
    assert torch.equal(found[0].detach(), found[1])


@runs_kernels
def test_gradients_are_not_lost() -> None:
    given = Forest.random(Shape(1, 9, 2, 3, 4, 1, 2, 16), torch.float16, 6)
    assert attention.is_fused(given.query, *given.text)
    value = given.nodes[1].clone().requires_grad_(True)
    assert not attention.is_fused(given.query, *given.text, value)
    mixed = tree_attention(*given._replace(nodes=(given.nodes[0], value)))
    mixed.sum().backward()
    assert value.grad is not None
    with torch.no_grad():
        assert attention.is_fused(given.query, value)
    assert not attention.is_fused(given.query.float())


@pytest.mark.skipif(DEVICE.type == "cuda" or INTERPRETED, reason="there are kernels")
def test_without_kernels_nothing_is_fused() -> None:
    assert not attention.is_fused(torch.zeros(1, 1, 1, 1, 16, dtype=torch.bfloat16))


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("capability", "shared", "dim"), [(80, AMPERE, 128), (90, HOPPER, 128), (90, HOPPER, 64)])
def test_no_registers_are_spilled(capability: int, shared: int, dim: int) -> None:
    tiles = forest.choose_tiles(100_000, 1, dim, Gpu(132, shared))
    names = ("query", "text_key", "text_value", "node_key", "node_value", "out")
    types = {**dict.fromkeys(names, "*bf16"), "last": "*i64", "ancestors": "*u8", "scale": "fp32"}
    sizes = {"D": dim, "BLOCK_D": dim, "G": 4, "BLOCK_M": tiles.block_m, "BLOCK_S": tiles.block_s}
    types |= {name: "i32" for name in forest._attend.arg_names if name not in types and name not in sizes}
    found = resources(
        forest._attend, types, sizes, capability=capability, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    assert found.stack == 0
    assert found.shared <= shared


@given(st.integers(1, 1 << 20), st.integers(1, 512), st.integers(1, 256), st.sampled_from([HOPPER, AMPERE, ADA]))
def test_choices_are_valid(num_rows: int, num_walks: int, dim: int, shared: int) -> None:
    tiles = forest.choose_tiles(num_rows, num_walks, dim, Gpu(132, shared))
    size = forest.pad_dim(dim)
    assert dim <= size < 2 * max(dim, 16)
    assert (tiles.block_m == 128) == (size <= 64 and -(-num_rows // 128) * num_walks >= 132)
    assert 1 <= tiles.num_stages <= 3
    assert (tiles.block_m + 2 * tiles.num_stages * tiles.block_s) * 2 * size <= shared
