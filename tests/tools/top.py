"""Rows of logits that are hard to sort, and checks of their top entries."""

from __future__ import annotations

import numpy as np
import torch

from draftwood.targets.toprows import TopRows

INF = float("inf")
NAN = float("nan")


def random_rows(num_rows: int, vocab_size: int, scale: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sparse_rows(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Nearly everything is -inf: the whole first row, and all but a few entries of the others."""
    rows = torch.full((num_rows, vocab_size), -INF)
    for row in range(1, num_rows):
        rows[row, torch.arange(row) * 7919 % vocab_size] = torch.arange(row).float()
    return rows


ROWS = {
    "random": random_rows(7, 5000),
    "flat": random_rows(5, 3001, scale=0.01),
    "peaked": random_rows(5, 3001) + torch.eye(5, 3001) * 60,
    "tied": random_rows(9, 4099, scale=1.5).round(),
    "two values": (random_rows(9, 4099) > 0).float(),
    "constant": torch.full((3, 1500), -2.5),
    "rising": torch.arange(9000.0).repeat(2, 1) / 100,
    "falling": torch.arange(9000.0).flip(0).repeat(2, 1) / 100,
    "-inf": sparse_rows(9, 2000),
    "far from 0": random_rows(4, 2000) + torch.tensor([[300.0], [-300.0], [80.0], [-80.0]]),
    "steep": random_rows(4, 2500, scale=1000.0),
    "a whole block": random_rows(3, 64),
    "less than a block": random_rows(3, 13),
    "a block and one": random_rows(3, 65),
    "a stretch and one": random_rows(3, 1025),
    "large vocabulary": random_rows(2, 152_064),
    "huge vocabulary": random_rows(2, 300_007),
    "one entry": random_rows(3, 1),
}


def check_order(found: TopRows, logits: torch.Tensor, k: int) -> None:
    """Compare with a stable sort, in which ties keep the order of ids."""
    expected = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert found.ids.dtype == np.int32
    assert found.logits.dtype == found.log_total.dtype == np.float32
    assert found.log_total.shape == (len(logits),)
    np.testing.assert_array_equal(found.ids, expected.indices[:, :k].numpy())
    np.testing.assert_array_equal(found.logits, expected.values[:, :k].numpy())


def check(found: TopRows, logits: torch.Tensor, k: int) -> None:
    check_order(found, logits, k)
    exact = logits.double().logsumexp(dim=-1).numpy()
    np.testing.assert_allclose(found.log_total, exact, atol=1e-4, rtol=1e-6)


def rows_with_nan() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [5, 1300], and the values they are treated as."""
    logits = random_rows(5, 1300)
    logits[0] = NAN
    logits[1, ::2] = NAN
    logits[2, 5:] = NAN
    logits[3, 64:1200] = NAN  # whole blocks
    logits[3, 3] = -INF
    return logits, logits.nan_to_num(nan=-INF, neginf=-INF)


def extreme_rows() -> torch.Tensor:
    logits = random_rows(4, 200)
    logits[0, 17] = INF
    logits[1, 11] = 3e38
    logits[2] = -3e38
    logits[3, :100] = -3e38
    return logits


def check_extreme(found: TopRows, logits: torch.Tensor, k: int) -> None:
    check_order(found, logits, k)
    np.testing.assert_allclose(found.log_total, logits.logsumexp(dim=-1).numpy(), rtol=1e-5)
    assert np.isfinite(found.probs()).all()
