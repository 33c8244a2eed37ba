"""Many requests on a target with asynchronous passes: one half is drafted while the pass of the other half runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import make_factory
from draftwood.engine import Engine, GenerationRequest
from draftwood.engine.ways import MIN_IN_TURNS, Ways
from draftwood.errors import CapabilityError
from draftwood.targets.base import ForwardOutput, PendingPass, Segment
from draftwood.targets.native.decoder import pack
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer

PROMPTS = [f"abab{'xyz'[n % 3]}abab{n}" * (1 + n % 3) for n in range(MIN_IN_TURNS + 3)]


@pytest.fixture(autouse=True)
def always_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the host and the target of this machine take."""
    monkeypatch.setattr(Ways, "turns", (True,))


class LateFlight(PendingPass):
    """Computed only when waited for or when the next pass starts: an early read gets nothing."""

    def __init__(self, target: LateTarget, segments: Sequence[Segment]) -> None:
        self.sequences = {segment.sequence for segment in segments}
        self._target, self._batch = target, pack(segments, target.cache)
        self._output: ForwardOutput | None = None

    def compute(self) -> None:
        if self._output is None:
            output = self._target._decoder.forward(self._batch, ())
            self._output = output._replace(logits=output.logits.clone(), greedy_ids=output.greedy_ids.clone())

    def wait(self) -> ForwardOutput:
        self.compute()
        self._target.flights.remove(self)
        assert self._output is not None
        return self._output


class LateTarget(NativeTarget):
    """Two lanes; passes run in launch order, as late as possible."""

    flights: list[LateFlight]
    most_at_once = 0
    fails_at: int | None = None
    launches = 0

    @classmethod
    def made(cls) -> LateTarget:
        target = tiny_target()
        target.__class__ = cls
        assert isinstance(target, LateTarget)
        target.flights = []
        target.num_lanes = 2
        return target

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        self.launches += 1
        if self.launches == self.fails_at:
            raise CapabilityError("no room for this pass")
        for flight in self.flights:
            flight.compute()
        busy = {sequence for flight in self.flights for sequence in flight.sequences}
        assert busy.isdisjoint(segment.sequence for segment in segments), "a sequence in two passes at once"
        self.flights.append(LateFlight(self, segments))
        self.most_at_once = max(self.most_at_once, len(self.flights))
        assert len(self.flights) <= self.num_lanes
        return self.flights[-1]

    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        for flight in self.flights:  # copies come after earlier launches, which may write to the destination
            flight.compute()
        return super().fork(sequence, capacity, length)


def run(
    target: NativeTarget,
    params: Sequence[SamplingParams],
    drafter: str = "goose",
    budget: int = 6,
    codec: ByteTokenizer | None = None,
) -> list[list[int]]:
    engine = Engine(target, codec or ByteTokenizer(), EngineOptions(budget=budget, max_batch=len(PROMPTS)))
    factory = make_factory(drafter, {}, target.info)
    ids = []
    for prompt, wanted in zip(PROMPTS, params, strict=False):
        ids += engine.submit(
            GenerationRequest(prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=wanted, drafter=factory)
        )
    tokens: dict[int, list[int]] = {request: [] for request in ids}
    for event in engine.events(ids):
        tokens[event.request_id] += event.token_ids
    assert not engine.has_work
    return list(tokens.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["plain", "goose", "recycling"])
def test_output_equals_sequential_passes(drafter: str, temperature: float) -> None:
    """Requests that end at different times; the last few share a pass again. Sampled ones if the target draws."""
    how = {"temperature": temperature, "seed": 3, "ignore_eos": True}
    params = [SamplingParams(max_tokens=5 + 7 * n, **how) for n in range(len(PROMPTS))]
    late = LateTarget.made()
    if temperature and not late.info.can_draw:
        pytest.skip("no C compiler")
    assert run(late, params, drafter) == run(tiny_target(), params, drafter)
    assert late.most_at_once == 2
    assert not late.flights


