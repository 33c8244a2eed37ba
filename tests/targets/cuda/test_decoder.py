"""The decoder for GPUs against the eager one: on a GPU if there is one, and always in Triton's interpreter.

The reference is the eager decoder in float32 with the same rounded weights. The interpreter is slow: it runs
the smallest models and a few passes; a GPU runs all shapes.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from draftwood.errors import CapabilityError
from draftwood.models.config import Rope
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native import cuda
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from tests.conftest import path_to, prefill, random_parents
from tests.tools.cuda import (
    BASE,
    SMALL,
    Question,
    answers,
    assert_as_accurate,
    assert_choices_follow,
    committed_rows,
    copied,
    error,
    ids_of,
    named_tensors,
    new_target,
)
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda import decoder as cuda_decoder
from draftwood.targets.native.cuda.workspace import Workspace

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EVERYTHING = {
    "num_heads": 3 * BASE.num_kv_heads,
    "head_dim": 96,
    "qk_norm": True,
    "qkv_bias": True,
    "o_bias": True,
    "sliding_window": 6,
    "tied_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tied_embeddings": False},
    "qk norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "bias of queries": {"qkv_bias": True},
    "window": {"sliding_window": 37},
    "tiny window": {"sliding_window": 2},
    "head 16": {"head_dim": 16},
    "head 96": {"head_dim": 96},
    "head 128": {"head_dim": 128},
    "head 256": {"head_dim": 256},
    "group of 1": {"num_heads": 2},
    "group of 3": {"num_heads": 6},
    "group of 7": {"num_heads": 14},
    "llama3 rope": {"rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_context=128)},
    "odd sizes": {"hidden_size": 80, "intermediate_size": 208, "vocab_size": 131},
    "everything": EVERYTHING,
}
INTERPRETED_CASES = [("plain", "bfloat16"), ("everything", "float16")]
CASES = INTERPRETED_CASES if INTERPRETED else [(variant, dtype) for variant in VARIANTS for dtype in HALVES]
# A tree, a chain without logits, a tree with logits of the last nodes only, and no prefix.
FEW = Question(prompts=(5, 3, 0), trees=(4, 2, 1), num_logits=(4, 0, 1), taps=(0, 2, 1))
MANY = Question(prompts=(150, 40, 7, 0), trees=(20, 9, 3, 1), num_logits=(20, 0, 2, 1), taps=(1, 0, 3))
SIZES = [
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    16,
    17,
    24,
    31,
    32,
    48,
    50,
    64,
    65,
    96,
    128,
    150,
    192,
    256,
    300,
    384,
    512,
    513,
    1024,
    1300,
]


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@runs_kernels
@pytest.mark.parametrize(("variant", "dtype"), CASES)
def test_as_accurate_as_the_eager_decoder(variant: str, dtype: str) -> None:
    config = replace(BASE, **VARIANTS[variant])
    question = FEW if INTERPRETED else MANY
    fused, eager, exact = answers(config, HALVES[dtype], question)
    assert_as_accurate(fused.logits, eager.logits, exact.logits)
    assert_choices_follow(fused, question.num_best)
    assert fused.taps is not None
    assert eager.taps is not None
    assert exact.taps is not None
    assert_as_accurate(fused.taps, eager.taps, exact.taps)


@runs_kernels
def test_pass_too_wide_for_own_kernels() -> None:
    """It has logits of the requested rows only."""
    config = replace(BASE, num_layers=1, qkv_bias=True, o_bias=True)
    question = Question(prompts=(0, 0), trees=(62, 3), num_logits=(1, 2), taps=(1,))
    fused, eager, exact = answers(config, torch.bfloat16, question)
    assert_as_accurate(fused.logits, eager.logits, exact.logits)
    assert_choices_follow(fused, question.num_best)
    assert fused.taps is not None
    assert exact.taps is not None
    assert error(fused.taps, exact.taps) < 0.02


@lru_cache
def targets() -> tuple[NativeTarget, NativeTarget, NativeTarget]:
    """The three targets of ``answers``, reused: passes of all shapes share the memory of one decoder."""
    return new_target(), new_target(backend="eager"), new_target(backend="eager", wide=True)


@on_gpu
@pytest.mark.parametrize("size", SIZES)
def test_every_number_of_rows(size: int) -> None:
    """Alone and with others; the second and third answers come from a captured pass."""
    for wanted, others in ((size, ()), (size // 2, (1,)), (1, (2, 3, 1)), (0, ())):
        if sum(others) >= size:
            continue
        trees = (size - sum(others), *others)
        question = Question(
            prompts=(33, *(5 for _ in others)),
            trees=trees,
            num_logits=(min(wanted, trees[0]), *others),
            taps=(1,) if others else (),
            num_best=wanted % 7,
        )
        fused, eager, exact = (question.ask(target) for target in targets())
        second, third = (question.ask(targets()[0]) for _ in range(2))
        for output in (fused, second):  # the vendor library may choose another algorithm during capture
            assert_as_accurate(output.logits, eager.logits, exact.logits)
            assert_choices_follow(output, question.num_best)
        assert torch.equal(second.logits, third.logits)


@runs_kernels
@pytest.mark.parametrize("size", [3] if INTERPRETED else [1, 3, 8, 16, 40, 64, 100])
def test_large_hidden_states_in_float16(size: int) -> None:
    """Before normalization, multiplied by the norm weight, they exceed the range of float16."""
    config = replace(BASE, tied_embeddings=False, num_layers=1)
    tensors = named_tensors(config)
    embed, norm = tensors["model.embed_tokens.weight"], tensors["model.layers.0.input_layernorm.weight"]
    embed.mul_(9000.0).clamp_(-30_000, 30_000)
    norm.mul_(3.0)
    assert (embed * norm).abs().max() > torch.finfo(torch.float16).max
    question = Question(prompts=(0,), trees=(size,), num_logits=(size,), taps=(1,))
    fused, eager, exact = answers(config, torch.float16, question, tensors)
    assert_as_accurate(fused.logits, eager.logits, exact.logits)
    assert fused.taps is not None
    assert exact.taps is not None
    assert fused.taps.abs().max() > 15_000
    assert error(fused.taps, exact.taps) < 2e-3


@runs_kernels
def test_padding_rows_leave_no_trace() -> None:
    """The second batch is smaller than the first in the same shape: inputs of the first must have no effect."""
    target = new_target()
    rng = random.Random(1)
    first, second = target.open(8), target.open(8)
    target.forward([Segment(first, ids_of(target, rng, 4), chain_parents(4), 0)])
    target.keep(first, range(4))
    before = [rows.clone() for rows in (target.cache.keys, target.cache.values)]
    target.forward([Segment(second, ids_of(target, rng, 3), chain_parents(3), 0)])
    written = slice(target.cache[second].base, target.cache[second].base + 3)
    for rows, old in zip((target.cache.keys, target.cache.values), before, strict=True):
        assert not torch.equal(rows[:, :, written], old[:, :, written])
        old[:, :, written] = rows[:, :, written]
        assert torch.equal(rows.nan_to_num(), old.nan_to_num())


@runs_kernels
@pytest.mark.parametrize("exact", [False, True])
def test_a_pass_holds_its_buffers(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are part of a captured graph, so launches must not ask for buffers, which may have been replaced."""
    target = new_target(replace(BASE, num_layers=1), exact=exact)
    target.forward([Segment(target.open(8), (5, 6, 7), (-1, 0, 0), 3)])
    for name in ("buffers", "logits", "matrix", "paths", "scratch"):
        monkeypatch.delattr(Workspace, name)
    (captured,) = target._decoder._passes.values()
    with torch.inference_mode():
        captured.work.launch()


