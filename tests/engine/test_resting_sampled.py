"""Sampled requests rest too, unless their drafter draws: then a seed would give another text."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.engine.session import Session
from draftwood.sizing.sizer import Sizer
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.engine.test_resting import RESTING, Calls, run

SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=5)


@pytest.mark.parametrize("name", sorted(RESTING))
@pytest.mark.parametrize("awake_every", [2, 7])
def test_rests_do_not_change_what_a_seed_gives(name: str, awake_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("plain", params=SAMPLED)
    calls = Calls(monkeypatch, RESTING[name], awake_every)
    assert run(name, params=SAMPLED) == expected
    assert 0 < calls.num_proposed < calls.num_cycles


def session_of(name: str, options: dict[str, Any], params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A request of which it was checked whether it goes on with the pause of earlier ones."""
    begin = Sizer.begin
    given = list[bool]()
    monkeypatch.setattr(
        Sizer, "begin", lambda self, *, pausing=True: (given.append(pausing), begin(self, pausing=pausing))[1]
    )
    target = tiny_target()
    engine = Engine(target, ByteTokenizer(), EngineOptions(budget="auto", max_batch=4))
    factory = make_factory(name, options, target, codec=ByteTokenizer())
    engine.submit(GenerationRequest(prompt_ids=(65, 66, 65, 66), params=params, drafter=factory))
    engine.step()
    session = engine._scheduler.running[0]
    assert given == [not session.draws]
    return session


@pytest.mark.parametrize(
    ("name", "options", "draws"),
    [
        ("blend", {}, False),
        ("pld", {}, False),
        ("stand", {}, False),
        ("stand", {"draw": "gumbel"}, True),
        ("stand", {"draw": "chosen"}, False),
        ("sps", {"model": "tiny"}, False),
        ("sps", {"model": "tiny", "draw": True}, True),
    ],
)
def test_only_drawn_trees_keep_clear_of_the_clock(
    name: str, options: dict[str, Any], draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(name, options, SAMPLED, monkeypatch)
    assert session.draws is draws
    assert session.may_rest is not (draws or not (session.drafter.can_rest or session.drafter.can_leave))


def test_greedy_requests_never_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not session_of("stand", {"draw": "gumbel"}, SamplingParams(max_tokens=9), monkeypatch).draws
