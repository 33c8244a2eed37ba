"""Costs of passes without a measurement: a request never waits for one.

A model that was not measured here starts with an estimate: the usual relative costs of a CPU or GPU, scaled by the
bytes of the weights, and corrected by a few passes that are timed first (at most about half a second). From then on
every pass of a single request is a reading that corrects the curve. Other processes slow down all sizes, whichever is
timed. So each reading corrects two things: the speed of the machine, which all sizes share and which follows within a
few readings, and what its own size costs beside the others, which follows slowly once it is known. The refined curve is
stored for the next run; `draftwood tune` replaces it with a measured one, which is not refined.

A busy machine may leave a stored curve that makes every guess look too expensive. Then nothing is drafted, so no
reading corrects the curve. So a run starts with relative costs of at most twice the usual ones, and with a quarter of a
second of passes that correct the curve.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from draftwood.errors import DraftwoodError
from draftwood.sizing.costs import CostProfile, load_profile, save_profile, time_pass, timed_contexts, timed_sizes
from draftwood.targets import Target, TargetInfo

# Relative costs by positions, where nothing was measured: a CPU without a matrix unit; a GPU, limited by memory.
CPU_SHAPE = ((1, 4, 8, 16, 32, 64), (1.0, 1.15, 1.8, 2.8, 4.6, 8.5))
GPU_SHAPE = ((1, 16, 64, 128, 512), (1.0, 1.12, 1.35, 1.8, 5.0))
MAX_DEVIATION = 2.0  # times these costs, at the start of a run
CPU_BANDWIDTH, GPU_BANDWIDTH = 10e9, 1e12  # bytes/s, to estimate a pass over one position
CONTEXT_WEIGHT = 3.0  # a byte of the KV cache takes as long as this many bytes of weights
PROBE_SECONDS = 0.5
PROBED = (1, 1, 8, 32, 4, 16, 2, 64)  # in this order; the first pass of all is slow
PROBE_ROUNDS = 3
CHECK_SECONDS = 0.25
CHECKED, CHECK_ROUNDS = (1, 4, 8, 16), 2  # of a stored curve, on a CPU
# Logarithms of relative costs:
OF_SPEED, OF_SIZE = 0.2, 0.02  # parts of the way to a reading: of the speed, and of a size that is known
MOST = math.log(1.5)  # a reading that is further away was disturbed, and counts as so far
LEAST = 1e-3  # times what was expected: below that, a reading is one of the clock
MIN_CHANGE = 0.04  # a smaller correction is not worth a new curve
KNOWN = 48.0  # readings after which a size is known; a probe or a check counts as so many
OF_CHECK = 0.5  # part of the way from a stored curve to the passes that check it: of sizes beside each other
MIN_READINGS = 16  # before the refined curve is stored
COST_STEP = 64  # positions: granularity of cost look-ups, in context and in size
MAX_LINES = 512  # look-ups that are kept
FIRST_PER_REQUEST, FIRST_PER_NODE = 20e-6, 1e-6  # seconds of the host, before the first cycle
PRIOR_SPREAD = 100.0  # weight of the first slope: sum of squared deviations of the number of guesses
HOST_DECAY = 0.98  # per cycle
MAX_OUTLIER = 4.0  # times the expected time: what a single slow cycle counts at most


Lines = dict[tuple[int, int, tuple[int, ...]], "array[float]"]  # by size and context, in steps, and ready sizes


class LiveCosts:
    """The costs of passes as far as they are known now. ``version`` increases whenever ``profile`` changes."""

    def __init__(self, profile: CostProfile, *, is_estimate: bool = False) -> None:
        """``is_estimate``: not even the order of magnitude is known, so that the first reading sets it."""
        self.profile = self._base = profile
        self.version = 0
        self.readings = 0  # since it was stored
        self.is_estimate = is_estimate
        self._speed = 0.0  # logarithm of all costs, relative to the base
        self._own: dict[int, float] = {}  # by size that was timed: the logarithm of its cost, less ``_speed``
        self._weights: dict[int, float] = {}  # by size that was timed: the number of readings
        self._built = dict.fromkeys(profile.sizes, 0.0)  # by size: ``_speed`` and ``_own`` in the current profile
        self._shown = dict(self._built)  # what that profile says: no size takes less time than a smaller one
        self.host = HostCosts()
        self._lines: Lines = {}  # of ``seconds``, for the current version
        self._fixed_lines: Lines = {}
        self._lines_version = 0

    @property
    def largest(self) -> int:
        """Positions of the largest tree to consider."""
        return self.profile.largest

    def largest_pass(self, max_requests: int) -> int:
        """Positions of the largest pass whose time is of interest: the trees of several requests share one."""
        return min(self.largest * max_requests, self.profile.sizes[-1])

    @property
    def is_measured(self) -> bool:
        return self.profile.first is None

    @property
    def fixed(self) -> CostProfile:
        """The curve for drawn trees: it never changes, or a seed would not determine the output."""
        first = self.profile.first
        return self.profile if first is None else replace(self.profile, seconds=first)

    def seconds(self, positions: int, context: int, ready: tuple[int, ...] = ()) -> array[float]:
        """Seconds of passes over 1, 2, ... at least ``positions`` positions.

        ``ready``: sizes that can run at once. Others run as the next of these, so they cost as much.
        """
        if self._lines_version != self.version:
            self._lines_version = self.version
            self._lines.clear()
        return _look_up(self._lines, self.profile, positions, context, ready)

    def compare_halves(self, positions: int) -> float:
        """How long two passes over half of the positions take, relative to one over all."""
        seconds = self.seconds(positions, 0)
        return 2.0 * seconds[max(positions // 2, 1) - 1] / seconds[positions - 1]

    def fixed_seconds(self, positions: int, context: int) -> array[float]:
        """As ``seconds``, by the ``fixed`` curve."""
        return _look_up(self._fixed_lines, self.fixed, positions, context)

    def note(self, positions: int, ratio: float) -> None:
        """Takes a reading: the time of a pass over ``positions``, relative to what the current profile says."""
        sizes = self.profile.sizes
        if self.is_measured or positions > sizes[-1]:
            return
        size = sizes[bisect_left(sizes, positions)]
        own, weight = self._own.get(size, self._built[size] - self._speed), self._weights.get(size, 0.0)
        off = self._shown[size] + math.log(max(ratio, LEAST)) - self._speed - own
        self.readings += 1
        if self.is_estimate:
            self.is_estimate = False
            self._speed += off
        else:
            off = min(max(off, -MOST), MOST)
            share = max(1.0 / (weight + 2.0), OF_SIZE)
            self._speed += (1.0 - share) * OF_SPEED * off
            own += share * off
        self._own[size], self._weights[size] = own, weight + 1.0
        if abs(self._speed + own - self._built[size]) > MIN_CHANGE:
            self._rebuild()

    def start(self, seconds: dict[int, float]) -> None:
        """Corrects the estimate by the first readings, by size. The result is what ``fixed`` returns from now on."""
        if seconds:
            self.is_estimate = False
            self._take(seconds, 1.0)
        self.profile = replace(self.profile, first=self.profile.seconds)

    def check(self, seconds: dict[int, float]) -> None:
        """Corrects a stored curve by readings, by size."""
        if seconds:
            self._take(seconds, OF_CHECK)

    def _take(self, seconds: dict[int, float], share: float) -> None:
        """Follows these passes: the speed all of the way, what sizes cost beside each other by ``share``."""
        line = self._base.of(self._base.sizes[-1], 0)
        off = {size: math.log(max(taken / float(line[size - 1]), LEAST)) for size, taken in seconds.items()}
        self._speed = statistics.median(off.values())
        self._own = {size: share * (own - self._speed) for size, own in off.items()}
        self._weights = dict.fromkeys(off, KNOWN)
        self._rebuild()

    def _rebuild(self) -> None:
        """What sizes without readings cost is between those of their neighbours."""
        sizes, known = self._base.sizes, sorted(self._own)
        logs = self._speed + np.interp(np.log(sizes), np.log(known), [self._own[size] for size in known])
        base = np.asarray(self._base.seconds)  # [C, S]
        rows = base * np.exp(logs)
        # A pass takes no longer than a larger one: where readings say otherwise, the truth is between them.
        least = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1]
        rows = np.sqrt(least * np.maximum.accumulate(rows, axis=1))
        self._built = dict(zip(sizes, logs.tolist(), strict=True))
        self._shown = dict(zip(sizes, np.log(rows / base).mean(axis=0).tolist(), strict=True))
        self.profile = replace(self.profile, seconds=tuple(map(tuple, rows.tolist())))
        self.version += 1


class HostCosts:
    """Seconds of a cycle outside the pass: for each request, and for each guess in its tree.

    A line through recent cycles: seconds per request over guesses per request. It starts as a rough guess, which counts
    like a few cycles and holds the slope as long as all cycles have the same number of guesses.
    """

    def __init__(self) -> None:
        self.per_request, self.per_node = FIRST_PER_REQUEST, FIRST_PER_NODE
        self._weight, self._nodes, self._seconds = 1.0, 0.0, FIRST_PER_REQUEST  # decayed: cycles, means
        self._spread, self._rise = PRIOR_SPREAD, PRIOR_SPREAD * FIRST_PER_NODE  # of nodes; of nodes and seconds

    def note(self, num_requests: int, num_nodes: int, seconds: float) -> None:
        """Takes the reading of one cycle; ``num_nodes``: guesses, the roots not counted."""
        nodes, taken = num_nodes / num_requests, seconds / num_requests
        taken = min(taken, MAX_OUTLIER * (self.per_request + self.per_node * nodes))  # a disturbed cycle counts little
        self._weight = HOST_DECAY * self._weight + 1.0
        share = 1.0 / self._weight
        by_nodes, by_seconds = nodes - self._nodes, taken - self._seconds
        self._nodes += share * by_nodes
        self._seconds += share * by_seconds
        self._spread = PRIOR_SPREAD + HOST_DECAY * (self._spread - PRIOR_SPREAD) + by_nodes * (nodes - self._nodes)
        first = PRIOR_SPREAD * FIRST_PER_NODE
        self._rise = first + HOST_DECAY * (self._rise - first) + by_nodes * (taken - self._seconds)
        self.per_node = max(self._rise / self._spread, 0.0)
        self.per_request = max(self._seconds - self.per_node * self._nodes, 0.0)


def _look_up(
    known: Lines, profile: CostProfile, positions: int, context: int, ready: tuple[int, ...] = ()
) -> array[float]:
    """Seconds of passes over 1, 2, ... positions; cached by context length in steps."""
    key = (-(-positions // COST_STEP), context // COST_STEP, ready)
    line = known.get(key)
    if line is None:
        if len(known) >= MAX_LINES:
            known.clear()
        size = key[0] * COST_STEP
        costs = profile.of(max(size, *ready) if ready else size, context)
        if ready:
            counts = np.arange(1, len(costs) + 1)
            next_ready = np.append(ready, len(costs) + 1)[np.searchsorted(ready, counts)]
            costs = costs[np.where(next_ready <= len(costs), next_ready, counts) - 1]
        line = known[key] = array("d", costs[:size].tolist())
    return line


def known_costs(target: Target) -> LiveCosts:
    """The stored costs of this machine and model, or an estimate. Runs no pass."""
    stored = load_profile(target.info)
    if stored is not None:
        return LiveCosts(_believable(stored, target.info))
    room = min(target.info.context_length, target.num_slots)
    return LiveCosts(estimate_costs(target.info, room), is_estimate=True)


def probe_costs(target: Target, costs: LiveCosts, largest: int) -> None:
    """Times a few passes over up to ``largest`` positions, for which the target is prepared, if ``costs`` were not
    measured. If they are a mere estimate, the result is stored."""
    sizes = tuple(size for size in costs.profile.sizes if size <= largest)
    if costs.is_estimate:
        costs.start(_probe(target, costs.profile, PROBE_SECONDS, _probed_sizes(sizes)))
        _store(target.info, costs)
    elif not costs.is_measured:
        # Those of batches may never have been timed: an engine for single requests leaves them as they are. On a GPU
        # all sizes together take milliseconds.
        known = [size for size in sizes if size in CHECKED or size > costs.largest or costs.profile.stepped]
        # The first pass of all is slow.
        costs.check(_probe(target, costs.profile, CHECK_SECONDS, known[:1] + known * CHECK_ROUNDS))


def keep_costs(info: TargetInfo, costs: LiveCosts) -> None:
    """Stores refined costs, unless they hardly changed or a measurement was stored meanwhile."""
    if costs.is_measured or costs.readings < MIN_READINGS:
        return
    stored = load_profile(info)
    if stored is None or stored.first is not None:
        _store(info, costs)


def estimate_costs(info: TargetInfo, limit: int) -> CostProfile:
    """Costs by the kind of device and the size of the model alone, for a cache of ``limit`` positions."""
    sizes = tuple(size for size in timed_sizes(info) if size <= max(1, limit // 2))
    contexts = tuple(sorted({min(context, max(limit - sizes[-1], 1)) for context in timed_contexts(info)}))
    on_cpu = info.device.type == "cpu"
    shape = _usual_shape(info, sizes)
    weight_bytes = info.num_parameters * (info.dtype.itemsize if info.quantize is None else 1)
    unit = max(weight_bytes, 1) / (CPU_BANDWIDTH if on_cpu else GPU_BANDWIDTH)
    slope = CONTEXT_WEIGHT * info.cache_bytes_per_token / max(weight_bytes, 1)
    rows = [tuple((unit * (1.0 + slope * context) * shape).tolist()) for context in contexts]
    return CostProfile(sizes, contexts, tuple(rows), bool(info.pass_sizes), first=tuple(rows))


def _usual_shape(info: TargetInfo, sizes: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Relative costs of these sizes on such a device."""
    return np.interp(sizes, *(CPU_SHAPE if info.device.type == "cpu" else GPU_SHAPE))