@runs_kernels
def test_the_number_of_best_entries_may_change() -> None:
    target = new_target(replace(BASE, num_layers=1))
    sequence, token = target.open(8), 7
    seen = []
    for k in (0, 2, 5, 2):
        target.set_top(k)
        output = copied(target.forward([Segment(sequence, [token], [-1], 1)]))
        assert_choices_follow(output, k)
        seen.append(output.logits)
    assert all(torch.equal(logits, seen[0]) for logits in seen)


@runs_kernels
@pytest.mark.parametrize("lane", [0, 1])
def test_a_pass_that_is_read_late_keeps_its_output(lane: int) -> None:
    """The other lane has its own memory; if another engine needs the same memory, the output is copied first."""
    target = new_target(SMALL, torch.bfloat16, "fused-cuda")
    target.set_top(3)
    target.set_taps([1])
    segments = [Segment(target.open(8), tokens, (-1, 0, 0), 3) for tokens in ((5, 6, 7), (50, 60, 70))]
    expected = copied(target.forward(segments[:1]))
    flight = target.launch(segments[:1])
    other = copied(target.launch(segments[1:], lane).wait())
    output = flight.wait()
    assert not torch.equal(other.logits, expected.logits)
    assert expected.taps is not None
    assert output.taps is not None
    assert torch.equal(output.logits.cpu(), expected.logits)
    assert torch.equal(output.taps.float().cpu(), expected.taps)
    assert output.top is not None
    assert expected.top is not None
    assert (output.top.ids == expected.top.ids).all()
    assert output.greedy_ids.tolist() == expected.top.ids[:, 0].tolist()


