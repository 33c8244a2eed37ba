"""Room in the cache: answers take it as they grow, requests are suspended and go on, common prompts are read once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import SamplingParams
from draftwood.config import EngineOptions
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest, prefix, scheduler
from draftwood.engine.ways import Way, Ways
from draftwood.errors import CapabilityError
from draftwood.targets.slots import SlotPool
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.engine import CHOOSING, PROMPTS

SYSTEM = "You are a careful assistant who answers in short sentences and never makes things up. " * 2
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def open_engine(num_slots: int, max_batch: int = 8, **options: Any) -> Engine:
    target = tiny_target(cache_tokens=num_slots)
    return Engine(target, ByteTokenizer(), EngineOptions(budget=6, max_batch=max_batch, **options))


def submit(engine: Engine, prompt: str, params: SamplingParams = LONG, drafter: str = "plain", **more: Any) -> int:
    factory = make_factory(drafter, {}, engine.target.info)
    ids = tuple(ByteTokenizer().encode(prompt))
    return engine.submit(GenerationRequest(prompt_ids=ids, params=params, drafter=factory, **more))[0]


def outputs(engine: Engine, requests: list[int]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    for event in engine.events(requests):
        tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def alone(prompt: str, params: SamplingParams = LONG, drafter: str = "plain") -> list[int]:
    engine = open_engine(2048)
    return outputs(engine, [submit(engine, prompt, params, drafter)])[0]


@pytest.fixture
def small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_GROWTH", 8)


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests that were suspended, in order."""
    found: list[int] = []
    real = scheduler.Scheduler._suspend

    def suspend(self: scheduler.Scheduler, session: Any) -> None:
        found.append(session.sample.request_id)
        real(self, session)

    monkeypatch.setattr(scheduler.Scheduler, "_suspend", suspend)
    return found


# The pool


@given(steps=st.lists(st.tuples(st.sampled_from(["take", "give", "resize"]), st.integers(1, 20), st.integers(0, 9))))
def test_extents_never_overlap(steps: list[tuple[str, int, int]]) -> None:
    pool, held = SlotPool(40), dict[int, int]()
    for what, size, which in steps:
        if what == "take":
            if size <= pool.largest():
                base = pool.take(size)
                held[base] = size
        elif held:
            base = sorted(held)[which % len(held)]
            old = held.pop(base)
            if what == "give":
                pool.give(base, old)
            else:
                moved = pool.resize(base, old, size)
                if moved is None:
                    assert size > old  # to shrink is always possible
                    held[base] = old
                else:
                    kept = min(old, size)
                    assert moved <= base or moved >= base + kept  # rows move down, or to a place of their own
                    held[moved] = size
        taken = sorted(slot for base, size in held.items() for slot in range(base, base + size))
        assert len(set(taken)) == len(taken)
        free = [slot for base, size in pool._free for slot in range(base, base + size)]
        assert sorted([*taken, *free]) == list(range(40))


# Growing and suspending


@pytest.mark.usefixtures("small_growth")
@pytest.mark.parametrize("drafter", CHOOSING)
def test_suspended_requests_go_on_with_the_same_output(drafter: str, suspended: list[int]) -> None:
    engine = open_engine(260, prefill_chunk=16)
    requests = [submit(engine, prompt, drafter=drafter) for prompt in PROMPTS]
    assert outputs(engine, requests) == [alone(prompt) for prompt in PROMPTS]
    assert suspended
    assert requests[0] not in suspended  # the first one always goes on
    engine.clear()
    assert engine.target.can_open(260)