def _believable(profile: CostProfile, info: TargetInfo) -> CostProfile:
    """The profile with costs relative to one position of at most ``MAX_DEVIATION`` times the usual ones; a measured one
    as it is."""
    if profile.first is None:
        return profile
    usual = _usual_shape(info, profile.sizes)  # [S]

    def bound(seconds: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        rows = np.array(seconds)  # [C, S]
        rows[:, 1:] = np.minimum(rows[:, 1:], MAX_DEVIATION * rows[:, :1] * usual[1:])
        return tuple(map(tuple, rows.tolist()))

    return replace(profile, seconds=bound(profile.seconds), first=bound(profile.first))


def _probe(target: Target, profile: CostProfile, limit: float, sizes: Iterable[int]) -> dict[int, float]:
    """The quickest passes of these sizes, as many as fit into ``limit`` seconds. Empty if one would not."""
    expected = dict(zip(profile.sizes, profile.seconds[0], strict=True))
    scale, found = 1.0, dict[int, float]()
    if not target.can_open(profile.sizes[-1]):
        return found
    sequence = target.open(profile.sizes[-1])
    try:
        end = time.perf_counter() + limit
        for size in sizes:
            if time.perf_counter() + scale * expected[size] > end:
                continue
            seconds = time_pass(target, sequence, size)
            found[size] = min(found.get(size, math.inf), seconds)
            scale = found[size] / expected[size]
    finally:
        target.close(sequence)
    usual = MAX_DEVIATION * _usual_shape(target.info, profile.sizes)
    most = dict(zip(profile.sizes, (found.get(1, math.inf) * usual).tolist(), strict=True))
    return {size: min(seconds, most[size]) for size, seconds in found.items()}


def _probed_sizes(sizes: tuple[int, ...]) -> Iterator[int]:
    """From coarse to fine, several times."""
    order = [size for size in PROBED if size in sizes]
    order += [size for size in sizes if size not in order]
    for _ in range(PROBE_ROUNDS):
        yield from order


def _store(info: TargetInfo, costs: LiveCosts) -> None:
    costs.readings = 0
    with suppress(DraftwoodError):  # without a writable cache the next run estimates again
        save_profile(info, costs.profile)