@runs_kernels
@pytest.mark.parametrize("dtype", ["float16"] if INTERPRETED else HALVES)
@pytest.mark.parametrize("cycles", [2 if INTERPRETED else 1000])
def test_cycles_of_random_trees_do_not_drift(dtype: str, cycles: int) -> None:
    """The cache equals that of a fresh prefill of the same tokens, up to rounding."""
    target = new_target(replace(BASE, num_layers=2), HALVES[dtype])
    rng = random.Random(dtype)
    most_nodes, capacity = (4, 30) if INTERPRETED else (70, 1500)
    texts = {target.open(capacity): [] for _ in range(2)}
    for cycle in range(cycles):
        if cycle == cycles - 1:  # moves that the copy depends on are still pending
            texts[target.fork(next(iter(texts)), capacity)] = list(next(iter(texts.values())))
        for sequence, text in texts.items():
            if len(text) + most_nodes > capacity:
                target.truncate(sequence, 5)
                del text[5:]
        segments = []
        for sequence in texts:
            size = rng.randint(1, most_nodes)
            parents = random_parents(rng, size)
            segments.append(Segment(sequence, ids_of(target, rng, size), parents, rng.choice([0, size])))
        target.forward(segments)
        for segment in segments:
            path = path_to(segment.parents, rng.randrange(len(segment.parents)))
            target.keep(segment.sequence, path)
            texts[segment.sequence] += [segment.token_ids[node] for node in path]
    limit = 20 * torch.finfo(HALVES[dtype]).eps
    for sequence, text in texts.items():
        fresh = prefill(target, text, capacity=len(text) + 1)
        for ours, theirs in zip(committed_rows(target, sequence), committed_rows(target, fresh), strict=True):
            assert ours.shape[2] == len(text)
            for row, right in zip(ours.unbind(2), theirs.unbind(2), strict=True):
                assert error(row, right) < limit
        ours, theirs = (copied(target.forward([Segment(which, [9], [-1], 1)])).logits for which in (sequence, fresh))
        assert error(ours, theirs) < limit
        target.close(fresh)


@on_gpu
def test_more_shapes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted passes are captured again, and the others stay valid."""
    monkeypatch.setattr(cuda_decoder, "MAX_PASSES", 3)
    target = new_target()
    sizes = [1, 8, 64, 300, 2, 16, 128, 1, 64, 300, 8, 1]
    answers_by_size: dict[int, torch.Tensor] = {}
    for size in sizes:
        logits = Question(prompts=(9,), trees=(size,), num_logits=(size,)).ask(target).logits
        assert error(logits, answers_by_size.setdefault(size, logits)) < 1e-2


@on_gpu
def test_garbage_of_another_target_does_not_abort_a_capture() -> None:
    """Its graphs and pinned buffers are in a reference cycle, which Python may collect at any moment."""
    left = gc.get_threshold()
    for size in (1, 8, 16, 64):
        question = Question(prompts=(9,), trees=(size,), num_logits=(size,))
        gone = new_target()
        question.ask(gone)
        gone.itself = gone  # type: ignore[attr-defined]
        target = new_target()
        del gone
        gc.set_threshold(1)
        try:
            first, again = (question.ask(target) for _ in range(2))
        finally:
            gc.set_threshold(*left)
        assert error(again.logits, first.logits) < 1e-2


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    targets = [
        tiny_target(dtype=torch.bfloat16, device=device, backend="fused-cuda") for device in ("cuda:0", "cuda:1")
    ]
    question = Question(prompts=(9,), trees=(12,), num_logits=(12,))
    for _ in range(2):
        first, second = (question.ask(target) for target in targets)
        assert error(second.logits, first.logits) < 1e-2


@pytest.mark.skipif(INTERPRETED, reason="there the decoder does run on a CPU")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(CapabilityError, match="The decoder 'fused-cuda' cannot run") as caught:
        tiny_target(dtype=torch.bfloat16, backend="fused-cuda")
    assert "not a GPU" in str(caught.value)
    assert "auto" in str(caught.value)


def test_reasons_for_unavailability(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if not torch.cuda.is_available():
        assert "Triton cannot build its launchers" in cuda.why_unavailable(SMALL, half, gpu)
        monkeypatch.setattr(cuda, "_why_not_built", lambda: "")
    assert cuda.why_unavailable(SMALL, half, gpu) == ""
    assert "float16" in cuda.why_unavailable(SMALL, torch.float32, gpu)
    for sizes in (
        {"hidden_size": 40},
        {"intermediate_size": 100},
        {"head_dim": 24},
        {"head_dim": 512},
        {"num_heads": 17},
    ):
        assert "16" in cuda.why_unavailable(replace(SMALL, **sizes), half, gpu)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert cuda.why_unavailable(SMALL, half, gpu) == "Triton is not installed"
    assert cuda.why_unavailable(SMALL, half, torch.device("cpu")) == "not a GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "below 8.0" in cuda.why_unavailable(SMALL, half, gpu)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in cuda.why_unavailable(SMALL, half, gpu)


@runs_kernels
def test_decoder_is_chosen_where_it_can_run() -> None:
    assert new_target().info.backend == "fused-cuda"
    if DEVICE.type == "cuda":
        assert new_target(backend="auto").info.backend == "fused-cuda"
