"""Accuracy and calibration after a head's guesses, against a reference with one text, position and guess at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.heads import HeadModule
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.build import make_head_model
from draftwood.targets.base import Segment, Target, chain_parents
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.train.base import Batch, Example
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.losses import evaluator
from draftwood.train.measure import calibration
from draftwood.train.measure.calibration import RANKS, choose_roots, measure_ranks
from tests.conftest import logits_after
from tests.tools.head import random_head
from tests.tools.neural import (
    _one_thread,  # noqa: F401 - fixtures
    clock_target,
    clock_text,
    perfect_head,
)
from tests.tools.train import MODEL

FEW = replace(MODEL, vocab_size=12, eos_token_ids=())  # with so few tokens a random head guesses some correctly
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"draft_vocab_size": 9},
    "eagle3 of few tokens": {"draft_vocab_size": 3},
    "medusa": {},
    "medusa of one depth": {"num_heads_ahead": 1},
    "hydra": {},
    "hydra with a layer": {"prefix": True},
}
every_head = pytest.mark.parametrize("name", HEADS)


def few_head(name: str) -> HeadModule:
    return random_head(name.split()[0], FEW, **HEADS[name])


@cache
def few_target(backend: str) -> NativeTarget:
    """Of these two, the eager one exposes its layers."""
    return tiny_target(FEW, backend=backend)


def text(size: int, answered: Sequence[int], seed: int = 0) -> Example:
    tokens = np.random.default_rng([size, seed]).integers(0, FEW.vocab_size, size).astype(np.int32)
    return Example(tokens, np.isin(np.arange(size), answered))


TEXTS = [
    text(23, range(4, 23)),
    text(9, range(1, 9)),  # after a prompt of one token
    text(1, []),
    text(31, [*range(5, 9), *range(20, 24)]),  # two answers
    text(12, []),
    text(2, [1]),  # a head has read nothing at the position of its guess
    text(17, [16]),  # one position
    text(14, range(14)),
    text(23, range(10, 23), seed=1),
]


# -- the slow reference ----------------------------------------------------------------------------------------------


class Guess(NamedTuple):
    right: bool
    confidence: float
    target_prob: float


def by_hand(head: HeadModule, target: Target, texts: Sequence[Example], positions: int) -> dict[str, Any]:
    first: list[Guess] = []
    below: list[list[Guess]] = [[] for _ in range(RANKS)]
    for example in texts:
        ids = example.token_ids.tolist()
        places = [place for place in range(1, len(ids) - 1) if example.answered[place + 1]]
        wanted = np.linspace(0, len(places) - 1, positions).round().astype(int).tolist() if places else []
        taps = FrozenTarget.of(target, head).signals(Batch.of([example])).taps[0]
        for root in sorted({places[index] for index in wanted}):
            look(head, target, ids[: root + 1], taps[:root], first, below)
    if head.config.num_heads_ahead == 1:
        below = []
    ranks = [{"rank": rank, **summary(own)} for rank, own in enumerate(below, start=1) if own]
    return {"accuracy": summary(first)["accuracy"] if first else 0.0, "ranks": ranks}


def look(
    head: HeadModule, target: Target, ids: list[int], taps: torch.Tensor, first: list[Guess], below: list[list[Guess]]
) -> None:
    """After the last token, with an empty cache. ``taps`` are those of the tokens before it."""
    model = make_head_model(head, target.info.num_layers, len(ids) + 1)
    size = head.config.draft_vocab_size
    sequence = model.open(len(ids) + 1)
    assert sequence is not None
    top = model.forward([DraftSegment(Segment(sequence, ids[1:], chain_parents(len(taps)), 1), taps)], size)
    model.keep(sequence, range(len(taps)))
    first.append(guess(top, int(logits_after(target, ids)[-1].argmax())))
    for rank, child in enumerate(top.ids[0, :RANKS].tolist()):
        deeper = model.forward([DraftSegment(Segment(sequence, [child], [-1], 1))], size)
        below[rank].append(guess(deeper, int(logits_after(target, [*ids, child])[-1].argmax())))


def guess(top: Any, choice: int) -> Guess:
    probs = dict(zip(top.ids[0].tolist(), top.probs()[0].tolist(), strict=True))
    best = int(top.ids[0, 0])
    return Guess(best == choice, probs[best], probs.get(choice, 0.0))


def summary(guesses: Sequence[Guess]) -> dict[str, Any]:
    right = [each.right for each in guesses]
    return {
        "accuracy": sum(right) / len(right),
        "ece": calibration_error([each.confidence for each in guesses], right),
        "ece_target": calibration_error([each.target_prob for each in guesses], right),
        "count": len(right),
    }


def calibration_error(sure: Sequence[float], right: Sequence[bool]) -> float:
    error = 0.0
    for number in range(15):
        own = [index for index, each in enumerate(sure) if min(int(each * 15), 14) == number]
        error += abs(sum(right[index] - sure[index] for index in own)) / len(sure)
    return error


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["accuracy"] == wanted["accuracy"]
    assert len(found["ranks"]) == len(wanted["ranks"])
    for own, other in zip(found["ranks"], wanted["ranks"], strict=True):
        assert own == pytest.approx(other, abs=1e-5)
        assert (own["rank"], own["count"], own["accuracy"]) == (other["rank"], other["count"], other["accuracy"])


# -- comparison ------------------------------------------------------------------------------------------------------


@every_head
def test_matches_slow_reference(name: str) -> None:
    head = few_head(name)
    wanted = by_hand(head, few_target("auto"), TEXTS, positions=5)
    num_ranks = {"eagle3 of few tokens": 3, "medusa of one depth": 0}.get(name, RANKS)
    assert [each["count"] for each in wanted["ranks"]] == [5 * 5 + 1] * num_ranks
    for backend in ("eager", "auto"):
        assert_same(measure_ranks(head, few_target(backend), TEXTS, positions=5), wanted)


@pytest.mark.parametrize(("kind", "noise"), [("eagle", 0.2), ("eagle3", 0.05), ("medusa", 0.3), ("hydra", 0.2)])
def test_matches_slow_reference_for_accurate_head(kind: str, noise: float) -> None:
    head = perfect_head(kind, noise, tokens=range(16) if kind == "eagle3" else None)
    texts = [Example(np.array(clock_text(start, 20), dtype=np.int32), np.arange(20) >= 4) for start in range(2)]
    found = measure_ranks(head, clock_target(backend="eager"), texts, positions=6)
    assert_same(found, by_hand(head, clock_target(), texts, positions=6))
    assert 0.3 < found["accuracy"] < 1.0
    assert any(0.3 < each["accuracy"] < 1.0 for each in found["ranks"])


@every_head
def test_batching_does_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = few_target("eager"), few_head(name)
    wanted = measure_ranks(head, target, TEXTS, positions=4)
    monkeypatch.setattr(calibration, "MAX_ROWS", 60)  # two texts at most
    monkeypatch.setattr(evaluator, "MAX_LOGITS_ON_CPU", 40)  # a few rows
    assert_same(measure_ranks(head, target, TEXTS, positions=4), wanted)


def test_more_positions_than_available() -> None:
    target, head = few_target("eager"), few_head("eagle3")
    found = measure_ranks(head, target, TEXTS, positions=100)
    assert [each["count"] for each in found["ranks"]] == [19 + 7 + 8 + 1 + 12 + 13] * RANKS


@pytest.mark.parametrize("texts", [[], [TEXTS[2], TEXTS[4], TEXTS[5]]])
def test_no_positions_give_empty_result(texts: list[Example]) -> None:
    assert measure_ranks(few_head("eagle"), few_target("eager"), texts, 3) == {"accuracy": 0.0, "ranks": []}


def test_gradients_are_not_modified() -> None:
    head = few_head("eagle3").requires_grad_()
    measure_ranks(head, few_target("eager"), TEXTS[:1], 2)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in head.parameters())


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 12))
def test_positions_are_spread_over_target_output(answered: list[bool], positions: int) -> None:
    roots = choose_roots(Example(np.zeros(len(answered), dtype=np.int32), np.array(answered)), positions)
    places = [place for place in range(1, len(answered) - 1) if answered[place + 1]]
    assert roots == sorted(set(roots))
    assert set(roots) <= set(places)
    assert len(roots) == min(positions, len(places))
    if places:
        assert roots[0] == places[0]
    if positions > 1 and places:
        assert roots[-1] == places[-1]
