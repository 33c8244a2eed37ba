"""Prometheus metrics of the server."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from draftwood.engine import Reliability, RequestStats

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
SOURCE_COUNTERS: dict[str, tuple[str, Callable[[Reliability], float]]] = {
    "tried_guesses": ("Guesses by source, of those whose parent was accepted", lambda own: own.tried),
    "expected_guesses": ("How many of them the drafter expected to be accepted", lambda own: own.expected),
    "accepted_guesses": ("How many of them were accepted", lambda own: own.accepted),
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "queue_seconds": ("Seconds from the request to admission, of each sample", SECONDS),
    "time_to_first_token_seconds": ("Seconds from the request to the first token, of each sample", SECONDS),
    "time_per_token_seconds": (
        "Seconds per token after the first pass, of each finished sample",
        (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    ),
    "tokens_per_pass": (
        "Tokens per verification pass, of each finished sample",
        (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
    ),
}
GAUGES = {
    "open_samples": "Running and queued samples",
    "open_connections": "Connections of clients",
    "held_body_bytes": "Bytes of request bodies that are being read",
    "cache_tokens": "KV cache capacity in tokens",
    "cache_bytes": "KV cache capacity in bytes; on a CPU, memory is taken when a part is first used",
    "reserved_cache_tokens": "KV cache tokens that running samples have reserved",
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
        self._by_source = {
            name: Counter(f"draftwood_{name}", text, ["source"], registry=registry)
            for name, (text, _) in SOURCE_COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"draftwood_{name}", text, registry=registry, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for name, text in GAUGES.items():
            Gauge(f"draftwood_{name}", text, registry=registry).set_function(gauges[name])

    def count_response(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def count_start(self, seconds: float, stats: RequestStats) -> None:
        """The first token of a sample has come, ``seconds`` after its request."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._histograms["queue_seconds"].observe(max(0.0, seconds - stats.first_token_seconds))

    def count_sample(self, stats: RequestStats) -> None:
        self._histograms["tokens_per_pass"].observe(stats.acceptance_length)
        # The tokens of the first pass are not counted on their own: they are taken for as many as in the mean.
        num_after_first = stats.output_tokens - stats.output_tokens / stats.cycles if stats.cycles else 0.0
        if num_after_first:
            seconds = stats.total_seconds - stats.first_token_seconds
            self._histograms["time_per_token_seconds"].observe(seconds / num_after_first)
        for name, (_, value_of) in SAMPLE_COUNTERS.items():
            self._counters[name].inc(value_of(stats))
        for source, own in stats.calibration.sources.items():
            for name, (_, count_of) in SOURCE_COUNTERS.items():
                self._by_source[name].labels(source).inc(count_of(own))
