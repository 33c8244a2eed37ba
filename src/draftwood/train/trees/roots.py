"""Choice of root positions. Random choices depend only on the seed and the text."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwood.train.base import Batch


def texts_of(batch: Batch) -> list[list[int]]:
    """Return the tokens of each text without padding."""
    ids = batch.token_ids.tolist()
    return [row[:length] for row, length in zip(ids, batch.lengths.tolist(), strict=True)]


def counted_roots(batch: Batch) -> list[list[int]]:
    """Return the positions of each text whose next token the target generated.

    A root needs the feature of the previous token, so position 0 is excluded."""
    is_counted = batch.answered[:, 2:].tolist()
    return [[place + 1 for place, counts in enumerate(row) if counts] for row in is_counted]


def sample_roots(roots: Sequence[int], count: int, text: Sequence[int], *seeds: int) -> list[int]:
    """Sample ``count`` of the roots, or return all if there are fewer."""
    if len(roots) <= count:
        return list(roots)
    chosen = _generator(text, *seeds).choice(len(roots), size=count, replace=False)
    return [roots[index] for index in sorted(chosen.tolist())]


def sample_groups(roots: Sequence[int], num_groups: int, size: int, text: Sequence[int], *seeds: int) -> list[int]:
    """Sample up to ``num_groups`` disjoint groups of ``size`` adjacent roots. Return their members in order."""
    generator = _generator(text, *seeds)
    runs = _runs(roots)
    places = [run for run, (first, end) in enumerate(runs) for _ in range((end - first) // size)]
    if len(places) > num_groups:
        places = [places[index] for index in generator.choice(len(places), size=num_groups, replace=False)]
    found: list[int] = []
    for run, (first, end) in enumerate(runs):
        count = places.count(run)
        # Ascending gaps before the groups: all placements are equally likely, except for equal gaps.
        gaps = sorted(generator.integers(0, end - first - count * size + 1, size=count).tolist())
        for number, gap in enumerate(gaps):
            start = first + gap + number * size
            found += range(start, start + size)
    return found


def padded(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows to [B, R] int64 with R >= 1. Also return the mask of real entries, [B, R] bool."""
    longest = max([1, *map(len, rows)])
    values = torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    return values.to(device), (torch.arange(longest) < lengths[:, None]).to(device)


def _runs(roots: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges (first, end) of adjacent roots."""
    runs: list[tuple[int, int]] = []
    for root in roots:
        if runs and runs[-1][1] == root:
            runs[-1] = (runs[-1][0], root + 1)
        else:
            runs.append((root, root + 1))
    return runs


def _generator(text: Sequence[int], *seeds: int) -> np.random.Generator:
    content = ",".join(map(str, (*seeds, len(text), *text)))
    return np.random.default_rng(list(hashlib.sha256(content.encode()).digest()))
