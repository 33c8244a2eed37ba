"""Compares speculative with plain decoding of one request, in one process on one loaded model."""

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
    """The fastest run of each kind."""

    speculative: TimedRun
    plain: TimedRun
    is_greedy: bool  # both must give the same tokens

    @property
    def speedup(self) -> float:
        """Decoding speed relative to plain decoding, without prefill."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain else 0.0

    @property
    def first_difference(self) -> int | None:
        """The first position with different tokens; None if there is none, or if the outputs are sampled."""
        if not self.is_greedy:
            return None
        return first_difference(self.speculative.token_ids, self.plain.token_ids)

    @property
    def identical(self) -> bool | None:
        """Whether both gave the same tokens; None for sampled outputs, which agree only in distribution."""
        return self.first_difference is None if self.is_greedy else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "speedup": round(self.speedup, 4),
            "identical": self.identical,
            "first_difference": self.first_difference,
            "tokens_per_second": round(self.speculative.stats.tokens_per_second, 2),
            "plain_tokens_per_second": round(self.plain.stats.tokens_per_second, 2),
        }


def check_params(params: SamplingParams) -> None:
    """Raise if the request cannot be compared. Needs no model."""
    if params.n != 1:
        raise OptionError("A comparison needs exactly one sample", got=f"n={params.n}", allowed=1)
    if not params.is_greedy and params.seed is None:
        raise OptionError("A comparison of sampled output needs a seed", next_step="Set one, for example seed 0.")


def warm_up(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Run both kinds briefly on the reversed prompt, so that drafters learn nothing about the real one."""
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
    """Run both kinds alternately. ``first`` is an earlier speculative run, after ``warm_up``. ``prediction`` is the
    predicted output for drafters.

    A drafter that remembers earlier requests finds the output in its memory in a repeat. So repeats count only if they
    take as many cycles as the first run.
    """
    check_params(params)
    runs: dict[str | None, list[TimedRun]] = {None: [] if first is None else [first], PLAIN: []}
    for done in range(len(runs[None]), 2 * REPEATS):
        report(progress, "comparing with plain decoding", done, 2 * REPEATS)
        drafter = PLAIN if done % 2 else None
        runs[drafter].append(_run(llm, prompt_ids, params, drafter, prediction))
    report(progress, "comparing with plain decoding", 1, 1)
    speculative_runs = runs[None]
    comparable = [run for run in speculative_runs if run.stats.cycles == speculative_runs[0].stats.cycles]
    return Comparison(speculative=_fastest(comparable), plain=_fastest(runs[PLAIN]), is_greedy=params.is_greedy)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position where two token sequences differ, or one of them ends."""
    if list(left) == list(right):
        return None
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _run(
    llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, drafter: str | None, prediction: str | None
) -> TimedRun:
    (completion,) = llm.generate(list(prompt_ids), params, drafter=drafter, prediction=prediction)
    return TimedRun(completion.token_ids, completion.stats)


def _fastest(runs: Sequence[TimedRun]) -> TimedRun:
    return max(runs, key=lambda run: run.stats.tokens_per_second)
