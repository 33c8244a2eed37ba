"""What a forward pass costs on this machine: a profile per machine and model, kept in the cache.

The cost of n positions depends on the model, the number format, the processor and the context length. It is timed for
a few n at two context lengths and interpolated linearly. A target with fixed pass sizes (``TargetInfo.pass_sizes``) is
timed at those sizes; n positions then cost what the next larger size costs.

Other processes disturb readings. So all sizes take turns, the fastest of several readings counts, and an isotonic fit
by medians removes single outliers.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

import numpy as np
import numpy.typing as npt
import torch

from draftwood.disk import cache_home, new_file, parse_json
from draftwood.errors import DraftwoodError
from draftwood.progress import Progress, report
from draftwood.targets import DEFAULT_TOP_K, Segment, Target, TargetInfo, chain_parents

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # timed where passes may have any size
LARGEST_TREE = 128
LARGEST_TIMED = 512  # positions: the trees of a batch share a pass
CONTEXTS, GPU_CONTEXTS = (16, 512), (16, 2048)  # two points of a line; on a GPU a short context shows no slope
MAX_COST = 8.0  # relative to one position: beyond that no tree of that size pays
MIN_ROUNDS, MAX_ROUNDS = 3, 25  # each times every size once
ROUNDS_SECONDS = 0.6  # per context: after that only MIN_ROUNDS are completed
WARM_UP_SECONDS = 0.2
FORMAT, VERSION = "draftwood-costs", 2
KERNELS = 8  # raised when kernels change speed or timing changes, which makes old profiles invalid
LABEL = "timing the model on this machine"
ALMOST_NOTHING = 1e-9  # seconds


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of a pass over ``sizes`` positions at each of ``contexts``."""

    sizes: tuple[int, ...]  # [S] ascending from 1
    contexts: tuple[int, ...]  # [C] ascending
    seconds: tuple[tuple[float, ...], ...]  # [C, S]
    stepped: bool = False  # True: passes have only these sizes; smaller ones are padded to the next
    first: tuple[tuple[float, ...], ...] | None = None  # [C, S] the estimate it was refined from; None: measured

    @property
    def largest(self) -> int:
        """The largest tree to consider. Larger passes are timed for the trees of a batch."""
        return max(size for size in self.sizes if size <= LARGEST_TREE)

    def of(self, positions: int, context: int) -> npt.NDArray[np.float64]:
        """Seconds of passes over 1, 2, ... ``positions`` positions after ``context`` positions."""
        counts = np.arange(1, positions + 1)
        curve = _steps if self.stepped else _line
        rows = [curve(self.sizes, row, counts) for row in self.seconds]  # [C][positions]
        if len(rows) == 1:
            return rows[0]
        low = int(np.clip(np.searchsorted(self.contexts, context) - 1, 0, len(rows) - 2))
        share = (context - self.contexts[low]) / (self.contexts[low + 1] - self.contexts[low])
        mixed = rows[low] + share * (rows[low + 1] - rows[low])
        # Extrapolation amplifies noise; still, more positions never take less time.
        line: npt.NDArray[np.float64] = np.maximum.accumulate(np.maximum(mixed, ALMOST_NOTHING))
        return line

    def relative(self, context_index: int = 0) -> list[float]:
        """Costs of the sizes relative to one position."""
        row = self.seconds[context_index]
        return [seconds / row[0] for seconds in row]


def load_profile(info: TargetInfo) -> CostProfile | None:
    """The stored profile of this machine; None if there is none, it is damaged, or its sizes do not match."""
    try:
        content = parse_json(profile_path(info).read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return None
        profile = CostProfile(
            tuple(content["sizes"]),
            tuple(content["contexts"]),
            tuple(tuple(row) for row in content["seconds"]),
            content["stepped"],
            None if content.get("first") is None else tuple(tuple(row) for row in content["first"]),
        )
        return profile if _is_sound(profile) and _is_of(info, profile) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_profile(info: TargetInfo, profile: CostProfile) -> Path:
    path = profile_path(info)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine(info),
        "model": info.name,
        "sizes": profile.sizes,
        "contexts": profile.contexts,
        "seconds": profile.seconds,
        "stepped": profile.stepped,
        "first": profile.first,
    }
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path


