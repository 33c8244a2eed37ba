"""EAGLE heads in captured passes against the module: on a GPU if there is one, and in Triton's interpreter
everywhere.

The reference is the eager model in float32 with the same rounded weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.heads import Eagle3Head, EagleHead
from draftwood.models.config import Rope
from draftwood.sources.neural import head_graphs
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.build import make_head_model
from draftwood.sources.neural.head import EagleModel
from draftwood.sources.neural.head_graphs import GraphedEagleModel, feature_weights
from draftwood.targets.base import Segment, TargetParts, chain_parents
from draftwood.targets.native.cuda.attention.plan import count_bits, words_per_row
from draftwood.targets.native.cuda.features import weights as feature_weights_module
from draftwood.targets.native.cuda.features.weights import MAX_FEATURES
from draftwood.targets.native.decoder import PackedBatch, PackedSegment
from draftwood.targets.native.quantize import Quantized, quantize_matrix, to_dense
from tests.tools.cuda import LARGE, SMALL, assert_as_accurate, error
from tests.tools.head import random_head, random_parts
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, resources, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.features import decoder as feature_decoder
from draftwood.targets.native.cuda.features import rows as feature_rows

MODEL = replace(SMALL if INTERPRETED or DEVICE.type == "cpu" else LARGE, num_layers=9, tied_embeddings=False)
K = 3 if INTERPRETED else 7  # number of requested top entries
NORMS: dict[str, Any] = {"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True, "norm_output": True}
EVERYTHING: dict[str, Any] = {
    **NORMS,
    "num_layers": 2,
    "hidden_size": 2 * MODEL.hidden_size,
    "own_embed": True,
    "fc_bias": True,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": True,
    "norm_eps": 1e-2,
    "rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_context=128),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle"},
    "eagle raw": {"kind": "eagle", "feature": "raw", "fc_bias": False, "norm_eps": 1e-2},
    "eagle3": {"kind": "eagle3", "draft_vocab_size": MODEL.vocab_size - 20},
    "eagle3 shared": {"kind": "eagle3", "own_lm_head": False},
    "eagle3 normed": {"kind": "eagle3", **NORMS},
    "eagle3 everything": {"kind": "eagle3", "draft_vocab_size": MODEL.vocab_size - 3, **EVERYTHING},
}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALVES = list(FLOATS)[1:]
# The interpreter is slow, and there are no GPU kernels for float32.
CASES = (
    [("eagle raw", "float32"), ("eagle3 everything", "float32"), ("eagle3", "bfloat16")]
    if INTERPRETED
    else [(variant, dtype) for variant in VARIANTS for dtype in HALVES]
)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes: the interpreter takes milliseconds per row and entry."""
    if INTERPRETED:
        monkeypatch.setattr(feature_decoder, "ROWS", (4, 8, 16, 68, 256))
        monkeypatch.setattr(feature_decoder, "BEST", (1, K, 12))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def new_head(variant: str, dtype: torch.dtype, *, wide: bool = False, narrowed: bool = False) -> EagleHead | Eagle3Head:
    """``wide``: the same rounded numbers in float32. ``narrowed``: matrices of layers and logits rounded to 8 bits.
    Matrices preserve the scale of their input."""
    changes = dict(VARIANTS[variant])
    head = random_head(changes.pop("kind"), MODEL, **changes)
    with torch.no_grad():
        for matrix in (parameter for parameter in head.parameters() if parameter.ndim == 2):
            matrix *= matrix.shape[1] ** -0.5 / matrix.std()
    head.to(dtype)
    parts, used = random_parts(MODEL), torch.float32 if wide else dtype
    tensors = [tensor.to(dtype).to(DEVICE, used) for tensor in parts[:3]]
    tensors[2] *= MODEL.hidden_size**-0.5  # logits around 1
    head.to(DEVICE, used)
    if narrowed:
        own = [weight for name, weight in head.named_parameters() if weight.ndim == 2 and "embed" not in name]
        for weight in [*(weight for weight in own if not is_joining(head, weight)), tensors[2]]:
            weight.data.copy_(to_dense(quantize_matrix(weight.detach(), "fp8"), weight.dtype))
    head.bind(TargetParts(*tensors, parts.norm_eps))
    assert isinstance(head, (EagleHead, Eagle3Head))
    return head


