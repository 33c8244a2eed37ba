"""Figures with their uncertainty: the same figure again and again, each time from prompts drawn anew.

The prompts of a task are a sample of what people ask; another sample would give another figure. The bootstrap draws
prompts from those there are, with replacement, and looks how far the figure moves. It draws one less than there are:
with all of them figures of few prompts would move too little, by a factor of sqrt((n - 1) / n). All requests of one
prompt are a *cluster*: they are drawn together, and with them what every method made of that prompt, so what makes a
prompt easy for one method and for plain decoding alike does not count as noise of their ratio.

A figure travels as its *draws*, an array ``[1 + R]``: the figure itself first, then that of every resample. Arithmetic
on draws is arithmetic on figures, and the interval is taken at the end.

A task with a single prompt cannot tell how much prompts differ: its interval has no width, and a report should say how
many prompts there were. With two to four prompts intervals are too narrow as well.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from draftwood.bench.figures.summary import Interval

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Counts = npt.NDArray[np.uint8]

RESAMPLES = 2000
CONFIDENCE = 0.95
_MAX_BLOCK_INDICES = 1 << 20  # indices of one block: eight megabytes
_MAX_CACHED_COUNTS = 1 << 24  # counts that are kept for the next figure of the same prompts: a byte each


def cluster_table(rows: Iterable[tuple[Hashable, tuple[float, ...]]]) -> Array | None:
    """[C, K]: the columns summed by cluster, in any order of the rows; None where there are none."""
    clusters: dict[Hashable, list[tuple[float, ...]]] = {}
    for cluster, values in rows:
        clusters.setdefault(cluster, []).append(values)
    if not clusters:
        return None
    return np.array([[math.fsum(column) for column in zip(*found, strict=True)] for found in clusters.values()])


def resample_sums(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """[1 + R, K]: the sums of the columns of a table [C, K], then those of every resample of its rows.

    A resample has a row less than the table, so it is ratios of these sums that can be compared.
    The draws depend on the name of the stratum and the number of rows, so that they are the same every time, and
    independent for two tasks. Rows are sorted first: their order makes no difference.
    """
    table = _in_order(table)
    sums = np.empty((1 + resamples, table.shape[1]))
    sums[0] = table.sum(axis=0)
    counts = _kept_counts if len(table) * resamples <= _MAX_CACHED_COUNTS else _counts
    for first, times in counts(len(table), stratum, resamples):
        sums[1 + first : 1 + first + len(times)] = times.astype(np.float64) @ table
    return sums


def resample_medians(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """[1 + R, K]: like ``resampled_sums``, with the medians of the columns."""
    table = _in_order(table)
    medians = np.empty((1 + resamples, table.shape[1]))
    medians[0] = np.median(table, axis=0)
    for first, drawn in _drawn(len(table), stratum, resamples):
        medians[1 + first : 1 + first + len(drawn)] = np.median(table[drawn], axis=1)
    return medians


def ratio_of_sums(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """Draws of a rate. The columns are what was made (tokens) and what it took (seconds, passes)."""
    sums = resample_sums(table, stratum, resamples)
    return quotient(sums[:, 0], sums[:, 1])


def paired_speedup(table: Array, stratum: str = "", resamples: int = RESAMPLES) -> Array:
    """Draws of one rate over another on the same clusters. Columns: made and took of the one, then of the other."""
    sums = resample_sums(table, stratum, resamples)
    return quotient(quotient(sums[:, 0], sums[:, 1]), quotient(sums[:, 2], sums[:, 3]))


def mean_of_strata(strata: Sequence[Array]) -> Array:
    """Draws of the arithmetic mean of figures, each of a stratum of its own.

    Every stratum counts alike, however many prompts it has, and is resampled by itself. Those whose draws are all the
    same cannot be, mostly since they have a single prompt. Several of them are drawn from each other instead: many
    tasks with one prompt each must not look certain, and too wide an interval is better than one that is too narrow.
    """
    table = np.stack(strata)  # [T, 1 + R]
    fixed = np.flatnonzero((table == table[:, :1]).all(axis=1))
    if len(fixed) > 1:
        values = table[fixed, 0]
        for first, drawn in _drawn(len(fixed), "strata", table.shape[1] - 1):
            table[fixed, 1 + first : 1 + first + len(drawn)] = values[drawn].mean(axis=1)
    mean: Array = table.mean(axis=0)
    return mean


def quotient(above: Array, below: Array) -> Array:
    """Draws of a ratio; what would divide by zero is not finite, and ``interval`` leaves it out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


def interval(draws: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """A figure and its percentile interval; None where it is not a number.

    A skewed figure of few prompts can lie outside its percentiles. The interval is widened to hold it.
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


def _in_order(table: Array) -> Array:
    return table[np.lexsort(table.T[::-1])]  # by the first column, then the second, ...


def _counts(num_clusters: int, stratum: str, resamples: int) -> Iterator[tuple[int, Counts]]:
    """Blocks of resamples: the number of the first one, and how often each drew each row, [block, C].

    A byte is enough: a row that is drawn once on average is never drawn 256 times.
    """
    for first, drawn in _drawn(num_clusters, stratum, resamples):
        shape = (len(drawn), num_clusters)
        flat = drawn + np.arange(len(drawn))[:, None] * num_clusters
        yield first, np.bincount(flat.ravel(), minlength=shape[0] * shape[1]).reshape(shape).astype(np.uint8)


@lru_cache(maxsize=16)
def _kept_counts(num_clusters: int, stratum: str, resamples: int) -> list[tuple[int, Counts]]:
    """The figures of all methods on a task are drawn alike, and drawing is what takes the time."""
    return list(_counts(num_clusters, stratum, resamples))


def _drawn(num_clusters: int, stratum: str, resamples: int) -> Iterator[tuple[int, Indices]]:
    """Blocks of resamples: the number of the first one, and the rows that each drew, [block, C - 1]."""
    random = np.random.default_rng([zlib.crc32(stratum.encode()), num_clusters])
    block = max(1, _MAX_BLOCK_INDICES // num_clusters)
    for first in range(0, resamples, block):
        yield first, random.integers(num_clusters, size=(min(block, resamples - first), max(1, num_clusters - 1)))
