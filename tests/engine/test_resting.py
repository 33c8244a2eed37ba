"""Requests whose drafts do not pay decode plainly, and their drafters are told later what they missed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import make_factory
from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.blend import BlendDrafter
from draftwood.drafters.goose import GooseDrafter
from draftwood.drafters.pld import PromptLookupDrafter
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.sam import SuffixDrafter
from draftwood.drafters.sps import SmallModelDrafter
from draftwood.drafters.stand import StandDrafter
from draftwood.engine import Engine, GenerationRequest, drafting
from draftwood.engine.session import Session
from draftwood.engine.ways import TOGETHER, Batch, Measured, Way, Ways
from draftwood.sizing.sizer import Sizer
from draftwood.targets.base import Target
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree

RESTING = {"blend": BlendDrafter, "goose": GooseDrafter, "pld": PromptLookupDrafter, "recycling": RecyclingDrafter}
RESTING |= {"sam": SuffixDrafter, "sps": SmallModelDrafter, "stand": StandDrafter}
PROMPTS = ["abcabcabcabc", "one two one two", "x" * 9, "The cat sat. The cat"]


class Calls:
    """Pauses drafts in some cycles and counts what drafters are called for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafter: type[Drafter], awake_every: int) -> None:
        self.seen: dict[int, list[int]] = {}  # tokens by drafter
        self.num_proposed = self.num_cycles = 0
        own, rng = self, random.Random(awake_every)
        propose, observe, skip = drafter.propose, drafter.observe, drafter.skip

        def counted(self: Any, budget: int) -> Any:
            own.num_proposed += 1
            return propose(self, budget)

        def observed(self: Any, verified: VerifiedTree) -> None:
            own.seen.setdefault(id(self), []).extend(verified.emitted)
            observe(self, verified)

        def skipped(self: Any, token_ids: Sequence[int]) -> None:
            own.seen.setdefault(id(self), []).extend(token_ids)
            skip(self, token_ids)

        def is_pausing(_: Sizer) -> bool:
            own.num_cycles += 1
            return rng.random() * awake_every > 1.0

        monkeypatch.setattr(drafter, "propose", counted)
        monkeypatch.setattr(drafter, "observe", observed)
        monkeypatch.setattr(drafter, "skip", skipped)
        monkeypatch.setattr(drafter, "proposes_alone", True)
        monkeypatch.setattr(drafter, "observes_alone", True)
        monkeypatch.setattr(Sizer, "is_pausing", property(is_pausing))
        monkeypatch.setattr(Ways, "of", lambda *_: TOGETHER)  # whatever it measures here


def run(
    name: str,
    num_tokens: int = 40,
    target: Target | None = None,
    params: SamplingParams | None = None,
    budgets: Sequence[int | None] = (None,) * len(PROMPTS),
) -> list[list[int]]:
    target = target or tiny_target()
    engine = Engine(target, ByteTokenizer(), EngineOptions(budget="auto", max_batch=len(PROMPTS)))
    options = {"model": "tiny"} if name == "sps" else {}
    factory = make_factory(name, options, target, codec=ByteTokenizer())
    params = params or SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    ids = []
    for prompt, budget in zip(PROMPTS, budgets, strict=True):
        token_ids = tuple(ByteTokenizer().encode(prompt))
        ids += engine.submit(GenerationRequest(prompt_ids=token_ids, params=params, drafter=factory, budget=budget))
    tokens: dict[int, list[int]] = {request: [] for request in ids}
    for event in engine.events(ids):
        tokens[event.request_id] += event.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("name", RESTING)
