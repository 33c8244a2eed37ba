"""Priors of blends: fitted to what came of guesses, kept in the cache, used from then on."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.compiled import NONE, state_of
from draftwood.errors import OptionError
from draftwood.growth import Priors, load_priors, new_learned, priors_path, save_priors, shipped_priors
from draftwood.sources import build_datastore
from draftwood.targets import TargetInfo
from draftwood.tune import measure_priors
from draftwood.tune.priors import Guesses, fit_priors, log_loss
from tests.growth.test_blend import FixedHints


def make_guesses(size: int = 4000) -> tuple[list[FixedHints], Guesses]:
    """Two sources. Kind 1 of the first is right in 80% of cases, kind 2 in 20%; the second one knows nothing."""
    rng = np.random.default_rng(1)
    kinds = np.column_stack([rng.integers(1, 3, size), rng.integers(1, 3, size)])
    right = (rng.random(size) < np.where(kinds[:, 0] == 1, 0.8, 0.2)).astype(np.float64)
    kinds[: size // 4, 1] = NONE
    listed = np.where(kinds[:, 1] == NONE, 1, 3)
    sources = [FixedHints(name, [], [], [0.1, 0.5, 0.5]) for name in ("one", "other")]
    return sources, Guesses(np.arange(size), listed, kinds, right)


def test_fit_finds_rates_and_the_source_that_knows() -> None:
    sources, guesses = make_guesses()
    priors = fit_priors(sources, guesses)
    assert priors.rates["one"][1:] == pytest.approx([0.8, 0.2], abs=0.03)
    assert priors.rates["other"][1:] == pytest.approx([0.5, 0.5], abs=0.03)
    for bias, one, _ in priors.weights["one+other"]:
        assert bias == pytest.approx(0.0, abs=0.15)
        assert one == pytest.approx(1.0, abs=0.15)
    assert set(priors.weights) == {"one", "other", "one+other", "one/other", "other/one"}
    flat = Priors({"one": [0.5] * 3, "other": [0.5] * 3}, priors.weights)
    assert log_loss(priors, sources, guesses) < 0.75 * log_loss(flat, sources, guesses)


def test_silence_and_sure_places_have_weights_of_their_own() -> None:
    """Silence of the second source means nothing where the first one is sure, and much elsewhere."""
    rng = np.random.default_rng(1)
    size = 6000
    kinds = np.column_stack([rng.integers(1, 3, size), rng.integers(0, 2, size)])
    rates = np.where(kinds[:, 0] == 1, 0.95, np.where(kinds[:, 1] == 1, 0.7, 0.05))
    right = (rng.random(size) < rates).astype(np.float64)
    sources = [FixedHints(name, [], [], [0.1, 0.5, 0.5]) for name in ("one", "other")]
    guesses = Guesses(np.arange(size), np.where(kinds[:, 1] == 0, 1, 3), kinds, right)
    priors = fit_priors(sources, guesses)
    chances = [1.0 / (1.0 + np.exp(-chance_odds(priors, sure, silent))) for sure in (0, 1) for silent in (False, True)]
    assert chances == pytest.approx([0.7, 0.05, 0.95, 0.95], abs=0.05)


def chance_odds(priors: Priors, sure: int, silent: bool) -> float:
    """Log odds of a guess of the first source, which is sure of it or not."""
    odds = [np.log(rate / (1.0 - rate)) for rate in (priors.rates["one"][2 - sure], priors.rates["other"][1 - silent])]
    bias, one, other = priors.weights["one/other" if silent else "one+other"][sure]
    return float(bias + one * odds[0] + other * odds[1])


def test_few_guesses_change_little() -> None:
    sources, guesses = make_guesses(8)
    assert fit_priors(sources, guesses).weights["one"] == [[0.0, 1.0]] * 2


def test_measured_on_prompts(tmp_path: Path) -> None:
    new_llm = partial(LLM, "tiny", budget=8, max_batch=1)
    prompts = ["one two one two", "hello hello hello hello"]
    measured = measure_priors(new_llm, prompts, SamplingParams(max_tokens=40), drafter_options={})
    assert measured.num_guesses > 100
    assert set(measured.priors.rates) == {"context", "transition", "position"}
    assert 0.0 < measured.loss < 0.5
    store = tmp_path / "own.datastore"
    build_datastore([[104, 101, 108, 108, 111, 32] * 4], vocab_size=258, tokenizer="bytes").save(store)
    for options in ({"priors": False}, {"datastore": str(store)}):  # what the shipped priors do not know
        assert (
            measure_priors(new_llm, prompts, SamplingParams(max_tokens=20), drafter_options=options).loss_before > 0.0
        )
    with pytest.raises(OptionError, match="prompts"):
        measure_priors(new_llm, prompts[:1], SamplingParams(), drafter_options={})


def test_kept_priors_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_info: TargetInfo) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    assert load_priors(tiny_info) == shipped_priors()
    own = Priors({"fixed": [0.02, 0.6]}, {"fixed": [[0.5, 0.9]] * 2})
    save_priors(own, priors_path(tiny_info))
    found = load_priors(tiny_info)
    assert found.rates["context"] == shipped_priors().rates["context"]
    learned = new_learned([FixedHints("fixed", [5], [1], [0.02, 0.3])], found)
    np.testing.assert_allclose(learned.hits[0] / learned.trials[0], [0.02, 0.6])
    np.testing.assert_array_equal(learned.weights[:, state_of(1, 1)], [[0.5, 0.9]] * 2)
    priors_path(tiny_info).write_text("{}", encoding="utf-8")  # damaged: as if there were none
    assert load_priors(tiny_info) == shipped_priors()


@pytest.fixture
def tiny_info() -> TargetInfo:
    with LLM("tiny") as llm:
        return llm._engine.target.info
