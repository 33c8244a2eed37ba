"""Bootstrap confidence intervals over prompts.

The prompts of a task are a sample; another sample would give other figures. The bootstrap resamples prompts with
replacement. Each resample has n - 1 of n prompts: with n, intervals of few prompts would be too narrow by a factor of
sqrt((n - 1) / n). All requests of one prompt form a *cluster* and are resampled together, for all methods, so that the
difficulty of a prompt cancels in the ratio of a method to plain decoding.

Times also vary between requests of one prompt: repeats and turns. For timings the requests of every drawn prompt are
resampled too (``TimedClusters``), so that a single prompt with repeats has an interval as well.

A figure is represented by its *draws*, an array ``[1 + R]``: the figure itself, then its value in every resample.
Arithmetic on draws is arithmetic on figures; ``interval`` comes last.

A single request shows no variation: its interval has zero width, so a report must state the number of prompts. With two
to four prompts intervals are too narrow as well.
"""

import math
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.bench.figures.summary import Interval

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Counts = npt.NDArray[np.uint8]
ClusteredRow = tuple[Hashable, tuple[float, ...]]

RESAMPLES = 2000
CONFIDENCE = 0.95
_MAX_BLOCK_INDICES = 1 << 20  # indices per block: 8 MB
_MAX_CACHED_COUNTS = 1 << 24  # counts cached for the next figure of the same prompts: one byte each


class TimedClusters(NamedTuple):
    """Timed requests by prompt: one table ``[requests, K]`` per cluster."""

    requests: list[Array]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_columns(self) -> int:
        return int(self.requests[0].shape[1])


def group_timings(rows: Iterable[ClusteredRow]) -> TimedClusters | None:
    """Group the rows by cluster, independent of their order; None without rows."""
    clusters: dict[Hashable, list[tuple[float, ...]]] = {}
    for cluster, values in rows:
        clusters.setdefault(cluster, []).append(values)
    if not clusters:
        return None
    tables = [_sort_rows(np.array(found, dtype=np.float64)) for found in clusters.values()]
    return TimedClusters(sorted(tables, key=lambda table: (len(table), *table.sum(axis=0))))