@pytest.mark.parametrize("awake_every", [3, 7])
def test_drafters_see_every_token_in_order(name: str, awake_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("plain")
    calls = Calls(monkeypatch, RESTING[name], awake_every)
    assert run(name) == plain
    assert 0 < calls.num_proposed < 0.6 * calls.num_cycles
    seen = sorted(calls.seen.values())
    assert all(any(text[: len(tokens)] == tokens for text in plain) for tokens in seen)
    assert sum(map(len, seen)) > 0.5 * sum(map(len, plain))


@pytest.mark.parametrize("name", ["pld", "sam"])
def test_a_rest_leaves_no_trace_in_copied_guesses(name: str) -> None:
    """Two drafters of the same text, one of which missed a part of it, propose the same tree."""

    text = ByteTokenizer().encode("the old man and the sea and the old man and the")
    factory = make_factory(name, {}, tiny_target().info)
    request = DraftRequest(text[:20], SamplingParams(), np.random.default_rng(0))
    drafters = [factory.new(0, None), factory.new(1, None)]
    for drafter in drafters:
        drafter.begin(request)
    for before, token in itertools.pairwise(text[19:]):
        tree = DraftTree.root_only(before)
        drafters[0].observe(VerifiedTree(tree, torch.zeros(0, 256), [token], [0], [token], None))
    drafters[1].skip(text[20:])
    first, second = (drafter.propose(12) for drafter in drafters)
    assert len(first) > 1
    assert (list(first.tokens), list(first.parents)) == (list(second.tokens), list(second.parents))


def test_a_drafter_that_changes_observe_alone_is_never_left_out() -> None:
    class Own(GooseDrafter):
        def observe(self, verified: VerifiedTree) -> None:
            super().observe(verified)

    assert GooseDrafter.can_rest
    assert not Own.can_rest


class TestLeaving:
    """Drafters that cannot skip tokens, as heads, are left out for the rest of a request."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
        calls: list[tuple[str, int]] = []

        def note(method: str) -> Any:
            original = getattr(GooseDrafter, method)

            def noted(self: Any, *args: Any) -> Any:
                calls.append((method, id(self)))
                return original(self, *args)

            return noted

        monkeypatch.setattr(GooseDrafter, "can_rest", False)
        monkeypatch.setattr(GooseDrafter, "can_leave", True)
        monkeypatch.setattr(GooseDrafter, "wants_taps", (1,))
        monkeypatch.setattr(GooseDrafter, "proposes_alone", True)
        monkeypatch.setattr(GooseDrafter, "observes_alone", True)
        for method in ("begin", "propose", "observe", "read_prompt", "end"):
            monkeypatch.setattr(GooseDrafter, method, note(method))
        return calls

    def test_is_not_called_again(self, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
        plain = run("plain")
        cycles = itertools.count()
        monkeypatch.setattr(Ways, "of", lambda *_: Way(next(cycles) not in range(12, 16), turns=False))
        monkeypatch.setattr(Ways, "is_trial", lambda *_: False)
        target = tiny_target()
        tapped = list[int]()
        set_taps = target.set_taps
        monkeypatch.setattr(target, "set_taps", lambda layers: (tapped.append(len(layers)), set_taps(layers)))
        assert run("goose", target=target) == plain
        first_end = next(at for at, (method, _) in enumerate(calls) if method == "end")
        assert {method for method, _ in calls[first_end:]} == {"end"}
        assert sum(method == "propose" for method, _ in calls) > len(PROMPTS)
        assert tapped[0] == 1
        assert tapped[-1] == 0

    def test_stays_if_drafts_are_left_out_for_a_trial(
        self, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It reads what is emitted meanwhile, and proposes again afterwards."""
        plain = run("plain")
        cycles = itertools.count()
        monkeypatch.setattr(Ways, "of", lambda *_: Way(next(cycles) not in range(12, 16), turns=False))
        monkeypatch.setattr(Ways, "is_trial", lambda *_: True)
        assert run("goose") == plain
        for own in {number for _, number in calls}:
            methods = [method for method, number in calls if number == own]
            assert methods.count("propose") == methods.count("observe") > 20  # it did not leave after 12 cycles
            assert methods.index("end") == len(methods) - 1

    def test_from_the_first_token(self, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Ways, "of", lambda *_: Way(drafts=False, turns=False))
        monkeypatch.setattr(Ways, "is_trial", lambda *_: False)
        assert run("goose") == run("plain")
        assert not calls  # not even its prompt was shown to it

    def test_passes_without_drafts_are_no_measure_of_drafts(
        self, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted = list[bool]()
        cycles = itertools.count()
        monkeypatch.setattr(Ways, "of", lambda *_: Way(next(cycles) > 20, turns=False))
        monkeypatch.setattr(Ways, "is_trial", lambda *_: False)
        monkeypatch.setattr(Ways, "note", lambda *_, counts: counted.append(counts))
        run("goose")
        assert any(counted)
        assert not counted[-1]

    @pytest.mark.parametrize("num_fixed", [0, 3])
    def test_only_the_time_of_those_who_wait_does_not_count(
        self, calls: list[tuple[str, int]], num_fixed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Requests with budgets of their own draft in any case, which takes time in any case."""
        cycles, draft_one = itertools.count(), drafting._draft_one
        measured = dict[bool, list[Measured]]()

        def drafted(session: Session) -> None:
            draft_one(session)
            session.draft_seconds = 1000.0 if session.may_rest else 1.0

        def noted(_: Ways, __: Batch, way: Way, passed: Measured, *, counts: bool) -> None:
            measured.setdefault(way.drafts, []).append(passed)

        monkeypatch.setattr(drafting, "_draft_one", drafted)
        monkeypatch.setattr(Ways, "of", lambda *_: Way(next(cycles) not in range(6, 12), turns=False))
        monkeypatch.setattr(Ways, "is_trial", lambda *_: True)
        monkeypatch.setattr(Ways, "note", noted)
        num_free = len(PROMPTS) - num_fixed
        run("goose", budgets=[6] * num_fixed + [None] * num_free)
        assert {each.waiting for each in measured[True]} == {0.0}
        assert any(each.has_guesses for each in measured[True])
        assert any(each.has_guesses for each in measured[False]) == (num_fixed > 0)
        assert all(1000 * num_free <= each.waiting < 1000 * num_free + 1 for each in measured[False])