@pytest.mark.parametrize("wanted", [{"repetition_penalty": 1.2}, {"logprobs": 2}])
def test_requests_that_read_logits_share_every_pass(wanted: dict[str, Any]) -> None:
    """Logits are available only after the next pass: two halves would wait for each other."""
    late, params = LateTarget.made(), [SamplingParams(max_tokens=20, ignore_eos=True)] * len(PROMPTS)
    params[-1] = SamplingParams(max_tokens=20, ignore_eos=True, **wanted)
    assert run(late, params) == run(tiny_target(), params)
    assert late.most_at_once == 1


def test_halves_join_for_new_request_that_reads_logits() -> None:
    late = LateTarget.made()
    engine = Engine(late, ByteTokenizer(), EngineOptions(budget=6, max_batch=len(PROMPTS)))
    factory = make_factory("goose", {}, late.info)
    params = [SamplingParams(max_tokens=12, ignore_eos=True)] * (len(PROMPTS) - 1)
    params.append(SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=5))
    ids: list[int] = []
    tokens: dict[int, list[int]] = {}
    for prompt, wanted in zip(PROMPTS, params, strict=True):
        if wanted is params[-1]:
            for _ in range(4):
                engine.step()
            assert late.flights
        ids += engine.submit(
            GenerationRequest(prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=wanted, drafter=factory)
        )
        tokens[ids[-1]] = []
    for event in engine.events(ids):
        tokens[event.request_id] += event.token_ids
    assert list(tokens.values()) == run(tiny_target(), params)
    assert not late.flights


def test_few_requests_share_every_pass() -> None:
    late = LateTarget.made()
    run(late, [SamplingParams(max_tokens=8)] * (MIN_IN_TURNS - 1))
    assert late.most_at_once == 1


def test_request_can_be_cancelled_during_its_pass() -> None:
    late = LateTarget.made()
    engine = Engine(late, ByteTokenizer(), EngineOptions(budget=6, max_batch=len(PROMPTS)))
    factory = make_factory("goose", {}, late.info)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    ids = [
        engine.submit(
            GenerationRequest(prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=params, drafter=factory)
        )[0]
        for prompt in PROMPTS
    ]
    for _ in range(6):
        engine.step()
    assert late.flights
    engine.cancel(ids[0])
    engine.cancel(ids[-1])
    rest = ids[1:-1]
    tokens: dict[int, list[int]] = {request: [] for request in rest}
    for event in engine.events(rest):
        tokens[event.request_id] += event.token_ids
    assert list(tokens.values()) == run(tiny_target(), [params] * len(PROMPTS))[1:-1]
    engine.clear()
    assert late.can_open(late.num_slots)