def is_joining(head: EagleHead | Eagle3Head, weight: torch.Tensor) -> bool:
    """Whether it is the matrix that joins features with each other or with tokens."""
    return weight is head.fc.weight


def new_model(
    kind: type[EagleModel], variant: str, dtype: torch.dtype, *, wide: bool = False, num_slots: int = 1024
) -> EagleModel:
    head = new_head(variant, dtype, wide=wide)
    return kind(head, head.config.taps_for(MODEL.num_layers), num_slots)


@dataclass(frozen=True, kw_only=True)
class Play:
    """Simulates drafters: texts with given features, trees that grow below them, and continued texts. Sequences are out
    of step, so a pass mixes texts and trees; some are closed, and their slots are reused."""

    cycles: int
    sequences: int = 1
    most_text: int = 3
    levels: int = 2
    nodes: tuple[int, int] = (1, 4)  # per level
    reopened: bool = False

    def on(self, model: EagleModel, seed: int = 1) -> tuple[torch.Tensor, np.ndarray]:
        """For all requested rows the sorted top logits and the total, [R, K + 1]; and the tokens [R, K]."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        vocabulary, width = range(MODEL.vocab_size), model._head.config.num_taps * MODEL.hidden_size
        capacity = self.cycles * self.most_text + self.levels * self.nodes[1]
        sequences = [model.open(capacity) for _ in range(self.sequences)]
        found = []
        for cycle in range(self.cycles):
            if cycle and self.reopened:
                model.close(sequences[0])
                sequences[0] = model.open(capacity)
            after = [0] * len(sequences)
            for step in range(self.levels + 1 + (len(sequences) > 1)):
                segments, texts = [], []
                for number, sequence in enumerate(sequences):
                    own = step - number % 2  # every second one is added later
                    size = rng.randint(*(self.nodes if own else (1, self.most_text)))
                    tokens = rng.choices(vocabulary, k=size)
                    if own == 0:
                        taps = torch.randn(size, width, generator=generator).to(DEVICE, model._hidden.dtype)
                        segments.append(DraftSegment(Segment(sequence, tokens, chain_parents(size), 1), taps))
                        texts.append((sequence, size))
                    elif 0 < own <= self.levels:
                        parents = [rng.randrange(-1, after[number]) for _ in tokens]
                        wanted = rng.randint(1, min(size, 4))
                        segments.append(DraftSegment(Segment(sequence, tokens, parents, wanted, after[number])))
                        after[number] += size
                found.append(model.forward(segments, K))
                for sequence, size in texts:
                    model.keep(sequence, range(size))
        for each in sequences:
            model.close(each)
        rows = [np.concatenate([top.logits, top.log_total[:, None]], axis=1) for top in found]
        return torch.from_numpy(np.concatenate(rows)), np.concatenate([top.ids for top in found])


FEW = Play(cycles=1, sequences=2, most_text=2, nodes=(1, 2))
MANY = Play(cycles=12, sequences=3, most_text=9, levels=6, nodes=(1, 10), reopened=True)


def check(variant: str, dtype: torch.dtype, play: Play, **options: int) -> GraphedEagleModel:
    """Compare with the eager model; return the captured one."""
    fused = new_model(GraphedEagleModel, variant, dtype, **options)
    assert isinstance(fused, GraphedEagleModel)
    exact, best = play.on(new_model(EagleModel, variant, dtype, wide=True, **options))
    rows, tokens = play.on(fused)
    if dtype == torch.float32:
        torch.testing.assert_close(rows, exact, rtol=1e-4, atol=1e-4)
        assert tokens.tolist() == best.tolist()
        return fused
    eager, _ = play.on(new_model(EagleModel, variant, dtype, **options))
    assert_as_accurate(rows, eager, exact)
    clear = (exact[:, 0] - exact[:, 1] > 0.2).numpy()  # the best one, by a clear margin
    assert clear.any()
    assert tokens[clear, 0].tolist() == best[clear, 0].tolist()
    return fused


@runs_kernels
@pytest.mark.parametrize(("variant", "dtype"), CASES)
def test_as_accurate_as_the_module(variant: str, dtype: str) -> None:
    check(variant, FLOATS[dtype], FEW if INTERPRETED else MANY)


@runs_kernels
@pytest.mark.parametrize("variant", ["eagle3"] if INTERPRETED else ["eagle", "eagle3", "eagle3 everything"])
def test_large_matrices_in_8_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accurate as a module with the same rounded weights; passes over many rows read the weights as they are."""
    monkeypatch.setattr(feature_weights_module, "MIN_BYTES", 0)
    play = FEW if INTERPRETED else MANY
    heads = [new_head(variant, torch.bfloat16, wide=wide, narrowed=True) for wide in (False, True)]
    eager, exact = (EagleModel(head, head.config.taps_for(MODEL.num_layers), 1024) for head in heads)
    head = new_head(variant, torch.bfloat16)
    fused = GraphedEagleModel(head, head.config.taps_for(MODEL.num_layers), 1024, quantize=True)
    rows = [play.on(model)[0] for model in (fused, eager, exact)]
    assert_as_accurate(*rows)
    assert error(play.on(new_model(EagleModel, variant, torch.bfloat16))[0], rows[2]) > error(rows[0], rows[2])
    model = fused._decoder._model
    assert all(isinstance(layer.gate_up, Quantized) for layer in model.narrow_weights.layers)
    assert model.model.weights is model.features.weights


