"""Plain encoders of block formats that ``--quantize`` does not offer: scales from the extremes of a block, no search.

Good enough to compare kernels with the same weights in float32, not to make files.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # doubled


def encode(weight: Floats, name: str) -> Bytes:
    """Returns ``weight [rows, inputs]`` in blocks, as bytes ``[rows, bytes of a row]``."""
    encoder, size = ENCODERS[name]
    return encoder(weight.reshape(-1, size)).reshape(len(weight), -1)


def inverse(values: Floats) -> Floats:
    return np.divide(1, values, out=np.zeros_like(values), where=values != 0)


def half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def half_bytes(values: Floats) -> Bytes:
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def extreme(blocks: Floats) -> Floats:
    """The value of the largest magnitude, with its sign."""
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)


def nibbles(codes: Bytes) -> Bytes:
    middle = codes.shape[-1] // 2
    return (codes[..., :middle] & 15) | (codes[..., middle:] & 15) << 4


def high_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def nearest(values: Floats, table: Floats) -> Bytes:
    order = np.argsort(table, kind="stable")
    borders = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(borders, values)].astype(np.uint8)


def with_minimum(blocks: Floats, largest: int) -> tuple[Floats, Floats, Bytes]:
    low = blocks.min(axis=-1, keepdims=True)
    scale, low = half((blocks.max(axis=-1, keepdims=True) - low) / largest), half(low)
    return scale, low, np.clip(np.rint((blocks - low) * inverse(scale)), 0, largest).astype(np.uint8)


def q4_1(blocks: Floats) -> Bytes:
    scale, low, codes = with_minimum(blocks, 15)
    return np.concatenate([half_bytes(scale), half_bytes(low), nibbles(codes)], axis=1)


def q5_0(blocks: Floats) -> Bytes:
    scale = half(extreme(blocks) / -16)
    codes = np.clip(np.rint(blocks * inverse(scale)) + 16, 0, 31).astype(np.uint8)
    return np.concatenate([half_bytes(scale), high_bits(codes), nibbles(codes)], axis=1)


def q5_1(blocks: Floats) -> Bytes:
    scale, low, codes = with_minimum(blocks, 31)
    return np.concatenate([half_bytes(scale), half_bytes(low), high_bits(codes), nibbles(codes)], axis=1)


def q5_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    minima = np.maximum(-parts.min(axis=2), 0)
    scales = (parts.max(axis=2) + minima) / 31
    scale, minimum = half(scales.max(axis=1, keepdims=True) / 63), half(minima.max(axis=1, keepdims=True) / 63)
    whole, least = (
        np.clip(np.rint(values * inverse(unit)), 0, 63) for values, unit in ((scales, scale), (minima, minimum))
    )
    real = (parts + (least * minimum)[..., None]) * inverse(whole * scale)[..., None]
    codes = np.clip(np.rint(real), 0, 31).astype(np.uint8)
    a, b = whole.astype(np.uint8), least.astype(np.uint8)
    six = [a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, a[:, 4:] & 15 | b[:, 4:] << 4]
    high = ((codes >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]).sum(axis=1, dtype=np.uint8)
    low = nibbles(codes.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate([half_bytes(scale), half_bytes(minimum), *six, high, low], axis=1)


def q6_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    scales = extreme(parts)[..., 0] / -32
    scale = half(extreme(scales) / -128)
    whole = np.clip(np.rint(scales * inverse(scale)), -128, 127)
    real = parts * inverse(whole * scale)[..., None]
    codes = np.clip(np.rint(real) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 128)
    low = nibbles(codes).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = ((codes >> 4).reshape(-1, 2, 4, 32) << shifts).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, whole.astype(np.int8).view(np.uint8), half_bytes(scale)], axis=1)


def iq4_nl(blocks: Floats) -> Bytes:
    scale = half(extreme(blocks) / -127)
    return np.concatenate([half_bytes(scale), nibbles(nearest(blocks * inverse(scale), IQ4))], axis=1)


def iq4_xs(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    scales = extreme(parts)[..., 0] / -127
    scale = half(extreme(scales) / -32)
    whole = np.clip(np.rint(scales * inverse(scale)), -32, 31)
    codes = nearest(parts * inverse(whole * scale)[..., None], IQ4)
    six = (whole + 32).astype(np.uint16)
    high = ((six >> 4) << (2 * np.arange(8, dtype=np.uint16))).sum(axis=1, dtype=np.uint16)
    low = (six & 15).astype(np.uint8)
    packed = [half_bytes(scale), high[:, None].view(np.uint8), low[:, 0::2] | low[:, 1::2] << 4]
    return np.concatenate([*packed, nibbles(codes).reshape(-1, 128)], axis=1)


def mxfp4(blocks: Floats) -> Bytes:
    top = np.abs(blocks).max(axis=1, keepdims=True)
    exponent = np.floor(np.log2(np.maximum(top, 1e-30))) - 2  # the largest becomes 4 to 8
    codes = nearest(blocks * np.exp2(1 - exponent).astype(np.float32), FP4)
    return np.concatenate([(exponent + 127).astype(np.uint8), nibbles(codes)], axis=1)


ENCODERS: dict[str, tuple[Callable[[Floats], Bytes], int]] = {
    "Q4_1": (q4_1, 32),
    "Q5_0": (q5_0, 32),
    "Q5_1": (q5_1, 32),
    "Q5_K": (q5_k, 256),
    "Q6_K": (q6_k, 256),
    "IQ4_NL": (iq4_nl, 32),
    "IQ4_XS": (iq4_xs, 256),
    "MXFP4": (mxfp4, 32),
}