@pytest.mark.parametrize("seed", range(8))
def test_requests_come_and_go_at_any_time(seed: int) -> None:
    """Chunked prompts, cached prefixes, cancelled requests whose slots are reused: other outputs are unchanged."""
    rng, late = random.Random(seed), LateTarget.made()
    options = EngineOptions(budget=6, max_batch=rng.choice([8, 11]), prefill_chunk=rng.choice([3, 512]))
    engine, codec = Engine(late, ByteTokenizer(), options), ByteTokenizer()
    factories = [make_factory(name, {}, late.info) for name in ("plain", "goose")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    unfinished: list[int] = []
    while len(tokens) < 30 or unfinished:
        for _ in range(rng.randint(0, 4) if len(tokens) < 30 else 0):
            prompt = rng.randrange(len(PROMPTS))
            reuse, factory = rng.random() < 0.5, rng.choice(factories)
            unfinished += engine.submit(
                GenerationRequest(
                    prompt_ids=tuple(codec.encode(PROMPTS[prompt])), params=params, drafter=factory, reuse=reuse
                )
            )
            prompts[unfinished[-1]], tokens[unfinished[-1]] = prompt, []
        engine.step()
        if unfinished and rng.random() < 0.2:
            cancelled = unfinished.pop(rng.randrange(len(unfinished)))
            engine.cancel(cancelled)
            del prompts[cancelled]
        for event in engine._empty_inboxes(unfinished):
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                unfinished.remove(event.request_id)
    alone = run(tiny_target(), [params] * len(PROMPTS), "plain")
    assert all(tokens[request] == alone[prompt] for request, prompt in prompts.items())
    assert late.most_at_once == 2
    engine.clear()
    assert late.can_open(late.num_slots)


def test_engine_can_be_closed_during_a_pass() -> None:
    late = LateTarget.made()
    engine = Engine(late, ByteTokenizer(), EngineOptions(budget=6, max_batch=len(PROMPTS)))
    factory = make_factory("goose", {}, late.info)
    for prompt in PROMPTS:
        engine.submit(
            GenerationRequest(
                prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=SamplingParams(max_tokens=12), drafter=factory
            )
        )
    for _ in range(4):
        engine.step()
    assert late.flights
    engine.clear()
    assert not late.flights  # others may use the lane
    assert not engine.has_work
    assert late.can_open(late.num_slots)


def test_failed_launch_does_not_affect_running_pass() -> None:
    late = LateTarget.made()
    late.fails_at = 5
    params = [SamplingParams(max_tokens=6, ignore_eos=True)] * len(PROMPTS)
    engine = Engine(late, ByteTokenizer(), EngineOptions(budget=6, max_batch=len(PROMPTS)))
    factory = make_factory("plain", {}, late.info)
    ids = [
        engine.submit(
            GenerationRequest(prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=params[0], drafter=factory)
        )[0]
        for prompt in PROMPTS
    ]
    tokens: dict[int, list[int]] = {request: [] for request in ids}

    def go_on() -> None:
        for event in engine.events(ids):
            tokens[event.request_id] += event.token_ids

    with pytest.raises(CapabilityError, match="no room"):
        go_on()
    go_on()  # as a caller might do
    assert list(tokens.values()) == run(tiny_target(), params, "plain")


class LateCodec(ByteTokenizer):
    """Notes for every decoded text whether a pass was running."""

    def __init__(self, target: LateTarget) -> None:
        self.target = target
        self.was_busy: list[bool] = []

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.was_busy.append(bool(self.target.flights))
        return super().decode(ids, skip_special=skip_special)


def run_late(target: LateTarget, codec: ByteTokenizer, *params: SamplingParams) -> list[list[int]]:
    return run(target, params, codec=codec)


@pytest.mark.parametrize("wanted", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}])
def test_text_is_written_while_the_next_pass_runs(wanted: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=20 + n, ignore_eos=True, **wanted) for n in range(3)]
    late = LateTarget.made()
    codec = LateCodec(late)
    assert run_late(late, codec, *params) == run(tiny_target(), params)
    assert sum(codec.was_busy) > 0.8 * len(codec.was_busy)  # not after the last pass
    assert not late.flights


def test_events_that_read_logits_are_written_before_the_next_pass() -> None:
    params = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)] * 2
    late = LateTarget.made()
    codec = LateCodec(late)
    assert run_late(late, codec, *params) == run(tiny_target(), params)
    assert not any(codec.was_busy)


def test_stop_string_ends_a_request_before_the_next_pass() -> None:
    whole = run(tiny_target(), [SamplingParams(max_tokens=30)])[0]
    text = ByteTokenizer().decode(whole)
    stop = next(letter for letter in text[4:] if letter.isascii() and letter.isprintable())
    params = SamplingParams(max_tokens=30, stop=(stop,))
    late = LateTarget.made()
    assert run_late(late, LateCodec(late), params) == run(tiny_target(), [params])
    assert not late.flights


def test_failed_launch_ahead_keeps_the_tokens_of_the_last_pass() -> None:
    late, params = LateTarget.made(), SamplingParams(max_tokens=8, ignore_eos=True)
    late.fails_at = 4
    engine = Engine(late, ByteTokenizer(), EngineOptions(budget=1, max_batch=2))
    factory = make_factory("plain", {}, late.info)
    ids = engine.submit(GenerationRequest(prompt_ids=(65, 66), params=params, drafter=factory))
    tokens: list[int] = []

    def go_on() -> None:
        for event in engine.events(ids):
            tokens.extend(event.token_ids)

    with pytest.raises(CapabilityError, match="no room"):
        go_on()
    assert tokens  # those of the pass before
    go_on()
    plain = Engine(tiny_target(), ByteTokenizer(), EngineOptions(budget=1))
    ids = plain.submit(GenerationRequest(prompt_ids=(65, 66), params=params, drafter=factory))
    assert tokens == [token for event in plain.events(ids) for token in event.token_ids]
