"""Functions shared by several kernels, and launch options."""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import triton
import triton.language as tl


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch with or without programmatic dependent launch (PDL).

    Products and sums are not fused unless a kernel says so: the compiler would choose differently in each tiling.
    """
    return {"enable_fp_fusion": False} | ({"launch_pdl": True} if pdl else {})


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
def rms_norm(x, norm, at, inside, eps, D: tl.constexpr, AXIS: tl.constexpr = 0):
    """RMS norm of a row, or of several (AXIS 1), in float32, rounded before the weight is applied, as in the reference.

    Entries of ``x`` beyond D are zeros. ``at`` are the indices of the weights in ``norm``.
    """
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=AXIS, keep_dims=AXIS > 0) / D + eps)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def exact_sum(values, COUNT: tl.constexpr, AXIS: tl.constexpr = 0):
    """Sum COUNT values (a power of two), none of them negative, along an axis: the same bits in every order.

    Each value is rounded to a multiple of a unit that depends on the largest one, so that no sum has to be rounded: the
    largest is less than twice a power of two, and COUNT times that is 2^23 units.
    """
    peak = tl.max(values, axis=AXIS, keep_dims=True)
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # of two, at most the peak
    shift = power * (3.0 * COUNT)  # the last bit of a number this large is the unit
    return tl.sum((values + shift) - shift, axis=AXIS)


@triton.jit
def exact_unit_sum(values, COUNT: tl.constexpr):
    """``exact_sum`` along the first axis of values of at most 1. What rounding takes away is summed too."""
    shift: tl.constexpr = 3.0 * COUNT
    rounded = (values + shift) - shift
    rest = tl.where(rounded == values, 0.0, values - rounded)  # infinity minus itself is not a number
    small: tl.constexpr = shift * COUNT / 2.0**23
    return tl.sum(rounded, axis=0) + tl.sum((rest + small) - small, axis=0)


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
def block_peaks(values, ENTRIES: tl.constexpr):
    """For logits [ENTRIES, rows]: each row's maximum, and the sum of exponentials relative to it."""
    values = clean(values)
    peaks = tl.max(values, axis=0)
    return peaks, exact_unit_sum(tl.exp(values - exponent_base(peaks)[None, :]), ENTRIES)
