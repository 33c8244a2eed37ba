"""Trees that grow over several passes in the decoder for GPUs: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood.models.config import ModelConfig
from draftwood.targets.base import Segment
from draftwood.targets.native.cuda.attention.plan import count_bits, words_per_row
from draftwood.targets.native.decoder import PackedBatch, PackedSegment
from tests.conftest import prefill
from tests.tools.cuda import BASE, error, new_target
from tests.tools.growing import Growth, Step, check_growth, passes_of, random_growth
from tests.tools.triton import INTERPRETED, on_gpu, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda import decoder as cuda_decoder

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {"num_heads": 3 * BASE.num_kv_heads, "head_dim": 96, "qk_norm": True, "sliding_window": 6},
    "plain": {},
    "wide window": {"sliding_window": 37},
    "head 256": {"head_dim": 256},
    "group of 7": {"num_heads": 7 * BASE.num_kv_heads},
}
# The interpreter is slow.
CASES = [("everything", "float16")] if INTERPRETED else [(variant, dtype) for variant in VARIANTS for dtype in HALVES]


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def check(config: ModelConfig, dtype: torch.dtype, rng: random.Random, many: Sequence[Sequence[Growth]]) -> None:
    """Compare with the eager decoder in float32, up to rounding."""
    target, exact = new_target(config, dtype), new_target(config, dtype, "eager", wide=True)
    limit = 20 * torch.finfo(dtype).eps

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.shape == theirs.shape
        for row, right in zip(ours, theirs, strict=True):
            assert error(row, right) < limit

    for growths in many:
        check_growth(target, exact, rng, growths, compare)


@runs_kernels
@pytest.mark.parametrize(("variant", "dtype"), CASES)
def test_nodes_match_a_single_pass(variant: str, dtype: str) -> None:
    """Passes mix new trees and growing trees."""
    config, rng = replace(BASE, **VARIANTS[variant]), random.Random(variant)
    count, most_prompt, most_nodes = (2, 5, 5) if INTERPRETED else (4, 300, 60)
    many: list[list[Growth]] = []
    while len(many) < (1 if INTERPRETED else 10):
        growths = [random_growth(rng, config.vocab_size, most_prompt, most_nodes) for _ in range(count)]
        if any(kinds == {False, True} for kinds in passes_of(growths)):
            many.append(growths)
    check(config, HALVES[dtype], rng, many)


@runs_kernels
def test_a_forest_below_the_text() -> None:
    """As in draft models: levels whose first nodes follow the last token of the text; then some are kept."""
    config, prompt = BASE, [7, 11, 13, 17, 19]
    levels = [([3, 4, 5], [-1, -1, -1]), ([6, 8], [0, 2]), ([9, 3], [3, -1])]  # tokens, parents
    answers = []
    for target in (new_target(config, torch.bfloat16), new_target(config, torch.bfloat16, "eager", wide=True)):
        sequence = prefill(target, prompt, 40)
        after, logits = 0, []
        for tokens, parents in levels:
            logits.append(target.forward([Segment(sequence, tokens, parents, len(tokens), after)]).logits.cpu().clone())
            after += len(tokens)
        target.keep(sequence, [2, 4])
        logits.append(target.forward([Segment(sequence, [5, 6], [-1, -1], 2)]).logits.cpu().clone())
        answers.append(torch.cat(logits))
    for ours, theirs in zip(*answers, strict=True):
        assert error(ours, theirs) < 20 * torch.finfo(torch.bfloat16).eps


@on_gpu
@pytest.mark.parametrize("window", [None, 37])
def test_more_nodes_than_the_minimum_number_of_words_has_bits(window: int | None) -> None:
    """Ten more in every pass, up to 300."""
    config, rng = replace(BASE, sliding_window=window), random.Random(1)
    prompt, tokens = (rng.choices(range(config.vocab_size), k=count) for count in (40, 300))
    parents = [-1, *(rng.randrange(max(0, node - 20), node) for node in range(1, 300))]
    ends = [1, *range(10, 301, 10)]
    steps: list[Step | None] = [
        Step(after, tokens[after:end], parents[after:end], False) for after, end in zip([0, *ends], ends, strict=False)
    ]
    check(config, torch.bfloat16, rng, [[Growth(prompt, tokens, parents, steps)]])


def test_shapes_hold_the_ancestor_words_of_grown_trees() -> None:
    """Rows are the new nodes, as long as the usual words have a bit for every node of the tree."""
    for before, size, num_rows in ((0, 10, 16), (100, 10, 16), (128, 10, 16), (129, 10, 192), (400, 1, 512)):
        parents = [-1, *[0] * (before + size - 1)]
        segments = [PackedSegment(0, 0, 7, parents, size, before), PackedSegment(size, 900, 7, [-1], 1)]
        shape = cuda_decoder._choose_shape(PackedBatch.of([1] * (size + 1), segments), size + 1, 1, ())
        assert shape.num_rows == num_rows
        assert 32 * words_per_row(shape.num_rows) >= count_bits(segments[0])