def test_small_matrices_stay_as_they_are() -> None:
    weights = feature_weights(new_head("eagle3", torch.bfloat16)).weights
    narrow = feature_weights_module.in_8_bits(weights)
    assert narrow.head is weights.head
    assert [layer.gate_up is own.gate_up for layer, own in zip(narrow.layers, weights.layers, strict=True)] == [True]


@runs_kernels
def test_pass_too_wide_for_own_kernels() -> None:
    dtype = "float32" if INTERPRETED else "bfloat16"
    for variant in ("eagle3",) if INTERPRETED else VARIANTS:
        fused = check(variant, FLOATS[dtype], Play(cycles=1 if INTERPRETED else 8, levels=1, nodes=(66, 68)))
        assert list(fused._decoder._passes)[-1].shape.num_rows > 64


@on_gpu
@pytest.mark.parametrize("sequences", [8, 40])
def test_many_requests(sequences: int) -> None:
    """The largest passes have room for forty trees."""
    play = Play(cycles=3, sequences=sequences, levels=3, nodes=(1, 20))
    fused = check("eagle3", torch.bfloat16, play, num_slots=8192)
    sizes = {shape.shape.num_rows for shape in fused._decoder._passes}
    assert max(sizes) >= (128 if sequences == 8 else MAX_FEATURES)


