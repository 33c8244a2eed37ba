"""Compiles the kernel of the fused CPU decoder at first use. Without a compiler the eager decoder runs."""

import ctypes
from pathlib import Path

from draftwood.disk import Library

KERNEL = Library("cpu", Path(__file__).parent / "kernel.c")


def load_kernel() -> ctypes.CDLL | None:
    """Returns the compiled kernel, or None; ``why_unavailable`` then gives the reason."""
    return KERNEL.load()


def needs_build() -> bool:
    """Whether ``load_kernel`` is going to compile the kernel."""
    return KERNEL.needs_build()


def why_unavailable() -> str:
    """Returns why ``load_kernel`` returned None; empty if it did not."""
    return KERNEL.why_unavailable()
