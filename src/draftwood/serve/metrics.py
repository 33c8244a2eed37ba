"""Counts for Prometheus, in its text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from draftwood.engine import RequestStats

HELP = {
    "requests_total": "Requests that were answered, by path and status",
    "samples_total": "Samples that ran to their end",
    "prompt_tokens_total": "Tokens of prompts",
    "cached_tokens_total": "Tokens of prompts that were found in the cache",
    "output_tokens_total": "Tokens that were answered",
    "passes_total": "Passes of the model that answered them, one request's share each",
    "drafted_tokens_total": "Guesses that those passes checked",
    "first_token_seconds_total": "Seconds from the start of a sample to its first token",
    "seconds_total": "Seconds from the start of a sample to its end",
}


class Metrics:
    """Kept by the event loop's thread alone."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = dict.fromkeys(list(HELP)[1:], 0)
        self._requests: Counter[tuple[str, int]] = Counter()

    def answered(self, path: str, status: int) -> None:
        self._requests[path, status] += 1

    def finished(self, stats: RequestStats) -> None:
        for name, value in {
            "samples_total": 1,
            "prompt_tokens_total": stats.prompt_tokens,
            "cached_tokens_total": stats.reused_tokens,
            "output_tokens_total": stats.output_tokens,
            "passes_total": stats.cycles,
            "drafted_tokens_total": stats.drafted_nodes,
            "first_token_seconds_total": stats.first_token_seconds,
            "seconds_total": stats.total_seconds,
        }.items():
            self._counts[name] += value

    def text(self, num_open: int) -> str:
        lines = [
            *_told("requests_total", [(f'{{path="{path}",status="{status}"}}', count)
                                      for (path, status), count in sorted(self._requests.items())]),
            *(line for name, count in self._counts.items() for line in _told(name, [("", count)])),
            "# HELP draftwood_open_samples Samples that run or wait",
            "# TYPE draftwood_open_samples gauge",
            f"draftwood_open_samples {num_open}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _told(name: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP draftwood_{name} {HELP[name]}"
    yield f"# TYPE draftwood_{name} counter"
    for labels, value in values:
        yield f"draftwood_{name}{labels} {value!r}"
