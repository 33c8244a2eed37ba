"""Records of computed figures, built by metrics.py and shown by reports."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALL_TASKS = "*"  # the mean over the tasks


MAX_OTHER_LOAD = 0.1  # share of the cores that other processes may use during a run
_ROUNDING = 1.02  # a speed-up this much above tau is not yet suspicious


def is_above_tau(speedup: float | None, tau: float | None) -> bool:
    """Whether a speed-up is higher than drafting can explain: a pass yields tau tokens and takes no less time."""
    return speedup is not None and tau is not None and speedup > _ROUNDING * tau


class Interval(NamedTuple):
    """A figure with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One method on one task. None: unknown, such as a peer's draft time."""

    method: str
    task: str  # ALL_TASKS: mean of the tasks' figures; counts are sums
    prompts: int = 0  # distinct prompts; intervals resample these
    requests: int = 0
    errors: int = 0  # requests that failed
    output_tokens: int = 0
    tokens_per_second: Interval | None = None  # decode tokens over decode seconds
    speedup: Interval | None = None  # tokens_per_second relative to plain decoding, same prompts, same run
    whole_speedup: Interval | None = None  # speed-up of whole requests, prefill included
    tau: Interval | None = None  # tokens per pass
    nodes: float | None = None  # positions per pass
    first_token_ms: float | None = None  # median
    p_s: float | None = None
    p_t: float | None = None
    by_depth: list[float] = field(default_factory=list)  # acceptance at depth 1, 2, ..., among trees that reach it
    by_source: dict[str, float] = field(default_factory=dict)  # acceptance of a source's nodes below accepted nodes
    expected_by_source: dict[str, float] = field(default_factory=dict)  # what the drafter expected of these nodes
    calibration_error: float | None = None  # mean distance of expected from real acceptance, over bins of chances
    routes: dict[str, float] = field(default_factory=dict)  # shares of cycles
    cycle_ms: dict[str, float] = field(default_factory=dict)  # draft, verify, accept, other: milliseconds per cycle
    peak_bytes: int | None = None
    lossless: dict[str, int] = field(default_factory=dict)  # requests by verdict
    by_trajectories: dict[int, float] = field(default_factory=dict)  # tau over the first 1, 4, ... samples of a prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """All figures of a group of runs with the same model, machine and sampling."""

    title: str
    manifest: dict[str, Any]  # merged manifest of the runs
    runs: list[str]
    baseline: str | None  # the label of plain decoding, if it ran
    methods: list[dict[str, Any]]  # as in the manifest, in its order
    tasks: list[str]
    cells: dict[tuple[str, str], Cell]  # by (label, task), ALL_TASKS included
