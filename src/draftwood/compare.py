"""Speculative against plain decoding of one request: side by side, in one process, on one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine import RequestStats
from draftwood.errors import OptionError
from draftwood.llm import LLM
from draftwood.progress import Progress, report

PLAIN = "plain"
WARM_UP_TOKENS = 8
REPEATS = 2


class TimedRun(NamedTuple):
    token_ids: Sequence[int]
    stats: RequestStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The best run of each kind."""

    speculative: TimedRun
    plain: TimedRun
    same_draws: bool  # whether the two had to give the same tokens: greedy decoding

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding, prefill left out on both sides."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain else 0.0

    @property
    def first_difference(self) -> int | None:
        """The first position with different tokens; None if there is none, or where sampling lets them differ."""
        if not self.same_draws:
            return None
        return first_difference(self.speculative.token_ids, self.plain.token_ids)

    @property
    def identical(self) -> bool | None:
        """Whether both gave the same tokens; None where they are draws, which share their distribution only."""
        return self.first_difference is None if self.same_draws else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "speedup": round(self.speedup, 4),
            "identical": self.identical,
            "first_difference": self.first_difference,
            "tokens_per_second": round(self.speculative.stats.tokens_per_second, 2),
            "plain_tokens_per_second": round(self.plain.stats.tokens_per_second, 2),
        }


def check_params(params: SamplingParams) -> None:
    """Refuses what cannot be compared; needs no model."""
    if params.n != 1:
        raise OptionError("A comparison is made with one sample", got=f"n={params.n}", allowed=1)
    if not params.is_greedy and params.seed is None:
        raise OptionError("A comparison of sampled output needs a seed", next_step="Give one, for instance seed 0.")


def warm_up(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Both kinds once, briefly. The prompt is turned round, so that no drafter learns anything about the real one."""
    check_params(params)
    brief = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
    for drafter in (None, PLAIN):
        llm.generate(list(reversed(prompt_ids)), brief, drafter=drafter)


def compare(
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    first: TimedRun | None = None,
    progress: Progress | None = None,
    *,
    prediction: str | None = None,
) -> Comparison:
    """Runs both kinds in turns. ``first`` is a speculative run that was made already, after ``warm_up``.
    ``prediction`` is what drafters are told to expect.

    A drafter that remembers earlier requests would find the answer in its memory when it sees the prompt again; repeats
    that need other cycles than the first run do not count.
    """
    check_params(params)
    runs: dict[str | None, list[TimedRun]] = {None: [] if first is None else [first], PLAIN: []}
    for done in range(len(runs[None]), 2 * REPEATS):
        report(progress, "comparing with plain decoding", done, 2 * REPEATS)
        drafter = PLAIN if done % 2 else None
        runs[drafter].append(_run(llm, prompt_ids, params, drafter, prediction))
    report(progress, "comparing with plain decoding", 1, 1)
    drafted = runs[None]
    fair = [run for run in drafted if run.stats.cycles == drafted[0].stats.cycles]
    return Comparison(speculative=_best(fair), plain=_best(runs[PLAIN]), same_draws=params.is_greedy)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two token sequences differ, or end apart."""
    if list(left) == list(right):
        return None
    together = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(together) if a != b), min(len(left), len(right)))


def _run(
    llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, drafter: str | None, prediction: str | None
) -> TimedRun:
    (completion,) = llm.generate(list(prompt_ids), params, drafter=drafter, prediction=prediction)
    return TimedRun(completion.token_ids, completion.stats)


def _best(runs: Sequence[TimedRun]) -> TimedRun:
    return max(runs, key=lambda run: run.stats.tokens_per_second)