@runs_kernels
def test_too_large_passes_use_the_module() -> None:
    size = feature_decoder.ROWS[-1] + 44
    taps = torch.randn(size, 3 * MODEL.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    answers = []
    for kind in (EagleModel, GraphedEagleModel):
        model = new_model(kind, "eagle3", torch.bfloat16)
        sequence = model.open(size + 2)
        text = Segment(sequence, [*range(size)], chain_parents(size), 1)
        answers.append(model.forward([DraftSegment(text._replace(token_ids=[5] * size), taps.bfloat16())], K))
        if isinstance(model, GraphedEagleModel):
            assert not model._decoder._passes
        model.keep(sequence, range(size))
        answers.append(model.forward([DraftSegment(Segment(sequence, [1, 2], [-1, -1], 2))], K))
    for one, other in zip(answers[:2], answers[2:], strict=True):
        assert error(torch.from_numpy(other.logits), torch.from_numpy(one.logits)) < 0.05


@runs_kernels
def test_the_number_of_best_entries_may_change() -> None:
    """Up to a whole small vocabulary; requesting none has no side effects."""
    model = new_model(GraphedEagleModel, "eagle", torch.float16)
    sequence = model.open(8)
    text = Segment(sequence, [3, 4], [-1, 0], 0)
    taps = torch.ones(2, MODEL.hidden_size, dtype=torch.float16, device=DEVICE)
    assert model.forward([DraftSegment(text, taps)], K).ids.shape == (0, K)
    model.keep(sequence, range(2))
    several = [model.forward([DraftSegment(Segment(sequence, [9], [-1], 1))], k) for k in (1, 3, 12)]
    for top, k in zip(several, (1, 3, 12), strict=True):
        assert top.ids.shape == top.logits.shape == (1, k)
        assert top.ids.tolist() == several[-1].first(k).ids.tolist()
        assert top.log_total.tolist() == pytest.approx(several[-1].log_total.tolist())


@runs_kernels
def test_padding_rows_of_a_pass_leave_no_trace() -> None:
    """The second pass is smaller than the first in the same shape: inputs of the first must have no effect."""
    model = new_model(GraphedEagleModel, "eagle3", torch.bfloat16, num_slots=32)
    first, second = model.open(10), model.open(10)
    taps = torch.ones(4, 3 * MODEL.hidden_size, dtype=torch.bfloat16, device=DEVICE)
    memory = (model._cache.keys, model._cache.values, model._hidden[None, None])
    for rows in memory:
        rows.fill_(0.5)
    model.forward([DraftSegment(Segment(first, [1, 2, 3, 4], chain_parents(4), 1), taps)], K)
    before = [rows.clone() for rows in memory]
    model.forward([DraftSegment(Segment(second, [5, 6], chain_parents(2), 1), taps[:2])], K)
    for rows, old in zip(memory, before, strict=True):
        changed = (rows != old).any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist()
        assert changed == [10, 11]


@runs_kernels
def test_more_shapes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted passes are captured again with the same accuracy."""
    play = Play(cycles=2, levels=1, nodes=(2, 3), reopened=True)
    monkeypatch.setattr(feature_decoder, "MAX_PASSES", 1)
    fused = check("eagle3", torch.float16, play)
    assert len(fused._decoder._passes) == 1


@pytest.mark.skipif(INTERPRETED, reason="has smaller shapes")
def test_a_draft_of_one_request_takes_two_shapes() -> None:
    """One for all texts of a few tokens, one for all levels of any tree size."""
    decoder = new_model(GraphedEagleModel, "eagle", torch.float16)._decoder  # type: ignore[attr-defined]
    shapes = set()
    for size, after in product(range(1, 11), (0, 1, 10, 63, 118)):
        level = PackedSegment(0, 0, 50, [-1] * (after + size), size, after)
        shapes.add(decoder.shape_for(PackedBatch.of([0] * size, [level]), [None], 10))
        text = PackedSegment(0, 0, 50, chain_parents(size), 1)
        shapes.add(decoder.shape_for(PackedBatch.of([0] * size, [text]), [torch.zeros(0)], 10))
    assert len(shapes) == 2


@pytest.mark.skipif(INTERPRETED, reason="has smaller shapes")
@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 400)), min_size=1, max_size=9), st.integers(1, 100))
def test_shape_fits_its_batch(sizes: list[tuple[int, int]], k: int) -> None:
    """Its rows, the ancestors of grown trees, and the requested entries; otherwise there is no shape."""
    decoder = new_model(GraphedEagleModel, "eagle", torch.float16)._decoder  # type: ignore[attr-defined]
    segments, start = [], 0
    for size, after in sizes:
        segments.append(PackedSegment(start, 0, 50, [-1] * (after + size), size, after))
        start += size
    found = decoder.shape_for(PackedBatch.of([0] * start, segments), [None] * len(sizes), k)
    bits = max((count_bits(segment) for segment in segments if segment.after), default=0)
    most = feature_decoder.ROWS[-1]
    if found is None:
        assert start > most or bits > 32 * words_per_row(most) or k > 64
        return
    shape = found.shape
    assert start <= shape.num_rows <= most
    assert bits <= 32 * words_per_row(shape.num_rows)
    assert len(sizes) <= shape.num_sequences
    assert k <= shape.num_best <= 64
    assert start <= shape.num_logits  # all are requested


@pytest.mark.parametrize("variant", VARIANTS)
def test_joined_weights_are_those_of_the_module(variant: str) -> None:
    """Weights are not duplicated, and the module's output is unchanged."""
    head, untouched = (new_head(variant, torch.float32) for _ in range(2))
    joined = feature_weights(head).weights
    models = [EagleModel(each, each.config.taps_for(MODEL.num_layers), 64) for each in (head, untouched)]
    torch.testing.assert_close(*(Play(cycles=1).on(model)[0] for model in models))
    for layer, mine in zip(head.layers, joined.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        rows = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert isinstance(mine.qkv, torch.Tensor)
        assert isinstance(mine.gate_up, torch.Tensor)
        assert torch.equal(mine.qkv, torch.cat(rows))
        assert torch.equal(mine.gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        assert {row.untyped_storage().data_ptr() for row in rows} == {mine.qkv.data_ptr()}
        assert mlp.gate_proj.weight.data_ptr() == mine.gate_up.data_ptr()


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.parametrize(("capability", "pdl"), [(90, True), (80, False)])
def test_the_kernels_compile_for_gpus_and_stay_in_registers(capability: int, pdl: bool) -> None:
    pointers = dict.fromkeys(("ids", "sources", "slots"), "*i32")
    names = ("table", "feature_cache", "given", "token_norm", "feature_norm", "joined", "states", "norm")
    types = {**pointers, **dict.fromkeys(names, "*bf16"), "eps": "fp32"}
    sizes: dict[str, Any] = {"H": 4096, "BLOCK": 4096, "NORMED": True}
    for kernel, constants in (
        (feature_rows._join, {**sizes, "NORM_BEFORE_RESIDUAL": False, "GIVEN": True}),
        (feature_rows._store, {**sizes, "PDL": pdl}),
    ):
        own = {name: types[name] for name in kernel.arg_names if name in types}
        used = resources(kernel, own, constants, capability=capability, num_warps=feature_rows.WARPS, num_stages=3)
        assert used.stack == 0
        assert used.registers <= 128


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_passes_take_as_many_segments_as_fit(sizes: list[int]) -> None:
    segments = [DraftSegment(Segment(number, [0] * size, [-1] * size, 1)) for number, size in enumerate(sizes)]
    passes = list(head_graphs._split_passes(segments))
    assert [segment for some in passes for segment in some] == segments
    totals = [sum(len(segment.segment.token_ids) for segment in some) for some in passes]
    for some, total in zip(passes, totals, strict=True):
        assert len(some) == 1 or total <= MAX_FEATURES
    for total, following in zip(totals, passes[1:], strict=False):
        assert total + len(following[0].segment.token_ids) > MAX_FEATURES


def test_conditions_for_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, in half precision, with sizes that the kernels support."""
    head = new_head("eagle3", torch.bfloat16)
    model = partial(make_head_model, head, MODEL.num_layers, 64)
    expected = GraphedEagleModel if DEVICE.type == "cuda" else EagleModel
    assert type(model()) is expected
    assert ("not a GPU" in head_graphs.why_not_graphed(head)) == (DEVICE.type == "cpu")
    monkeypatch.setattr(head_graphs, "why_not_graphed", lambda head: "it is Sunday")
    assert type(model()) is EagleModel
