"""Counts and times of a response: OpenAI's usage, llama.cpp's timings, and the statistics of drafting."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from draftwood.serve.formats.base import Json, SampleOutput


class Counts(NamedTuple):
    """Token counts of a response. Samples of one prompt count its tokens once."""

    prompt: int
    cached: int
    output: int
    passes: int
    drafted: int  # guesses that the target checked
    accepted: int  # of these

    @classmethod
    def of(cls, samples: Sequence[SampleOutput]) -> "Counts":
        prompts = [sample.stats for sample in _first_samples(samples)]
        return cls(
            sum(each.prompt_tokens for each in prompts),
            sum(each.reused_tokens for each in prompts),
            sum(sample.stats.output_tokens for sample in samples),
            sum(sample.stats.cycles for sample in samples),
            sum(sample.stats.drafted_nodes for sample in samples),
            sum(sum(sample.stats.accepted_by_source.values()) for sample in samples),
        )


def usage(samples: Sequence[SampleOutput]) -> Json:
    counts = Counts.of(samples)
    num_predicted = sum(len(sample.job.prediction) for sample in samples)
    num_used = sum(count_used(sample.job.prediction, sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.output,
        "total_tokens": counts.prompt + counts.output,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_used,
            "rejected_prediction_tokens": num_predicted - num_used,
        },
    }


def drafting(samples: Sequence[SampleOutput]) -> Json:
    """Returned as ``draftwood``, next to the usage."""
    counts = Counts.of(samples)
    num_passes = counts.passes
    return {
        "passes": num_passes,
        "tokens_per_pass": round(counts.output / num_passes, 4) if num_passes else 0.0,
        "positions_per_pass": round((counts.drafted + num_passes) / max(num_passes, 1), 4),
        "tokens_per_second": round(max((sample.stats.tokens_per_second for sample in samples), default=0.0), 2),
    }


def timings(samples: Sequence[SampleOutput]) -> Json:
    """As llama.cpp's server returns them. Times of several samples add up, as if they had run one after another."""
    counts, stats = Counts.of(samples), [sample.stats for sample in samples]
    num_read = counts.prompt - counts.cached
    prompt_ms = 1000 * sum(each.prefill_seconds for each in stats)
    predicted_ms = 1000 * sum(each.total_seconds - each.prefill_seconds for each in stats)
    return {
        "cache_n": counts.cached,
        "prompt_n": num_read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _ratio(prompt_ms, num_read),
        "prompt_per_second": _ratio(1000 * num_read, prompt_ms),
        "predicted_n": counts.output,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": _ratio(predicted_ms, counts.output),
        "predicted_per_second": _ratio(1000 * counts.output, predicted_ms),
        "draft_n": counts.drafted,
        "draft_n_accepted": counts.accepted,
    }


def summarize(samples: Sequence[SampleOutput]) -> Json:
    """What the request log says about a response."""
    counts = Counts.of(samples)
    return {
        "samples": len(samples),
        "prompt_tokens": counts.prompt,
        "cached_tokens": counts.cached,
        "output_tokens": counts.output,
        "passes": counts.passes,
    }


def count_used(prediction: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of the prediction appear in the output, in order.

    The output follows the prediction token by token. Where they part, it goes on at the next place of the prediction
    that has the next two tokens of the output.
    """
    places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for place, pair in enumerate(pairwise(prediction)):
        places[pair].append(place)
    num_used = place = 0
    for index, token in enumerate(output):
        if place >= len(prediction):
            break
        if token != prediction[place]:
            later = places.get(tuple(output[index : index + 2]), [])  # type: ignore[arg-type]
            found = bisect_left(later, place)
            if found == len(later):
                continue
            place = later[found]
        num_used += 1
        place += 1
    return num_used


def _first_samples(samples: Sequence[SampleOutput]) -> list[SampleOutput]:
    """The first sample of each prompt."""
    return list({id(sample.job): sample for sample in reversed(samples)}.values())


def _ratio(number: float, by: float) -> float:
    return round(number / by, 3) if by else 0.0
