"""The kernel of the fused decoder: compiled at first use. Without a compiler the eager decoder runs instead."""

from __future__ import annotations

import ctypes
from pathlib import Path

from draftwood.disk import Library

KERNEL = Library("cpu", Path(__file__).parent / "kernel.c")


def load_kernel() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is none; ``why_unavailable`` then says why."""
    return KERNEL.load()


def why_unavailable() -> str:
    """Why ``load_kernel`` returned None; empty if it did not."""
    return KERNEL.why_unavailable()
