"""Measures what blends should believe at first: answers prompts, and fits rates and weights to the outcomes of guesses.

Rates are the shares of right guesses by kind. The weights for sources that hint at a guess, beside others that are
silent about it, are those of a logistic regression on the log odds of their rates. It is fitted to all such guesses,
whatever further sources say, and drawn towards equal weights, so that a few guesses do not decide.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.compiled import NONE, SURE, HintSource, state_of
from draftwood.config import SamplingParams
from draftwood.drafters import Drafter, VerifiedTree, drafter_class
from draftwood.errors import OptionError
from draftwood.growth import Outcome, Priors, new_learned, weights_key
from draftwood.llm import LLM, Prompt
from draftwood.progress import Progress, report

ASSUMED_TRIALS = 4.0  # weight of the rate that a source assumes for a kind
MIN_RATE, MAX_RATE = 5e-4, 0.998
EQUAL, POOLED = 3.0, 20.0  # weights of the pulls towards equal weights, and towards those of sure and unsure places
MIN_GUESSES = 50  # for a fit
MAX_STEPS = 30
DIGITS = 4
UNINFORMED, SILENT, HINTING = range(3)  # what a source says about a guess

Floats = npt.NDArray[np.float64]


class Measured(NamedTuple):
    priors: Priors
    num_guesses: int
    loss: float  # mean log loss of chances on half of the prompts, fitted to the other half
    loss_before: float  # with the priors that the run began with


class Guesses(NamedTuple):
    places: npt.NDArray[np.int64]  # [n] number of the token that it was about
    listed: npt.NDArray[np.int64]  # [n] bit s: source s hinted at it
    kinds: npt.NDArray[np.int64]  # [n, sources]
    right: Floats  # [n]


def measure_priors(
    new_llm: Callable[..., LLM],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    drafter_options: dict[str, Any],
    progress: Progress | None = None,
) -> Measured:
    """``new_llm`` creates the LLM: ``functools.partial(LLM, "smollm2", budget=40)``."""
    if len(prompts) < 2:
        raise OptionError("Priors are measured on prompts", got=len(prompts), allowed="2 or more")
    seen: list[list[list[Outcome]]] = []  # by prompt and token
    drafters: list[Any] = []
    drafter = _recording(seen, drafters)
    with new_llm(drafter=drafter, drafter_options=drafter_options) as llm:
        for number, prompt in enumerate(prompts):
            report(progress, "measuring priors", number, len(prompts))
            seen.append([])
            llm.generate([prompt], params)
    report(progress, "measuring priors", len(prompts), len(prompts))
    first = drafters[0]
    sources, begun = first.sources, first.shared.priors
    halves = [_as_arrays([guesses for own in seen[start::2] for guesses in own]) for start in (0, 1)]
    losses, before = [], []
    for fitted, tested in (halves, halves[::-1]):
        losses.append(log_loss(fit_priors(sources, fitted), sources, tested))
        before.append(log_loss(begun, sources, tested))
    everything = _as_arrays([guesses for own in seen for guesses in own])
    priors = fit_priors(sources, everything)
    return Measured(priors, len(everything.right), float(np.mean(losses)), float(np.mean(before)))


def _recording(seen: list[list[list[Outcome]]], drafters: list[Any]) -> type[Drafter]:
    """``blend``, with a record of what came of its guesses."""
    base: Any = drafter_class("blend")

    def observe(self: Any, verified: VerifiedTree) -> None:
        drafters[:] = [self]
        seen[-1].extend(self.outcomes(verified.emitted))
        base.observe(self, verified)

    return type("RecordingBlend", (base,), {"observe": observe})


def _as_arrays(tokens: Sequence[Sequence[Outcome]]) -> Guesses:
    rows = [row for own in tokens for row in own]
    return Guesses(
        np.repeat(np.arange(len(tokens)), [len(own) for own in tokens]),
        np.array([row.listed for row in rows], np.int64),
        np.array([row.kinds for row in rows], np.int64).reshape(len(rows), -1),
        np.array([row.is_right for row in rows], np.float64),
    )


def fit_priors(sources: Sequence[HintSource], guesses: Guesses) -> Priors:
    rates = [_count_rates(source, guesses.kinds[:, number], guesses.right) for number, source in enumerate(sources)]
    odds = _odds([np.log(own / (1.0 - own)) for own in rates], guesses)
    weights: dict[str, list[list[float]]] = {}
    for hinting, silent in _states(len(sources)):
        group = [*hinting, *silent]
        used = _in_state(guesses, hinting, silent)
        sure = _is_sure(guesses, odds, group)
        inputs = np.column_stack([np.ones(len(odds)), odds[:, group]])
        equal = np.array([0.0, *[1.0 if len(group) == 1 else 1.2 / len(group)] * len(group)])
        pooled = _regress(inputs[used], guesses.right[used], equal, EQUAL)
        parts = [used & ~sure, used & sure]
        rows = [_regress(inputs[own], guesses.right[own], pooled, POOLED) for own in parts]
        weights[_key(sources, hinting, silent)] = [_rounded(row) for row in rows]
    return Priors({source.name: _rounded(own) for source, own in zip(sources, rates, strict=True)}, weights)


def log_loss(priors: Priors, sources: Sequence[HintSource], guesses: Guesses) -> float:
    """Mean log loss of the chances that guesses get in a blend which starts from these priors."""
    if not len(guesses.right):
        return 0.0
    learned = new_learned(sources, priors)
    odds = _odds(learned.logits, guesses)
    sure = _is_sure(guesses, odds, range(len(sources))).astype(np.int64)
    informed = (guesses.kinds != NONE) @ (1 << np.arange(len(sources)))
    states = [state_of(*bits) for bits in zip(informed.tolist(), guesses.listed.tolist(), strict=True)]
    weights = learned.weights[sure, states]  # [n, 1 + sources]
    total = weights[:, 0] + (weights[:, 1:] * odds).sum(axis=1)
    return float(np.mean(np.logaddexp(0.0, np.where(guesses.right > 0.5, -total, total))))


def _states(count: int) -> list[tuple[list[int], list[int]]]:
    """Which sources may hint at a guess, and which others may be silent about it."""
    states = itertools.product((UNINFORMED, SILENT, HINTING), repeat=count)
    found = [tuple([n for n in range(count) if state[n] == how] for how in (HINTING, SILENT)) for state in states]
    return [(hinting, silent) for hinting, silent in found if hinting]


def _in_state(guesses: Guesses, hinting: Sequence[int], silent: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Guesses [n] that these sources hint at and those are silent about; the others do not matter."""
    wanted, others = (sum(1 << number for number in part) for part in (hinting, silent))
    is_listed: npt.NDArray[np.bool_] = guesses.listed & (wanted | others) == wanted
    is_informed: npt.NDArray[np.bool_] = np.all(guesses.kinds[:, list(silent)] != NONE, axis=1)
    return is_listed & is_informed


