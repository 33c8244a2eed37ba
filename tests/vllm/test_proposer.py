"""The proposer as vLLM calls it: rows that move, come and go; options; memory. No vLLM is needed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.compiled import load_core
from draftwood.errors import DraftwoodError, OptionError
from draftwood.growth import blend as blend_module
from draftwood.sources.datastore import build_datastore
from draftwood.sources.hints import text as hints_module
from draftwood.vllm import Proposer, VllmOptions, chains, read_options
from draftwood.vllm.chains import Chain, Follower
from draftwood.vllm.memory import END, Memory
from draftwood.vllm.pace import FIRST_CHANCE, MARGIN, MAX_CHANCE, MIN_CHANCE, Pace
from draftwood.vllm.requests import MAX_IDLE, Requests

VOCAB, MAX_LENGTH = 50, 400
needs_core = pytest.mark.skipif(load_core() is None, reason="no compiler")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "MIN_CHANCE", "MEMORY_TOKENS", "DATASTORE"):
        monkeypatch.delenv(f"DRAFTWOOD_VLLM_{name}", raising=False)


def vllm_config(tokens: int = 8, max_length: int = MAX_LENGTH) -> Any:
    model = SimpleNamespace(max_model_len=max_length, get_vocab_size=lambda: VOCAB)
    return SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=tokens), model_config=model)


class Batch:
    """The rows of vLLM's batch: texts with the tokens that each got in the last step."""

    def __init__(self, num_rows: int = 8) -> None:
        self.tokens = np.zeros((num_rows, MAX_LENGTH), np.int32)

    def call(self, proposer: Proposer, texts: list[tuple[list[int], int]]) -> list[list[int]]:
        """``texts``: all tokens of each row, and how many are new; 0 for a row that is still in its prompt."""
        lengths = np.zeros(len(texts), np.int32)
        for row, (text, _) in enumerate(texts):
            self.tokens[row, : len(text)] = text
            lengths[row] = len(text)
        return proposer.propose([text[len(text) - new :] if new else [] for text, new in texts], lengths, self.tokens)


def phrase(seed: int, size: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(size)]


def test_repeated_text_is_guessed() -> None:
    text = phrase(0)
    [chain] = Batch().call(Proposer(vllm_config()), [([*text, *text[:20]], 1)])
    assert chain == text[20 : 20 + len(chain)]
    assert chain


def test_nothing_is_guessed_about_new_text_and_in_prompts() -> None:
    proposer = Proposer(vllm_config())
    repeated = phrase(1) * 2
    assert Batch().call(proposer, [(list(range(30)), 1), (repeated, 0), (repeated, 1)])[:2] == [[], []]


def test_guesses_stay_within_the_context() -> None:
    proposer = Proposer(vllm_config(max_length=82))
    text = phrase(2)
    for length in (79, 80, 81, 82):
        [chain] = Batch().call(proposer, [([*text, *text][:length], 1)])
        assert len(chain) <= max(82 - length - 1, 0)


def test_at_most_the_configured_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_VLLM_MIN_CHANCE", "0")
    text = phrase(3)
    [chain] = Batch().call(Proposer(vllm_config(tokens=3)), [([*text, *text[:30]], 1)])
    assert chain == text[30:33]


def test_a_higher_chance_gives_shorter_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    text = phrase(4)
    sizes = []
    for chance in ("0.05", "0.5", "1.0"):
        monkeypatch.setenv("DRAFTWOOD_VLLM_MIN_CHANCE", chance)
        sizes.append(len(Batch().call(Proposer(vllm_config(tokens=30)), [([*text, *text[:9]], 1)])[0]))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] == 0


# Rows


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_rows_that_move_come_and_go_get_the_chains_of_their_own_text(seed: int) -> None:
    """Each text is also followed alone; what is learned is the same, since one chance is used for all."""
    rng = random.Random(seed)
    follower = Follower()
    requests = Requests(follower, None)
    texts = {name: phrase(name, rng.randrange(3, 40)) for name in range(6)}
    seen: dict[int, Any] = {}
    running: list[int] = []
    for _ in range(25):
        running = [name for name in running if rng.random() > 0.1]
        running += [name for name in texts if name not in running and rng.random() < 0.2]
        rng.shuffle(running)
        rows = []
        for name in running:
            new = [rng.choice(texts[name]) for _ in range(rng.randrange(1, 4))]
            texts[name] += new
            rows.append((len(new), np.array(texts[name], np.int32)))
        found = requests.read((number, count, tokens) for number, (count, tokens) in enumerate(rows))
        assert sorted(row.number for row in found) == list(range(len(running)))
        assert len({id(row.request) for row in found}) == len(found)
        follower.follow([row.request.text for row in found], [row.added for row in found], 4, 0.3)
        for row in found:
            name = running[row.number]
            assert row.request.text.places.index.last(row.request.length) == texts[name]
            if name in seen and len(row.added) < len(texts[name]):
                assert row.request is seen[name]  # found again
            seen[name] = row.request


