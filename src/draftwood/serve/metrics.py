"""Prometheus metrics of the server."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from draftwood.engine import RequestStats

SAMPLE_COUNTERS: dict[str, tuple[str, Callable[[RequestStats], float]]] = {
    "samples": ("Finished samples", lambda _: 1),
    "prompt_tokens": ("Prompt tokens", lambda stats: stats.prompt_tokens),
    "cached_tokens": ("Prompt tokens found in the KV cache", lambda stats: stats.reused_tokens),
    "output_tokens": ("Generated tokens", lambda stats: stats.output_tokens),
    "passes": ("Verification passes, counted once per request in the batch", lambda stats: stats.cycles),
    "drafted_tokens": ("Draft tokens verified in these passes", lambda stats: stats.drafted_nodes),
    "first_token_seconds": ("Seconds from admission to the first token", lambda stats: stats.first_token_seconds),
    "seconds": ("Seconds from admission to the last token", lambda stats: stats.total_seconds),
}
GAUGES = {
    "open_samples": "Running and queued samples",
    "open_connections": "Connections of clients",
    "held_body_bytes": "Bytes of request bodies that are being read",
}


class Metrics:
    """Counters of one server. Only the event loop's thread updates them."""

    def __init__(self, gauges: Mapping[str, Callable[[], int]]) -> None:
        """``gauges``: reads each of ``GAUGES``."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # they would double the number of time series
        registry = self.registry = CollectorRegistry()
        self._responses = Counter(
            "draftwood_requests", "HTTP responses by path and status", ["path", "status"], registry=registry
        )
        self._counters = {
            name: Counter(f"draftwood_{name}", text, registry=registry) for name, (text, _) in SAMPLE_COUNTERS.items()
        }
        for name, text in GAUGES.items():
            Gauge(f"draftwood_{name}", text, registry=registry).set_function(gauges[name])

    def count_response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def count_sample(self, stats: RequestStats) -> None:
        for name, (_, value_of) in SAMPLE_COUNTERS.items():
            self._counters[name].inc(value_of(stats))
