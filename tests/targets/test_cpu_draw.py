"""Tokens that the CPU kernel draws. What is right: ``tests/tools/draws.py``."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.sampling import Warper, draw_tokens
from draftwood.targets import Draw, Segment, chain_parents
from draftwood.targets.native.cpu import CpuDecoder, load_kernel
from draftwood.targets.tiny import tiny_target
from tests.conftest import prefill
from tests.tools.draws import (
    NUMBERS,
    RULES,
    check,
    check_random_rule,
    check_rows_alone,
    check_shares,
    check_ties,
    check_unusable,
)
from tests.tools.top import ROWS, random_rows

pytestmark = pytest.mark.skipif(not CpuDecoder.is_available(), reason="no C compiler")


def draw(
    logits: torch.Tensor, rules: Sequence[SamplingParams], numbers: Sequence[float], rows: Sequence[int] | None = None
) -> list[int]:
    logits, used = logits.contiguous(), range(len(logits)) if rows is None else rows
    fields = [(row, *Warper(rule, ()).rule, number) for row, rule, number in zip(used, rules, numbers, strict=True)]
    draws, tokens = np.array(fields, np.float64), np.full(len(fields) + 1, -7, np.int32)
    kernel = load_kernel()
    assert kernel is not None
    places = [ctypes.c_void_p(address) for address in (logits.data_ptr(), draws.ctypes.data, tokens.ctypes.data)]
    size, count = ctypes.c_int64(logits.shape[1]), ctypes.c_int64(len(fields))
    assert kernel.draftwood_draw(places[0], size, places[1], count, places[2]) == 0
    assert tokens[-1] == -7
    return [int(token) for token in tokens[:-1]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ROWS)
def test_draws_from_the_distribution_of_the_rule(kind: str, rule: str) -> None:
    logits = ROWS[kind][1:] if kind == "-inf" else ROWS[kind]  # nothing can be drawn from its first row
    params = SamplingParams(**RULES[rule])
    numbers = [NUMBERS[row % len(NUMBERS)] for row in range(len(logits))]
    check(logits, params, numbers, draw(logits, [params] * len(logits), numbers))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_rules(data: st.DataObject) -> None:
    check_random_rule(data, draw)


def test_every_token_gets_its_share() -> None:
    check_shares(draw, tuple(RULES), count=400)


def test_equal_logits_are_kept_in_the_order_of_ids() -> None:
    check_ties(draw)


def test_draws_depend_on_their_row_alone() -> None:
    check_rows_alone(draw)


def test_rows_that_cannot_be_drawn_from() -> None:
    check_unusable(draw)


@pytest.mark.parametrize("rule", RULES)
def test_a_tiny_temperature_gives_the_greedy_choice(rule: str) -> None:
    logits = random_rows(4, 1500)
    params = SamplingParams(**(RULES[rule] | {"temperature": 1e-30}))
    assert draw(logits, [params] * 4, NUMBERS[:4]) == logits.argmax(dim=-1).tolist()


def test_passes_draw_along_the_path_through_a_tree() -> None:
    """Beside a prompt that wants nothing and a tree that does not ask."""
    target, rng = tiny_target(), random.Random(5)
    params = SamplingParams(temperature=1.5, top_k=40)
    sequences = [prefill(target, [65, 66, 67]) for _ in range(3)]
    numbers = [[rng.random() for _ in range(7)] for _ in sequences]
    root = Segment(sequences[0], [68], [-1], 1)
    logits = target.forward([root]).logits
    likely = draw_tokens(Warper(params, ()).probs(logits), numbers[0][:1])[0]
    tree = [68, 70, likely, 71, 72, likely, 73], [-1, 0, 0, 1, 2, 4, 2]
    drawing = Draw(Warper(params, ()).rule, lambda: numbers[0])
    segments = [
        Segment(target.open(16), [65, 66], chain_parents(2), 0),
        Segment(sequences[1], *tree, 7),
        Segment(sequences[0], *tree, 7, draw=drawing),
        Segment(sequences[2], [68], [-1], 1, draw=Draw(drawing.rule, lambda: numbers[2][:1])),
    ]
    output = target.forward(segments)
    assert output.drawn is not None
    expected = draw_tokens(Warper(params, ()).probs(output.logits[7:14]), numbers[0])
    node, reached = 0, [0]
    while child := next((c for c in range(1, 7) if tree[1][c] == node and tree[0][c] == expected[node]), 0):
        node = child
        reached.append(node)
    assert len(reached) > 1
    assert [int(output.drawn[7 + node]) for node in reached] == [expected[node] for node in reached]
    assert int(output.drawn[14]) == draw_tokens(Warper(params, ()).probs(output.logits[14:]), numbers[2][:1])[0]
    assert target.forward([root]).drawn is None