def test_a_text_is_found_again_after_its_row_moved() -> None:
    requests = Requests(Follower(), None)
    one, two = np.array(phrase(5), np.int32), np.array(phrase(6), np.int32)
    first = requests.read(iter([(0, 1, one), (1, 1, two)]))
    again = requests.read(iter([(0, 2, np.append(two, [7, 8]).astype(np.int32))]))
    assert again[0].request is first[1].request
    assert again[0].added.tolist() == [7, 8]


def test_equal_texts_are_kept_apart() -> None:
    requests = Requests(Follower(), None)
    text = np.array(phrase(7), np.int32)
    first = requests.read(iter([(0, 1, text), (1, 1, text)]))
    longer = np.append(text, [1]).astype(np.int32)
    for rows in ([(0, 1, longer), (1, 1, longer)], [(1, 1, np.append(longer, [2]).astype(np.int32))]):
        found = requests.read(iter(rows))
        assert len({id(row.request) for row in found}) == len(rows)
        assert {id(row.request) for row in found} <= {id(row.request) for row in first}


def test_finished_requests_are_dropped() -> None:
    requests = Requests(Follower(), None)
    requests.read((row, 1, np.array(phrase(row), np.int32)) for row in range(20))
    assert len(requests) == 20
    text = phrase(99)
    for _ in range(MAX_IDLE + 64):
        text.append(1)
        requests.read(iter([(0, 1, np.array(text, np.int32))]))
    assert len(requests) == 1


# Memory


def test_other_answers_are_remembered() -> None:
    proposer, batch = Proposer(vllm_config()), Batch()
    answer = phrase(8, 30)
    batch.call(proposer, [([1, 2, 3], 1)])
    batch.call(proposer, [([1, 2, 3, *answer], 30)])
    batch.call(proposer, [([9, 9, 8], 1)])  # the first has ended
    [chain] = batch.call(proposer, [([9, 9, 8, *answer[:12]], 12)])
    assert chain == answer[12 : 12 + len(chain)]
    assert chain


def test_without_memory_requests_see_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_VLLM_MEMORY_TOKENS", "0")
    with pytest.raises(AssertionError, match=r"assert \[\]"):
        test_other_answers_are_remembered()


def test_prompts_are_not_remembered() -> None:
    proposer, batch = Proposer(vllm_config()), Batch()
    prompt = phrase(9)
    batch.call(proposer, [([*prompt, 1], 1)])
    batch.call(proposer, [([5], 1)])
    assert batch.call(proposer, [([5, *prompt[:20]], 20)]) == [[]]


@given(pieces=st.lists(st.lists(st.integers(0, VOCAB), max_size=30), max_size=20), limit=st.integers(1, 40))
def test_memory_is_bounded_and_keeps_the_latest(pieces: list[list[int]], limit: int) -> None:
    memory = Memory(limit)
    for piece in pieces:
        memory.add(piece)
        assert len(memory.index) <= max(limit, 2)
        kept = [*piece, END][-min(limit, len(piece) + 1) :]
        assert memory.index.last(min(len(kept), len(memory.index))) == kept[-len(memory.index) :]


def test_a_datastore_fills_the_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = phrase(10)
    path = tmp_path / "store"
    build_datastore([text], vocab_size=VOCAB, tokenizer="any").save(path)
    monkeypatch.setenv("DRAFTWOOD_VLLM_DATASTORE", str(path))
    [chain] = Batch().call(Proposer(vllm_config()), [([VOCAB - 1, *text[:20]], 1)])
    assert chain == text[20 : 20 + len(chain)]
    assert chain


# C and Python


