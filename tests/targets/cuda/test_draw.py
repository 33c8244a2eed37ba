"""Tokens that the GPU kernels draw: on a GPU if there is one, otherwise in Triton's interpreter.

What is right: ``tests/tools/draws.py``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.sampling import Warper
from draftwood.targets.base import Draw, ForwardOutput, Segment, chain_parents
from draftwood.targets.native.target import NativeTarget
from tests.conftest import prefill, random_parents
from tests.tools.cuda import new_target
from tests.tools.draws import (
    NUMBERS,
    RULES,
    ambiguous,
    check,
    check_random_rule,
    check_rows_alone,
    check_shares,
    check_ties,
    check_unusable,
)
from tests.tools.top import ROWS
from tests.tools.triton import DEVICE, INTERPRETED, on_gpu, resources, run_interpreted, runs_kernels

pytest.importorskip("triton")

from draftwood.targets.native.cuda.kernels import DrawScratch, launch_draws, top
from draftwood.targets.native.cuda.kernels import draw as kernels
from draftwood.targets.native.decoder import DRAW_FIELDS


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def draw(
    logits: torch.Tensor, rules: Sequence[SamplingParams], numbers: Sequence[float], rows: Sequence[int] | None = None
) -> list[int]:
    """The tokens that the kernels draw after rows of ``logits [n, V]``: after each, or after the given ones."""
    logits, used = logits.to(DEVICE), range(len(logits)) if rows is None else rows
    (num_rows, vocab_size), num_best = logits.shape, min(3, logits.shape[1])
    words = top.new_words(num_rows, num_best, DEVICE)
    peaks = top.new_scratch(num_rows, vocab_size, DEVICE)
    top.launch_top_rows(logits, num_best, words, peaks)
    fields = [(row, Warper(rule, ()).rule, number) for row, rule, number in zip(used, rules, numbers, strict=True)]
    draws = torch.tensor([(row, *rule, number) for row, rule, number in fields], dtype=torch.float64, device=DEVICE)
    assert draws.shape == (len(used), DRAW_FIELDS)
    tokens = torch.full((len(used) + 1,), -7, dtype=torch.int32, device=DEVICE)
    launch_draws(logits, words, peaks, draws, DrawScratch.new(len(used), vocab_size, DEVICE), tokens[:-1])
    assert int(tokens[-1]) == -7
    return tokens[:-1].tolist()


@runs_kernels
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [kind for kind in ROWS if not kind.startswith("huge")])
def test_draws_from_the_distribution_of_the_rule(kind: str, rule: str) -> None:
    logits = ROWS[kind]
    if INTERPRETED and rule not in ("warm", "all of them") and kind not in ("tied", "-inf"):
        pytest.skip("takes long in the interpreter")
    if kind == "-inf":
        logits = logits[1:]  # nothing can be drawn from the first row
    params = SamplingParams(**RULES[rule])
    numbers = [NUMBERS[row % len(NUMBERS)] for row in range(len(logits))]
    check(logits, params, numbers, draw(logits, [params] * len(logits), numbers))


def test_kernels_fit() -> None:
    """Compiled for a Hopper and an Ampere GPU: no spills."""
    if INTERPRETED:
        pytest.skip("nothing is compiled")
    rows = {"logits": "*fp32", "words": "*i32", "draws": "*fp64", "sums": "*i64"}
    sizes = dict.fromkeys(("row_stride", "word_stride", "num_best", "vocab_size", "num_blocks"), "i32")
    more = {"peaks": "*fp32", "candidates": "*i32", "tokens": "*i32"}
    for capability in (80, 90):
        common = {"capability": capability, "num_stages": 3}
        constants = {"NUM_FIELDS": DRAW_FIELDS, "BLOCK": 128, "BLOCKS": 16}
        weigh = resources(kernels._weigh, rows | sizes, constants, num_warps=4, **common)
        constants = {"NUM_FIELDS": DRAW_FIELDS, "BLOCK": 128, "BLOCKS_PAD": 2048, "CHUNK": 16, "SPLITS": kernels.SPLITS}
        draw = resources(kernels._draw, rows | more | sizes, constants, num_warps=kernels.WARPS, **common)
        assert weigh.stack == draw.stack == 0


@on_gpu
def test_a_huge_vocabulary() -> None:
    logits = ROWS["huge vocabulary"]
    for rule in RULES.values():
        check(logits, SamplingParams(**rule), NUMBERS[1:3], draw(logits, [SamplingParams(**rule)] * 2, NUMBERS[1:3]))


@runs_kernels
@settings(max_examples=20 if INTERPRETED else 200, deadline=None)
@given(st.data())
def test_random_rules(data: st.DataObject) -> None:
    check_random_rule(data, draw)


@runs_kernels
def test_every_token_gets_its_share() -> None:
    """Numbers at equal distances draw each token as often as it is likely."""
    rules = ("warm", "all of them") if INTERPRETED else tuple(RULES)
    check_shares(draw, rules, count=40 if INTERPRETED else 400)


@runs_kernels
def test_draws_depend_on_their_row_alone() -> None:
    logits, rules, numbers, together = check_rows_alone(draw)
    wide = torch.full((6, 3000), float("nan"))
    wide[:, :2500] = logits
    assert draw(wide[:, :2500], rules, numbers) == together  # rows that are further apart


@runs_kernels
def test_equal_logits_are_kept_in_the_order_of_ids() -> None:
    check_ties(draw)


@runs_kernels
def test_rows_that_cannot_be_drawn_from() -> None:
    check_unusable(draw)


class Trees:
    """Trees of several sequences, of which some are drawn after; the others, and a prompt, share their passes."""

    def __init__(self, target: NativeTarget, sizes: Sequence[int], seed: int) -> None:
        rng = random.Random(seed)
        self.sizes, self.rules, self.numbers = sizes, list[SamplingParams](), list[list[float]]()
        self.segments = list[Segment]()
        for index, size in enumerate(sizes):
            sequence = prefill(target, rng.choices(range(target.info.vocab_size), k=3 + index), size + 8)
            self.rules.append(SamplingParams(**rng.choice(list(RULES.values()))))
            self.numbers.append([rng.random() for _ in range(size)])
            tokens = rng.choices(range(target.info.vocab_size), k=size)
            self.segments.append(Segment(sequence, tokens, random_parents(rng, size), size, draw=self.draw_of(index)))
        self.prompt = Segment(target.open(8), [1, 2, 3], chain_parents(3), 0)

    def draw_of(self, index: int) -> Draw | None:
        """None for every third tree."""
        rule = Warper(self.rules[index], ()).rule
        return None if index % 3 == 1 else Draw(rule, lambda: self.numbers[index])

    def check(self, output: ForwardOutput, order: Sequence[int]) -> dict[int, list[int]]:
        """Compares what was drawn after the trees in this order with the logits; returns it by tree."""
        assert output.drawn is not None
        found, first = dict[int, list[int]](), 0
        for index in order:
            rows, first = slice(first, first + self.sizes[index]), first + self.sizes[index]
            if index % 3 != 1:
                found[index] = output.drawn[rows].tolist()
                logits = output.logits[rows].float().cpu()
                if not ambiguous(logits, self.rules[index]):
                    check(logits, self.rules[index], self.numbers[index], found[index])
        return found


@runs_kernels
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (3, 4, 2), (1, 1, 1, 1), (10, 5, 2) if INTERPRETED else (90, 25, 20, 3)])
def test_passes_draw(sizes: tuple[int, ...], exact: bool) -> None:
    """Alone, together, beside a prompt, in another order, in another lane; exact passes always draw the same."""
    target = new_target(exact=exact)
    trees = Trees(target, sizes, seed=len(sizes))
    together, drawn = range(len(sizes)), list[dict[int, list[int]]]()
    for order in (together, together, together[::-1], [0]):
        segments = [trees.segments[index] for index in order]
        drawn.append(trees.check(target.forward(segments), order))
    beside = target.forward([trees.prompt, *trees.segments])
    drawn.append(trees.check(beside, together))
    first = target.launch([trees.segments[0]], 0)
    others = target.launch(trees.segments[1:], 1) if len(sizes) > 1 else None
    if others is not None:
        drawn.append(trees.check(others.wait(), together[1:]))
    drawn.append(trees.check(first.wait(), [0]))
    if exact:
        assert all(found[index] == drawn[0][index] for found in drawn for index in found)


@runs_kernels
def test_unread_draws_are_kept_when_the_lane_goes_on() -> None:
    target = new_target()
    trees = Trees(target, (5, 2, 3), seed=2)
    pending = target.launch([trees.segments[0]], 0)
    trees.check(target.launch([trees.segments[2]], 0).wait(), [2])
    trees.check(pending.wait(), [0])
    assert target.forward([trees.segments[1]]).drawn is None  # nothing was asked for


@runs_kernels
def test_an_error_while_drawing_leaves_the_target_usable() -> None:
    target = new_target()
    trees = Trees(target, (5, 2, 3), seed=2)
    draw = trees.segments[0].draw
    assert draw is not None
    with pytest.raises(ValueError):
        target.launch([trees.segments[0]._replace(draw=draw._replace(numbers=lambda: draw.numbers()[:-1]))], 0)
    trees.check(target.forward([trees.segments[2]]), [2])
    trees.check(target.forward([trees.segments[0]]), [0])