def resample_timings(clusters: TimedClusters, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """[1 + R, K]: like ``resample_sums``, with the requests of every drawn prompt resampled too."""
    tables = clusters.requests
    sums = np.zeros((1 + resamples, clusters.num_columns))
    sums[0] = [math.fsum(column) for column in zip(*(row for table in tables for row in table), strict=True)]
    random = np.random.default_rng([zlib.crc32(stratum.encode()), len(tables), 1])
    counts = _cached_counts if len(tables) * resamples <= _MAX_CACHED_COUNTS else _count_draws
    for first, times in counts(len(tables), stratum, resamples):
        block = sums[1 + first : 1 + first + len(times)]
        for drawn, table in zip(times.T.astype(np.int64), tables, strict=True):
            block += _resample_requests(random, drawn, table)
    return sums


def _resample_requests(random: np.random.Generator, drawn: Indices, table: Array) -> Array:
    """[R, K]: the sums of a prompt's requests, ``drawn`` times each, with the requests drawn again each time.

    As with prompts, one request less is drawn than there are, and the sums are scaled.
    """
    size = len(table)
    if size == 1:
        return drawn[:, None] * table
    chosen = random.multinomial(drawn * (size - 1), np.full(size, 1.0 / size))  # [R, requests]
    sums: Array = chosen @ table * (size / (size - 1))
    return sums


def cluster_table(rows: Iterable[ClusteredRow]) -> Array | None:
    """Sum the columns by cluster, [C, K], independent of the order of the rows; None without rows."""
    clusters: dict[Hashable, list[tuple[float, ...]]] = {}
    for cluster, values in rows:
        clusters.setdefault(cluster, []).append(values)
    if not clusters:
        return None
    return np.array([[math.fsum(column) for column in zip(*found, strict=True)] for found in clusters.values()])


def resample_sums(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """Sum the columns of a table [C, K], then those of every resample of its rows: [1 + R, K].

    A resample has one row less than the table, so only ratios of these sums are comparable. The random numbers are
    seeded with the stratum's name and the number of rows: reproducible, and independent between tasks. Rows are sorted
    first, so their order does not matter.
    """
    table = _sort_rows(table)
    sums = np.empty((1 + resamples, table.shape[1]))
    sums[0] = table.sum(axis=0)
    counts = _cached_counts if len(table) * resamples <= _MAX_CACHED_COUNTS else _count_draws
    for first, times in counts(len(table), stratum, resamples):
        sums[1 + first : 1 + first + len(times)] = times.astype(np.float64) @ table
    return sums


def resample_rows(rows: Iterable[ClusteredRow], stratum: str) -> Array:
    """Resample the sums of rows over their clusters; there is at least one row."""
    table = cluster_table(rows)
    assert table is not None
    return resample_sums(table, stratum)


def resample_timed_rows(rows: Iterable[ClusteredRow], stratum: str) -> Array:
    """As ``resample_rows``, over the timed requests of every cluster too."""
    clusters = group_timings(rows)
    assert clusters is not None
    return resample_timings(clusters, stratum)


def resample_medians(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """[1 + R, K]: like ``resampled_sums``, with the medians of the columns."""
    table = _sort_rows(table)
    medians = np.empty((1 + resamples, table.shape[1]))
    medians[0] = np.median(table, axis=0)
    for first, drawn in _draw_rows(len(table), stratum, resamples):
        medians[1 + first : 1 + first + len(drawn)] = np.median(table[drawn], axis=1)
    return medians


def ratio_of_sums(table: Array | TimedClusters, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """Draws of a rate. Columns: amount (tokens) and cost (seconds, passes)."""
    sums = _resample(table, stratum, resamples)
    return quotient(sums[:, 0], sums[:, 1])


def paired_speedup(table: Array | TimedClusters, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """Draws of the ratio of two rates on the same clusters. Columns: amount and cost of each."""
    sums = _resample(table, stratum, resamples)
    return quotient(quotient(sums[:, 0], sums[:, 1]), quotient(sums[:, 2], sums[:, 3]))


def mean_of_strata(strata: Sequence[Array]) -> Array:
    """Draws of the arithmetic mean of figures, one per stratum.

    Every stratum has the same weight and is resampled separately. Strata with constant draws, mostly those with a
    single prompt, cannot be resampled. If there are several, they are resampled among each other: many tasks with one
    prompt each must not look certain, and an interval that is too wide is better than one that is too narrow.
    """
    table = np.stack(strata)  # [T, 1 + R]
    fixed = np.flatnonzero((table == table[:, :1]).all(axis=1))
    if len(fixed) > 1:
        values = table[fixed, 0]
        for first, drawn in _draw_rows(len(fixed), "strata", table.shape[1] - 1):
            table[fixed, 1 + first : 1 + first + len(drawn)] = values[drawn].mean(axis=1)
    mean: Array = table.mean(axis=0)
    return mean


def quotient(above: Array, below: Array) -> Array:
    """Draws of a ratio. Division by zero gives non-finite values, which ``interval`` ignores."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


def interval(draws: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """Return the figure with its percentile interval; None if it is not finite.

    A skewed figure of few prompts can lie outside its percentiles. The interval is then extended to include it.
    """
    if not math.isfinite(draws[0]):
        return None
    value = float(draws[0])
    finite = draws[1:][np.isfinite(draws[1:])]
    if not finite.size:
        return Interval(value, value, value)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(finite, [tail, 1.0 - tail])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def _resample(table: Array | TimedClusters, stratum: str, resamples: int) -> Array:
    if isinstance(table, TimedClusters):
        return resample_timings(table, stratum, resamples)
    return resample_sums(table, stratum, resamples)


def _sort_rows(table: Array) -> Array:
    return table[np.lexsort(table.T[::-1])]  # by the first column, then the second, ...


def _count_draws(num_clusters: int, stratum: str, resamples: int) -> Iterator[tuple[int, Counts]]:
    """Yield blocks of resamples: the index of the first, and how often each drew each row, [block, C].

    One byte suffices: a row drawn once on average is never drawn 256 times.
    """
    for first, drawn in _draw_rows(num_clusters, stratum, resamples):
        shape = (len(drawn), num_clusters)
        flat = drawn + np.arange(len(drawn))[:, None] * num_clusters
        yield first, np.bincount(flat.ravel(), minlength=shape[0] * shape[1]).reshape(shape).astype(np.uint8)


@lru_cache(maxsize=16)
def _cached_counts(num_clusters: int, stratum: str, resamples: int) -> list[tuple[int, Counts]]:
    """Cache the counts: all methods of a task share them, and drawing dominates the run time."""
    return list(_count_draws(num_clusters, stratum, resamples))


def _draw_rows(num_clusters: int, stratum: str, resamples: int) -> Iterator[tuple[int, Indices]]:
    """Yield blocks of resamples: the index of the first, and the rows that each drew, [block, C - 1]."""
    random = np.random.default_rng([zlib.crc32(stratum.encode()), num_clusters])
    block = max(1, _MAX_BLOCK_INDICES // num_clusters)
    for first in range(0, resamples, block):
        yield first, random.integers(num_clusters, size=(min(block, resamples - first), max(1, num_clusters - 1)))
