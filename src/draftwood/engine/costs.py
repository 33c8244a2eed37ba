"""What a forward pass costs on this machine: measured once per machine and model, kept in the cache.

The cost of n positions depends on the model, the number format, the processor and the length of the context. It is
timed for a few n at a few lengths; between and beyond them it is taken as linear, which it nearly is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from draftwood.errors import DraftwoodError
from draftwood.files import new_file
from draftwood.target.base import Segment, Target, TargetInfo, chain_parents
from draftwood.target.store import Progress, cache_home, report

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (16, 512)  # enough for a line
MAX_COST = 8.0  # times a single position: beyond that no tree of that size pays
REPEATS = 3
WARM_UP_SECONDS = 0.2  # clocks and caches settle
FORMAT, VERSION = "draftwood-costs", 1
LABEL = "timing the model on this machine"
ALMOST_NOTHING = 1e-9  # seconds


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of a pass over ``sizes`` positions at each of ``contexts``."""

    sizes: tuple[int, ...]  # [S] ascending from 1
    contexts: tuple[int, ...]  # [C] ascending
    seconds: tuple[tuple[float, ...], ...]  # [C, S]

    @property
    def largest(self) -> int:
        """The largest tree worth thinking of."""
        return self.sizes[-1]

    def of(self, positions: int, context: int) -> npt.NDArray[np.float64]:
        """Seconds of passes over 1, 2, ... ``positions`` positions with that much context behind them."""
        counts = np.arange(1, positions + 1)
        rows = [_line(self.sizes, row, counts) for row in self.seconds]  # [C][positions]
        if len(rows) == 1:
            return rows[0]
        low = int(np.clip(np.searchsorted(self.contexts, context) - 1, 0, len(rows) - 2))
        share = (context - self.contexts[low]) / (self.contexts[low + 1] - self.contexts[low])
        mixed = rows[low] + share * (rows[low + 1] - rows[low])
        # Far beyond the last context noise is multiplied; still, more positions never take less time.
        line: npt.NDArray[np.float64] = np.maximum.accumulate(np.maximum(mixed, ALMOST_NOTHING))
        return line

    def relative(self, context_index: int = 0) -> list[float]:
        """The sizes' costs beside a single position's."""
        row = self.seconds[context_index]
        return [seconds / row[0] for seconds in row]


def load_profile(info: TargetInfo) -> CostProfile | None:
    """What was measured before on this machine; None if nothing was, or nothing that can be read."""
    try:
        content = json.loads(profile_path(info).read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            return None
        profile = CostProfile(
            tuple(content["sizes"]), tuple(content["contexts"]), tuple(tuple(row) for row in content["seconds"])
        )
        return profile if _is_sound(profile) else None
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
    }
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path


def known_costs(target: Target, progress: Progress | None = None) -> CostProfile | None:
    """The profile of this machine and model: from the cache, else measured now and kept. None: no room to measure."""
    profile = load_profile(target.info)
    if profile is None:
        profile = measure_costs(target, progress=progress)
        if profile is not None:
            with suppress(DraftwoodError):  # a cache that cannot be written costs the next run some seconds, no more
                save_profile(target.info, profile)
    return profile


def measure_costs(
    target: Target, contexts: Sequence[int] = CONTEXTS, progress: Progress | None = None
) -> CostProfile | None:
    """Times growing passes until they cost too much. None if the cache has no room for that now."""
    limit = min(target.info.context_length, target.num_slots)
    sizes = [size for size in SIZES if size <= max(1, limit // 2)]
    contexts = [context for context in contexts if context + sizes[-1] <= limit] or [0]
    capacity = contexts[-1] + sizes[-1]
    if not target.can_open(capacity):
        return None
    sequence = target.open(capacity)
    rows: list[list[float]] = []
    try:
        for number, context in enumerate(contexts):
            report(progress, LABEL, number, len(contexts))
            _fill(target, sequence, context)
            row = _time_sizes(target, sequence, sizes)
            # A longer context never takes less time: that would be noise, and a line through it would reach 0.
            rows.append([max(pair) for pair in zip(row, rows[-1], strict=False)] if rows else row)
            sizes = sizes[: len(row)]
    finally:
        target.close(sequence)
    report(progress, LABEL, len(contexts), len(contexts))
    return CostProfile(tuple(sizes), tuple(contexts), tuple(tuple(row[: len(sizes)]) for row in rows))


def profile_path(info: TargetInfo) -> Path:
    sizes = (info.vocab_size, info.hidden_size, info.num_layers, info.num_parameters)
    what = [info.name, info.architecture, sizes, info.backend, str(info.dtype), machine(info)]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_home() / "profiles" / f"{digest}.json"


def machine(info: TargetInfo) -> str:
    """What the timing depends on beside the model."""
    if info.device.type == "cuda":
        return f"{torch.cuda.get_device_name(info.device)}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} threads, torch {torch.__version__}"


def processor() -> str:
    """The name of the CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return f"{platform.machine()} {names[0] if names else ''}".strip()


def _line(sizes: Sequence[int], seconds: Sequence[float], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Linear between the sizes, and on beyond the last two."""
    line: npt.NDArray[np.float64] = np.interp(counts, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        line += np.maximum(counts - sizes[-1], 0) * slope
    return line


def _is_sound(profile: CostProfile) -> bool:
    rows = profile.seconds
    return (
        all(type(number) is int for number in (*profile.sizes, *profile.contexts))
        and profile.sizes[:1] == (1,)
        and list(profile.sizes) == sorted(set(profile.sizes))
        and len(rows) == len(profile.contexts) > 0
        and list(profile.contexts) == sorted(set(profile.contexts))
        and all(len(row) == len(profile.sizes) and row[0] > 0.0 and list(row) == sorted(row) for row in rows)
        and all(np.isfinite(row).all() for row in rows)
    )


def _fill(target: Target, sequence: int, context: int) -> None:
    """Commits tokens until the sequence is that long; which ones makes no difference to the time."""
    missing = context - target.length(sequence)
    while missing > 0:
        size = min(missing, 256)
        target.forward([Segment(sequence, [0] * size, chain_parents(size), 0)])
        target.keep(sequence, range(size))
        missing -= size


def _time_sizes(target: Target, sequence: int, sizes: Sequence[int]) -> list[float]:
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        _forward(target, sequence, 1)
    row: list[float] = []
    for size in sizes:
        # The quickest of a few: what else runs on the machine only ever adds. A dip is noise.
        best = min(_forward(target, sequence, size) for _ in range(REPEATS if size > 1 else 3 * REPEATS))
        row.append(max(best, row[-1] if row else 0.0))
        if row[-1] > MAX_COST * row[0]:
            break
    return row


def _forward(target: Target, sequence: int, size: int) -> float:
    segment = Segment(sequence, [0] * size, chain_parents(size), size)
    started = time.perf_counter()
    target.forward([segment]).greedy_ids.tolist()
    return time.perf_counter() - started
