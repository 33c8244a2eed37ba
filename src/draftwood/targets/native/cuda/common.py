"""What several kernels have in common."""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_input(PDL: tl.constexpr, BRIEF: tl.constexpr = False):
    """Waits for what the kernel before has written, and lets the next one start.

    In this order: whoever runs ahead of a kernel's end may read what the kernels before that one wrote. A BRIEF kernel
    lets the next one start first, which then may read what was there before both.
    """
    if PDL:
        if BRIEF:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not BRIEF:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Asks for BYTES from each address on to be brought into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full(address.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def normed(x, norm, at, inside, eps, D: tl.constexpr):
    """RMS norm of a row in float32, rounded before the weight as the reference does. Beyond its D numbers are zeros;
    ``at``: which weights of ``norm`` its numbers have."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def cleaned(values):
    """Without NaN, which counts as minus infinity, and without -0, which equals 0."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == 0.0, 0.0, values)


@triton.jit
def exponent_base(peak):
    """What exponents are taken relative to."""
    return tl.where(tl.abs(peak) < float("inf"), peak, 0.0)


@triton.jit
def block_peaks(values):
    """Of logits [entries, rows]: each row's peak, and the sum of exponentials relative to it."""
    values = cleaned(values)
    peaks = tl.max(values, axis=0)
    return peaks, tl.sum(tl.exp(values - exponent_base(peaks)[None, :]), axis=0)