@needs_core
@pytest.mark.parametrize("seed", range(4))
def test_c_and_python_give_the_same_chains(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    steps = []
    for _ in range(20):
        steps.append([[rng.randrange(5) for _ in range(rng.randrange(1, 9))] for _ in range(3)])

    def run() -> list[list[Chain]]:
        memory = Memory(60)
        follower = Follower([memory])
        texts = [follower.open() for _ in range(3)]
        found = []
        for step in steps:
            memory.add(step[0])
            found.append(follower.follow(texts, [np.array(new, np.int32) for new in step], 6, 0.1))
        return found

    compiled = run()
    for module in (hints_module, blend_module, chains):
        monkeypatch.setattr(module, "load_core", lambda: None)
    for expected, found in zip(compiled, run(), strict=True):
        assert [chain.tokens for chain in found] == [chain.tokens for chain in expected]
        for one, other in zip(expected, found, strict=True):
            assert one.values == pytest.approx(other.values)
            assert one.values == sorted(one.values, reverse=True)
            assert all(value >= 0.1 for value in one.values)
    assert any(chain.tokens for step in compiled for chain in step)


# Pace


def paced(cost: float, chances: list[float], steps: int = 300) -> float:
    """Positions follow from ``min_chance``; a step takes 1 + ``cost`` for every position."""
    rng = random.Random(0)
    pace = Pace()
    for _ in range(steps):
        asked = [chance for chance in chances if chance >= pace.min_chance]
        asked = asked[: rng.randrange(len(asked) + 1)]
        tokens = 1 + sum(rng.random() < chance for chance in asked)
        pace.note(1, len(asked), sum(asked), 1.0 + cost * (1 + len(asked)), tokens)
    return pace.min_chance


def test_dear_positions_raise_the_chance_and_cheap_ones_lower_it() -> None:
    chances = [0.9, 0.8, 0.7, 0.5, 0.3]
    cheap, middle, dear = (paced(cost, chances) for cost in (0.001, 0.25, 2.0))
    assert cheap < FIRST_CHANCE
    assert cheap < middle < dear
    assert cheap >= MIN_CHANCE
    assert dear <= MAX_CHANCE


def test_single_slow_steps_hardly_count() -> None:
    calm, disturbed = Pace(), Pace()
    for number in range(200):
        positions = 1 + number % 4
        calm.note(1, positions - 1, 1.0, 1.0 + 0.1 * positions, 2)
        disturbed.note(1, positions - 1, 1.0, 50.0 if number % 40 == 39 else 1.0 + 0.1 * positions, 2)
    assert disturbed.min_chance == pytest.approx(calm.min_chance, abs=0.1)


def test_steps_without_guesses_do_not_end_guessing() -> None:
    """They tell nothing about what a guess costs."""
    pace = Pace()
    for _ in range(500):
        pace.note(1, 0, 0.0, 1.0, 1)
    assert pace.min_chance == pytest.approx(MARGIN * FIRST_CHANCE, abs=0.05)
    assert pace.pays(1, 2, 1.0)


def test_chances_are_believed_as_far_as_they_come_true() -> None:
    """The same guesses and times; in one text all are accepted as expected, in the other a quarter of that."""
    right, wrong = Pace(), Pace()
    for number in range(100):
        guesses = number % 5
        right.note(8, guesses, 0.8 * guesses, 1.0 + 0.04 * guesses, 8 + round(0.8 * guesses))
        wrong.note(8, guesses, 0.8 * guesses, 1.0 + 0.04 * guesses, 8 + round(0.2 * guesses))
    assert wrong.min_chance > 1.5 * right.min_chance
    assert right.pays(8, 4, 2.0)
    assert not wrong.pays(8, 4, 2.0)


def guessed_steps(more: float, chance: float, rows: int = 8, guesses: int = 6) -> list[bool]:
    """Which of many steps guess, if a step takes 1 + 0.02 for every position and ``more`` with any guesses."""
    rng = random.Random(0)
    pace, found = Pace(), []
    for _ in range(400):
        asked = rng.randrange(1, 2 * guesses)
        asked = asked if pace.pays(rows, asked, chance * asked) else 0
        tokens = rows + sum(rng.random() < chance for _ in range(asked))
        noise = rng.uniform(0.98, 1.05)
        seconds = noise * (1.0 + 0.02 * (rows + asked) + more * (asked > 0))
        pace.note(rows, asked, chance * asked, seconds, tokens)
        found.append(asked > 0)
    return found


def test_all_guesses_of_a_step_together_must_pay() -> None:
    """Some engines take longer for any guess at all."""
    good, bad = guessed_steps(more=0.0, chance=0.5), guessed_steps(more=0.6, chance=0.3)
    assert sum(good) > 0.9 * len(good)  # a few without, to know what they cost
    assert sum(bad) < 0.25 * len(bad)
    assert 0 < sum(bad[200:]) < 20  # it is tried again, seldom


def test_guesses_come_back_when_they_pay_again() -> None:
    pace = Pace()
    for _ in range(200):
        asked = 4 if pace.pays(8, 4, 0.4) else 0
        pace.note(8, asked, 0.1 * asked, 1.2 + 0.4 * (asked > 0), 8)
    found = []
    for _ in range(300):
        asked = 4 if pace.pays(8, 4, 4.0) else 0
        pace.note(8, asked, float(asked), 1.2 + 0.1 * (asked > 0), 8 + asked)
        found.append(asked)
    assert sum(found[-50:]) > 0.9 * 50 * 4


# Options


def test_options_come_from_variables_and_a_file(tmp_path: Any) -> None:
    assert read_options({}) == VllmOptions()
    file = tmp_path / "options.toml"
    file.write_text('min_chance = 0.5\nmemory_tokens = 10\ndatastore = "a"\n')
    given = {"DRAFTWOOD_VLLM_CONFIG": str(file), "DRAFTWOOD_VLLM_MEMORY_TOKENS": "20", "PATH": "x"}
    assert read_options(given) == VllmOptions(min_chance=0.5, memory_tokens=20, datastore="a")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MIN_CHANCE", "2", "0 to 1"),
        ("MIN_CHANCE", "high", "0 to 1"),
        ("MEMORY_TOKENS", "-1", "whole number"),
        ("MEMROY_TOKENS", "1", "Unknown environment variable"),
        ("CONFIG", "no-such-file", "no such file of options"),
    ],
)
def test_wrong_options_are_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(DraftwoodError, match=message):
        read_options({f"DRAFTWOOD_VLLM_{variable}": text})
    with pytest.raises(OptionError, match="datastore needs memory"):
        VllmOptions(datastore="a", memory_tokens=0)
