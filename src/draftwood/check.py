"""Checks that speculative decoding is lossless: compares it with plain greedy decoding and explains differences.

In exact arithmetic both give the same tokens. In floating point the last digits of a position's logits depend on how
many positions are computed in the same pass. If two tokens are that close, either is a correct output: a *numeric tie*.
To tell ties from errors, the text up to the difference is run again and both tokens are looked up in the model's
distribution. The *gap* is the logit of the best token minus that of the worse of the two. A gap below
``TIE_TOLERANCE`` of the dtype is a tie; anything else is a bug. An exact target has no ties: every difference is a bug.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from draftwood.compare import PLAIN, first_difference
from draftwood.config import SamplingParams
from draftwood.engine import RequestStats
from draftwood.errors import OptionError, PromptError
from draftwood.llm import LLM

# How much the logit difference of two likely tokens may change with the number of positions per pass. Measured with
# SmolLM2-135M on the eager decoder (aarch64; steps of 1 and chunks of 8, top five tokens of a position): at most 7e-5
# in float32 (233 positions), 0.044 in float16 and 0.29 in bfloat16 (95 each). The limits are above these. They are wide
# for 16-bit types, where an error can pass for a tie: float32 is the stricter test. Exact targets (the fused CPU
# decoder, GPUs with ``exact``) need none. GPUs without it and larger models were not measured.
TIE_TOLERANCE = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first position where the outputs differ. Later differences follow from it."""

    position: int  # in the output
    speculative_id: int | None  # None: this output had ended
    plain_id: int | None
    gap: float | None  # None if one output had ended
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.gap < self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRecord:
    """The result of one prompt."""

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
    acceptance_length: float  # over all prompts: tokens per cycle

    @classmethod
    def of(cls, records: Sequence[CheckRecord]) -> Self:
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
    """Check prompts (token ids); yield a record per prompt."""
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
    """Return the first difference of two greedy outputs with its gap; None if they are equal."""
    position = first_difference(speculative, plain)
    if position is None:
        return None
    pair = [ids[position] if position < len(ids) else None for ids in (speculative, plain)]
    return Difference(
        position=position,
        speculative_id=pair[0],
        plain_id=pair[1],
        gap=_gap(llm, [*prompt, *plain[:position]], pair),
        tolerance=0.0 if llm.info.is_exact else TIE_TOLERANCE[str(llm.info.dtype).removeprefix("torch.")],
    )


def _gap(llm: LLM, context: list[int], pair: Sequence[int | None]) -> float | None:
    params = SamplingParams(max_tokens=1, logprobs=llm.info.vocab_size)
    (completion,) = llm.generate(context, params, drafter=PLAIN)
    assert completion.logprobs is not None
    values = dict(completion.logprobs[0].top)
    found = [values[token_id] for token_id in pair if token_id is not None]
    return max(values.values()) - min(found) if len(found) == len(pair) else None