def _is_sure(guesses: Guesses, odds: Floats, group: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Whether one of these sources is sure of a token at the place of each guess, [n]."""
    found = np.zeros(int(guesses.places.max(initial=-1)) + 1, bool)
    for number in group:
        sure = (guesses.listed >> number & 1 > 0) & (odds[:, number] >= SURE)
        found[guesses.places[sure]] = True
    return found[guesses.places]


def _key(sources: Sequence[HintSource], hinting: Sequence[int], silent: Sequence[int]) -> str:
    return weights_key(*([sources[number].name for number in part] for part in (hinting, silent)))


def _count_rates(source: HintSource, kinds: npt.NDArray[np.int64], right: Floats) -> Floats:
    known = kinds != NONE
    size = len(source.priors)
    trials = np.bincount(kinds[known], minlength=size)
    hits = np.bincount(kinds[known], right[known], minlength=size)
    rates = (hits + ASSUMED_TRIALS * np.asarray(source.priors)) / (trials + ASSUMED_TRIALS)
    return np.clip(rates, MIN_RATE, MAX_RATE)


def _odds(logits: Sequence[Floats], guesses: Guesses) -> Floats:
    """Log odds of the kinds, [n, sources]; 0 where a source knew nothing. ``logits``: by source and kind."""
    columns = [own[kinds] for own, kinds in zip(logits, guesses.kinds.T, strict=True)]
    return np.where(guesses.kinds == NONE, 0.0, np.column_stack(columns))


def _regress(inputs: Floats, right: Floats, start: Floats, pull: float) -> Floats:
    """Logistic regression by Newton's method, drawn towards ``start``."""
    weights = start.copy()
    if len(right) < MIN_GUESSES:
        return weights
    for _ in range(MAX_STEPS):
        chances = 1.0 / (1.0 + np.exp(-inputs @ weights))
        slope = inputs.T @ (chances - right) + pull * (weights - start)
        curve = (inputs * (chances * (1.0 - chances))[:, None]).T @ inputs + pull * np.eye(len(weights))
        step = np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        weights -= step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
