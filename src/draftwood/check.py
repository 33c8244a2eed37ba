"""Is it lossless? Speculative against plain greedy decoding, prompt by prompt, and what each difference is.

In exact arithmetic the two give the same tokens. In floating point a position's logits depend, in their last digits, on
how many positions were computed beside it. Where two tokens are that close, either is the model's answer: a *numeric
tie*. To tell ties from errors the text up to the difference is run once more and the two tokens are looked up in the
model's own distribution. The *gap* is how far the worse of them lies below the best token, in logits. Below
``TIE_TOLERANCE`` of the dtype it is a tie; anything else is an error in the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.compare import PLAIN, first_difference
from draftwood.config import SamplingParams
from draftwood.engine import RequestStats
from draftwood.errors import OptionError, PromptError
from draftwood.llm import LLM

# How far two likely tokens may move apart, in logits, when positions are computed in groups of another size. Seen with
# SmolLM2-135M on the eager decoder (aarch64; steps of 1 against chunks of 8, the five likeliest tokens of a position):
# at most 7e-5 in float32 (233 positions), 0.044 in float16 and 0.29 in bfloat16 (95 each). The limits lie above that.
# They are wide in the 16-bit types, so an error can pass for a tie there: float32 is the stricter test. A target that
# computes every position alike (the fused CPU decoder) has no ties at all. GPUs and larger models were not measured.
TIE_TOLERANCE = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position where the outputs part. What comes after it follows from it."""

    position: int  # in the output
    speculative_id: int | None  # None: that output had ended
    plain_id: int | None
    gap: float | None  # logits between the best token and the worse of the two; None where one output had ended
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.gap < self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRecord:
    """One prompt's result."""

    index: int
    positions: int  # of the plain output
    difference: Difference | None
    stats: RequestStats  # of the speculative run

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "identical"
        return "tie" if self.difference.is_tie else "error"

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "verdict": self.verdict,
            "positions": self.positions,
            "difference": None if self.difference is None else asdict(self.difference),
            "acceptance_length": round(self.stats.acceptance_length, 4),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSummary:
    prompts: int
    positions: int
    identical: int
    ties: int
    errors: int
    acceptance_length: float  # over all prompts: tokens by cycles

    @classmethod
    def of(cls, records: Sequence[CheckRecord]) -> CheckSummary:
        verdicts = [record.verdict for record in records]
        cycles = sum(record.stats.cycles for record in records)
        return cls(
            prompts=len(records),
            positions=sum(record.positions for record in records),
            identical=verdicts.count("identical"),
            ties=verdicts.count("tie"),
            errors=verdicts.count("error"),
            acceptance_length=sum(record.stats.output_tokens for record in records) / cycles if cycles else 0.0,
        )


def check(llm: LLM, prompts: Iterable[Sequence[int]], params: SamplingParams | None = None) -> Iterator[CheckRecord]:
    """A record per prompt (token ids), as they are done."""
    params = params or SamplingParams()
    if not params.is_greedy or params.has_penalties or params.n != 1:
        raise OptionError(
            "The check compares plain greedy outputs",
            got="sampling, penalties or several samples",
            next_step="Leave temperature and penalties at their defaults.",
        )
    params = replace(params, logprobs=None)
    for index, prompt in enumerate(prompts):
        try:
            (speculative,) = llm.generate(list(prompt), params)
        except PromptError as error:
            what = f"Prompt {index + 1} cannot be checked: {error.what}"
            raise PromptError(what, got=error.got, allowed=error.allowed, next_step=error.next_step) from error
        (plain,) = llm.generate(list(prompt), params, drafter=PLAIN)
        yield CheckRecord(
            index=index,
            positions=len(plain.token_ids),
            difference=explain(llm, prompt, speculative.token_ids, plain.token_ids),
            stats=speculative.stats,
        )


def explain(llm: LLM, prompt: Sequence[int], speculative: Sequence[int], plain: Sequence[int]) -> Difference | None:
    """The first difference between two greedy outputs and how much it weighs; None if they are the same."""
    position = first_difference(speculative, plain)
    if position is None:
        return None
    pair = [ids[position] if position < len(ids) else None for ids in (speculative, plain)]
    return Difference(
        position=position,
        speculative_id=pair[0],
        plain_id=pair[1],
        gap=_gap(llm, [*prompt, *plain[:position]], pair),
        tolerance=TIE_TOLERANCE[str(llm.info.dtype).removeprefix("torch.")],
    )


def _gap(llm: LLM, context: list[int], pair: Sequence[int | None]) -> float | None:
    params = SamplingParams(max_tokens=1, logprobs=llm.info.vocab_size)
    (completion,) = llm.generate(context, params, drafter=PLAIN)
    assert completion.logprobs is not None
    values = dict(completion.logprobs[0].top)
    found = [values[token_id] for token_id in pair if token_id is not None]
    return max(values.values()) - min(found) if len(found) == len(pair) else None
