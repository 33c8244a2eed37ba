"""Functions shared by several kernels, and launch options."""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import triton
import triton.language as tl


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch with or without programmatic dependent launch (PDL)."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def wait_for_input(PDL: tl.constexpr, BRIEF: tl.constexpr = False):
    """Wait for the previous kernel's writes, then let the next kernel start.

    The order guarantees that a kernel that starts early can read, before its own wait, what kernels before its
    predecessor wrote. A BRIEF kernel lets the next one start before it waits itself: before its wait, that one may only
    read what was written before both.
    """
    if PDL:
        if BRIEF:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not BRIEF:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Start to load BYTES from each address into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full(address.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rms_norm(x, norm, at, inside, eps, D: tl.constexpr):
    """RMS norm of a row in float32, rounded before the weight is applied, as in the reference.

    Entries of ``x`` beyond D are zeros. ``at`` are the indices of the weights in ``norm``.
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def clean(values):
    """Replace NaN by minus infinity, and -0 by 0."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def exponent_base(peak):
    """What to subtract before exponentiation: the peak, or 0 if it is infinite."""
    return tl.where(tl.abs(peak) < float("inf"), peak, 0.0)


@triton.jit
def block_peaks(values):
    """For logits [entries, rows]: each row's maximum, and the sum of exponentials relative to it."""
    values = clean(values)
    peaks = tl.max(values, axis=0)
    return peaks, tl.sum(tl.exp(values - exponent_base(peaks)[None, :]), axis=0)