@pytest.mark.usefixtures("small_growth")
@pytest.mark.parametrize("drafter", ["goose", "pld", "blend"])
def test_requests_that_rested_go_on_after_a_suspension(
    drafter: str, suspended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters are told what they missed, although the text was read again meanwhile."""
    rng = random.Random(1)
    monkeypatch.setattr(Ways, "of", lambda *_: Way(drafts=rng.random() < 0.5, turns=False))
    engine = Engine(tiny_target(cache_tokens=300), ByteTokenizer(), EngineOptions(budget="auto", max_batch=8))
    requests = [submit(engine, prompt, drafter=drafter) for prompt in PROMPTS]
    assert outputs(engine, requests) == [alone(prompt) for prompt in PROMPTS]
    assert suspended


@pytest.mark.usefixtures("small_growth")
def test_a_seed_gives_the_same_text_after_a_suspension(suspended: list[int]) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=1.0, seed=5)
    engine = open_engine(240)
    requests = [submit(engine, prompt, params, "goose") for prompt in PROMPTS]
    assert outputs(engine, requests) == [alone(prompt, params, "goose") for prompt in PROMPTS]
    assert suspended


def test_answers_do_not_reserve_what_they_may_never_use() -> None:
    """32 requests that may fill the context run together in a cache of a few contexts."""
    engine = open_engine(32 * 330, max_batch=32)
    params = SamplingParams(max_tokens=1000)
    requests = [submit(engine, f"{number} {PROMPTS[0]}", params) for number in range(32)]
    engine.step()
    engine.step()
    assert len(engine._scheduler.running) == 32
    for request in requests:
        engine.cancel(request)
    engine.clear()
    assert engine.target.can_open(32 * 330)


@pytest.mark.usefixtures("small_growth")
@pytest.mark.parametrize("seed", range(4))
def test_requests_of_all_sizes_come_and_go_in_a_small_cache(seed: int) -> None:
    rng = random.Random(seed)
    engine = open_engine(rng.choice([220, 400]), prefill_chunk=rng.choice([5, 512]))
    expected: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    unfinished: list[int] = []
    while len(expected) < 24 or unfinished:
        if len(expected) < 24 and rng.random() < 0.4:
            prompt = rng.choice([SYSTEM[: rng.randrange(1, 120)] + rng.choice(PROMPTS), rng.choice(PROMPTS)])
            params = SamplingParams(max_tokens=rng.choice([1, 10, 60]), ignore_eos=True)
            drafter = rng.choice(["plain", "goose", "pld"])
            request = submit(engine, prompt, params, drafter, reuse=rng.random() < 0.7)
            expected[request], tokens[request] = alone(prompt, params), []
            unfinished.append(request)
        engine.step()
        if unfinished and rng.random() < 0.05:
            cancelled = unfinished.pop(rng.randrange(len(unfinished)))
            engine.cancel(cancelled)
            del expected[cancelled], tokens[cancelled]
        for event in engine._empty_inboxes(unfinished):
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                unfinished.remove(event.request_id)
    assert tokens == expected
    engine.clear()
    assert engine.target.can_open(engine.target.num_slots)


def test_a_cancelled_request_may_be_suspended(suspended: list[int], small_growth: None) -> None:
    engine = open_engine(200)
    requests = [submit(engine, prompt) for prompt in PROMPTS[:4]]
    while not suspended:
        engine.step()
    engine.cancel(suspended[0])
    rest = [request for request in requests if request != suspended[0]]
    kept = [prompt for prompt, request in zip(PROMPTS[:4], requests, strict=True) if request in rest]
    assert outputs(engine, rest) == [alone(prompt) for prompt in kept]


def test_room_that_others_hold_is_an_error() -> None:
    engine = open_engine(300)
    engine.target.open(290)
    request = submit(engine, PROMPTS[0])
    with pytest.raises(CapabilityError, match="no room for any waiting request"):
        outputs(engine, [request])


# Common beginnings


def stats_of(engine: Engine, request: int) -> Any:
    return [event.stats for event in engine.events([request])][-1]


def test_a_common_beginning_is_read_once() -> None:
    engine = open_engine(4096)
    first = submit(engine, SYSTEM + "one", reuse=True)
    assert stats_of(engine, first).reused_tokens == 0
    for question in ("two, please", "three"):  # the kept one stays for the next
        request = submit(engine, SYSTEM + question, reuse=True)
        events = list(engine.events([request]))
        assert events[-1].stats.reused_tokens >= len(SYSTEM)
        assert [token for event in events for token in event.token_ids] == alone(SYSTEM + question)


def test_a_running_request_shares_what_it_has_read() -> None:
    engine = open_engine(4096, prefill_chunk=16)
    requests = [submit(engine, SYSTEM + question, reuse=True) for question in ("one", "two", "three")]
    got: dict[int, list[int]] = {request: [] for request in requests}
    reused = {}
    for event in engine.events(requests):
        got[event.request_id] += event.token_ids
        if event.stats is not None:
            reused[event.request_id] = event.stats.reused_tokens
    assert list(got.values()) == [alone(SYSTEM + question) for question in ("one", "two", "three")]
    assert reused[requests[0]] == 0
    assert all(reused[request] > len(SYSTEM) - scheduler.MIN_WAIT for request in requests[1:])


@pytest.mark.parametrize(("owner", "reuse"), [("somebody else", True), ("me", False)])
def test_nothing_is_shared_with_others(owner: str, reuse: bool) -> None:
    engine = open_engine(4096)
    first = submit(engine, SYSTEM + "one", reuse=True, owner="me")
    second = submit(engine, SYSTEM + "two", reuse=reuse, owner=owner)
    list(engine.events([first]))
    assert stats_of(engine, second).reused_tokens == 0
    third = submit(engine, SYSTEM + "three", reuse=reuse, owner=owner)
    assert (stats_of(engine, third).reused_tokens == 0) == (not reuse)  # its own second one


def test_kept_sequences_give_way() -> None:
    engine = open_engine(420)
    for number in range(6):
        request = submit(engine, f"{number}{SYSTEM[:150]}", reuse=True)
        assert stats_of(engine, request).reused_tokens == 0
    assert outputs(engine, [submit(engine, PROMPTS[0])]) == [alone(PROMPTS[0])]


def test_kept_sequences_give_way_to_other_engines() -> None:
    """Engines on one target share its slots, also after some of them are gone."""
    target = tiny_target(cache_tokens=420)
    options = EngineOptions(budget=6, max_batch=1)
    first, gone = (Engine(target, ByteTokenizer(), options) for _ in range(2))
    for engine in (first, gone):
        outputs(engine, [submit(engine, f"{id(engine)}{SYSTEM[:40]}", reuse=True)])
    del engine, gone
    second = Engine(target, ByteTokenizer(), options)
    assert outputs(second, [submit(second, SYSTEM)]) == [alone(SYSTEM)]
    assert outputs(first, [submit(first, SYSTEM, reuse=True)]) == [alone(SYSTEM)]
    for engine in (first, second):
        engine.clear()
    assert target.can_open(420)


def test_a_conversation_is_kept_once() -> None:
    """A longer sequence replaces its beginnings, of the same owner only."""
    target = tiny_target(cache_tokens=200)
    store = prefix.PrefixStore(target)
    text = np.arange(40, dtype=np.int32)
    for owner, lengths in (("me", (10, 20, 30)), ("you", (15,))):
        for length in lengths:
            store.put(text[:length], target.open(length), owner)
    assert sorted(len(kept.tokens) for kept in store._kept) == [15, 30]
    kept, shared = store.find(text, "me")
    assert (shared, len(kept.tokens) if kept else 0) == (30, 30)
    for number in range(5):  # at most a quarter of the cache, the latest ones
        store.put(np.full(20, number, np.int32), target.open(20), "me")
    assert [int(kept.tokens[0]) for kept in store._kept] == [3, 4]
    store.clear()
    assert target.can_open(200)