def require_measured(target: Target, progress: Progress | None = None) -> None:
    """Measures and stores the profile, unless that was done before: in a benchmark costs must not change."""
    profile = load_profile(target.info)
    if profile is None or profile.first is not None:
        measured = measure_costs(target, progress=progress)
        if measured is not None:
            with suppress(DraftwoodError):  # without a writable cache costs are estimated
                save_profile(target.info, measured)


def measure_costs(
    target: Target, contexts: Sequence[int] | None = None, progress: Progress | None = None
) -> CostProfile | None:
    """Times growing passes until they cost too much. None if the cache has no room for that now."""
    info = target.info
    limit = min(info.context_length, target.num_slots)
    sizes = [size for size in timed_sizes(info) if size <= max(1, limit // 2)]
    room = limit - sizes[-1]
    contexts = sorted({min(context, room) for context in contexts or timed_contexts(info)})
    capacity = contexts[-1] + sizes[-1]
    if not target.can_open(capacity):
        return None
    sequence = target.open(capacity)
    work = _Work(len(contexts) * MIN_ROUNDS * sum(map(_work_of, sizes)), progress)
    rows: list[list[float]] = []
    try:
        for place, context in enumerate(contexts):
            _fill(target, sequence, context)
            rows.append(_time_sizes(target, sequence, sizes, work))
            sizes = sizes[: len(rows[-1])]
            work.reach((place + 1) / len(contexts))
    finally:
        target.close(sequence)
    seconds = fitted([row[: len(sizes)] for row in rows])
    return CostProfile(tuple(sizes), tuple(contexts), seconds, bool(info.pass_sizes))


def timed_sizes(info: TargetInfo) -> list[int]:
    """The target's pass sizes, up to what a batch of trees needs; else a standard selection."""
    return sorted({1, *(size for size in info.pass_sizes or SIZES if size <= LARGEST_TIMED)})


def timed_contexts(info: TargetInfo) -> tuple[int, ...]:
    return CONTEXTS if info.device.type == "cpu" else GPU_CONTEXTS


def fitted(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """[C, S] made monotonic: neither more positions nor a longer context take less time.

    Fitting along contexts keeps the fit along sizes: of two rows, the one with larger values has larger fits.
    """
    by_size = zip(*map(isotonic, rows), strict=True)
    return tuple(zip(*map(isotonic, by_size), strict=True))


def isotonic(values: Sequence[float]) -> list[float]:
    """Isotonic regression by medians: a single outlier is outvoted by its neighbours."""
    ends = range(len(values))
    return [
        max(min(median_low(values[start : end + 1]) for end in ends[place:]) for start in ends[: place + 1])
        for place in ends
    ]


def profile_path(info: TargetInfo) -> Path:
    sizes = (info.vocab_size, info.hidden_size, info.num_layers, info.num_parameters)
    how = (info.backend, str(info.dtype), info.is_exact)
    what = [KERNELS, info.name, info.architecture, sizes, how, machine(info)]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_home() / "profiles" / f"{digest}.json"


def machine(info: TargetInfo) -> str:
    """What the timing depends on, apart from the model."""
    if info.device.type == "cuda":
        return f"{torch.cuda.get_device_name(info.device)}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads, torch {torch.__version__}"


def processor() -> str:
    """The name of the CPU, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return f"{platform.machine()} {names[0] if names else ''}".strip()


def _line(sizes: Sequence[int], seconds: Sequence[float], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Linear between the sizes, extrapolated from the last two."""
    line: npt.NDArray[np.float64] = np.interp(counts, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        line += np.maximum(counts - sizes[-1], 0) * slope
    return line


def _steps(sizes: Sequence[int], seconds: Sequence[float], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The cost of the next size; beyond the last one in proportion, since such passes fill the device."""
    places = np.minimum(np.searchsorted(sizes, counts), len(sizes) - 1)
    steps: npt.NDArray[np.float64] = np.asarray(seconds)[places] * np.maximum(counts / sizes[-1], 1.0)
    return steps


def _is_of(info: TargetInfo, profile: CostProfile) -> bool:
    """Whether the target's pass sizes are still those that were timed."""
    known = timed_sizes(info)[: len(profile.sizes)]
    return list(profile.sizes) == known if info.pass_sizes else not profile.stepped


def _is_sound(profile: CostProfile) -> bool:
    if profile.first is not None and not _is_sound(replace(profile, seconds=profile.first, first=None)):
        return False
    rows = profile.seconds
    return (
        type(profile.stepped) is bool
        and all(type(number) is int for number in (*profile.sizes, *profile.contexts))
        and profile.sizes[:1] == (1,)
        and list(profile.sizes) == sorted(set(profile.sizes))
        and len(rows) == len(profile.contexts) > 0
        and list(profile.contexts) == sorted(set(profile.contexts))
        and all(len(row) == len(profile.sizes) and row[0] > 0.0 and list(row) == sorted(row) for row in rows)
        and all(np.isfinite(row).all() for row in rows)
    )


def _fill(target: Target, sequence: int, context: int) -> None:
    """Commits tokens until the sequence has ``context`` positions; their values do not matter."""
    missing = context - target.length(sequence)
    while missing > 0:
        size = min(missing, 256)
        target.forward([Segment(sequence, [0] * size, chain_parents(size), 0)])
        target.keep(sequence, range(size))
        missing -= size


class _Work:
    """Reports progress by the work that is left, not by the number of passes: large ones take longer."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        report(progress, LABEL, 0, total)

    def add(self, size: int) -> None:
        self._done = min(self._done + _work_of(size), self._total - 1)  # further rounds of quick passes add nothing
        report(self._progress, LABEL, self._done, self._total)

    def reach(self, share: float) -> None:
        self._done = max(self._done, round(share * self._total))
        report(self._progress, LABEL, self._done, self._total)


def _work_of(size: int) -> int:
    """A pass takes about as long as its positions, but at least as long as it takes to read the weights."""
    return max(size, 8)


def _time_sizes(target: Target, sequence: int, sizes: Sequence[int], work: _Work) -> list[float]:
    """The fastest pass of each size up to the first that costs too much."""
    row = _first_round(target, sequence, sizes, work)
    started = time.perf_counter()
    for number in range(1, MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - started > ROUNDS_SECONDS:
            break
        # Other processes only ever add time, to all sizes alike since they take turns.
        for place, size in enumerate(sizes[: len(row)]):
            row[place] = min(row[place], time_pass(target, sequence, size))
            if number < MIN_ROUNDS:
                work.add(size)
    return row


def _first_round(target: Target, sequence: int, sizes: Sequence[int], work: _Work) -> list[float]:
    row = [_warm_up(target, sequence)]
    for size in sizes[1:]:
        work.add(size)
        seconds = time_pass(target, sequence, size)
        if seconds > MAX_COST * row[0]:  # the first pass of a size may include preparation
            seconds = min(seconds, time_pass(target, sequence, size))
        row.append(seconds)
        if seconds > MAX_COST * row[0]:
            break
    return row


def _warm_up(target: Target, sequence: int) -> float:
    """The fastest pass over one position, repeated until clocks and caches have settled: the unit of all costs."""
    started = time.perf_counter()
    quickest = time_pass(target, sequence, 1)
    while time.perf_counter() - started < WARM_UP_SECONDS:
        quickest = min(quickest, time_pass(target, sequence, 1))
    return quickest


def time_pass(target: Target, sequence: int, size: int) -> float:
    """Seconds of one pass over a chain that continues the sequence."""
    segment = Segment(sequence, [0] * size, chain_parents(size), size)
    target.set_top(DEFAULT_TOP_K)
    started = time.perf_counter()
    target.forward([segment]).greedy_ids.tolist()
    return time.perf_counter() - started
