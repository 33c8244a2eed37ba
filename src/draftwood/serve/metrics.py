"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from draftwood.engine import RequestStats

SAMPLE_COUNTERS = {
    "samples": "Finished samples",
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Prompt tokens found in the KV cache",
    "output_tokens": "Generated tokens",
    "passes": "Verification passes, counted once per request in the batch",
    "drafted_tokens": "Draft tokens verified in these passes",
    "first_token_seconds": "Seconds from admission of a sample to its first token",
    "seconds": "Seconds from admission of a sample to its end",
}


class Metrics:
    """Counters of one server. Only the event loop's thread updates them."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the number of time series
        self.registry = CollectorRegistry()
        self._responses = Counter(
            "draftwood_requests", "HTTP responses by path and status", ["path", "status"], registry=self.registry
        )
        self._counters = {
            name: Counter(f"draftwood_{name}", text, registry=self.registry) for name, text in SAMPLE_COUNTERS.items()
        }
        Gauge("draftwood_open_samples", "Running and queued samples", registry=self.registry).set_function(num_open)

    def count_response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def count_sample(self, stats: RequestStats) -> None:
        for name, value in {
            "samples": 1,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.reused_tokens,
            "output_tokens": stats.output_tokens,
            "passes": stats.cycles,
            "drafted_tokens": stats.drafted_nodes,
            "first_token_seconds": stats.first_token_seconds,
            "seconds": stats.total_seconds,
        }.items():
            self._counters[name].inc(value)
