"""Dequantises GGUF blocks to float32, all blocks of a tensor at once.

A block holds a fixed number of neighbouring weights as small integers with their scales. The formulas keep the order of
operations of the reference implementation, so that the values are bit-identical.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.errors import ModelError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


class BlockFormat(NamedTuple):
    name: str
    elements: int  # weights in one block
    num_bytes: int  # of one block
    decode: Callable[[Bytes], Array]  # [blocks, num_bytes] -> [blocks, elements]


def dequantize(kind: int, raw: Bytes, tensor_name: str) -> Floats:
    """Returns the weights of ``raw``, which holds whole blocks of format number ``kind``, as one row."""
    layout = block_format(kind, tensor_name)
    if raw.size % layout.num_bytes:
        raise ModelError(f"The tensor {tensor_name} ends inside a block of {layout.name}", got=f"{raw.size} bytes")
    values = layout.decode(raw.reshape(-1, layout.num_bytes))
    return values.astype(np.float32, copy=False).reshape(-1)


def block_format(kind: int, tensor_name: str) -> BlockFormat:
    if kind not in FORMATS:
        raise ModelError(
            f"The tensor {tensor_name} has an unsupported quantisation format",
            got=_OTHER_NAMES.get(kind, f"format number {kind}"),
            allowed=[layout.name for layout in FORMATS.values()],
            next_step="Use a file in one of these formats.",
        )
    return FORMATS[kind]


def _half(blocks: Bytes, start: int) -> Floats:
    """Reads the float16 at byte ``start`` of each block, as a column."""
    with np.errstate(invalid="ignore"):  # the scale in a damaged file may be NaN: callers check the values
        return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Array:
    """Splits bytes into the low halves of all, then the high halves: the order in a block of 32."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _high_bits(blocks: Bytes, start: int) -> Array:
    """Reads 32 bits at ``start``, one per weight, shifted to the fifth bit."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, start : start + 4]), axis=1, bitorder="little")
    return bits << 4


def _f32(blocks: Bytes) -> Array:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Array:
    return blocks.view(np.float16)


def _bf16(blocks: Bytes) -> Array:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Array:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _half(blocks, 0)


def _q4_1(blocks: Bytes) -> Array:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Array:
    quants = _nibbles(blocks[:, 6:]) | _high_bits(blocks, 2)
    return (quants.astype(np.float32) - 16) * _half(blocks, 0)


def _q5_1(blocks: Bytes) -> Array:
    quants = _nibbles(blocks[:, 8:]) | _high_bits(blocks, 4)
    return quants.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Array:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _crumbs(packed: Bytes) -> Array:
    """Splits 64 bytes into 256 two-bit numbers: for each 32 bytes all lowest bit pairs, then the next, and so on."""
    halves = packed.reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((halves >> shifts) & 3).reshape(len(packed), 16, 16)


def _q2_k(blocks: Bytes) -> Array:
    scales, quants = blocks[:, :16], _crumbs(blocks[:, 16:80])
    scale = (_half(blocks, 80) * (scales & 0x0F))[:, :, None]
    least = (_half(blocks, 82) * (scales >> 4))[:, :, None]
    return scale * quants.astype(np.float32) - least


def _q3_k(blocks: Bytes) -> Array:
    count = len(blocks)
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(count, 16)
    scales = (low | (high << 4)).astype(np.float32) - 32
    # One bit of each mask byte per group of 32 weights; a cleared bit subtracts 4.
    group_bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    unset = 1 - ((blocks[:, None, :32] >> group_bits) & 1).reshape(count, 16, 16)
    quants = _crumbs(blocks[:, 32:96]).astype(np.float32) - 4 * unset.astype(np.float32)
    values: Array = (_half(blocks, 108) * scales)[:, :, None] * quants
    return values


def _six_bit_scales(packed: Bytes) -> tuple[Array, Array]:
    """Splits 12 bytes into 8 scales and 8 minima of six bits; the first four hold top bits of the last four."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _scaled_k(blocks: Bytes, quants: Array) -> Array:
    """Applies the scales and minima at the start of a Q4_K or Q5_K block to ``quants`` [blocks, 8, 32]."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    least = (_half(blocks, 2) * minima)[:, :, None]
    values: Array = scale * quants.astype(np.float32) - least
    return values


def _paired_nibbles(packed: Bytes) -> Array:
    """Splits 128 bytes into [8, 32] four-bit numbers: for each 32 bytes all low halves, then all high halves."""
    groups = packed.reshape(-1, 4, 1, 32)
    shifts = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    return ((groups >> shifts) & 0x0F).reshape(len(packed), 8, 32)


def _q4_k(blocks: Bytes) -> Array:
    return _scaled_k(blocks, _paired_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: Bytes) -> Array:
    group_bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> group_bits) & 1) << 4
    return _scaled_k(blocks, _paired_nibbles(blocks[:, 48:176]) | high)


def _q6_k(blocks: Bytes) -> Array:
    count = len(blocks)
    # Each half of a block: 64 bytes hold the low halves of 4 x 32 weights, 32 bytes their upper bit pairs.
    shifts = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    low = (blocks[:, :128].reshape(count, 2, 1, 64) >> shifts) & 0x0F
    high = _crumbs(blocks[:, 128:192])
    quants = (low.reshape(count, 16, 16) | (high << 4)).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[:, :, None] * quants


def _look_up(codes: Array, table: tuple[int, ...]) -> Floats:
    return np.array(table, dtype=np.float32)[codes]


def _iq4_nl(blocks: Bytes) -> Array:
    return _half(blocks, 0) * _look_up(_nibbles(blocks[:, 2:]), _IQ4_VALUES)


def _iq4_xs(blocks: Bytes) -> Array:
    count = len(blocks)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8) & 15).reshape(count, 8)
    scale = _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(count, 8, 32)
    values: Array = scale[:, :, None] * _look_up(codes, _IQ4_VALUES)
    return values


def _mxfp4(blocks: Bytes) -> Array:
    # The exponent of float32, but halved, because the table holds twice the values.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    scale[blocks[:, :1] == 255] = np.nan
    values: Array = scale * _look_up(_nibbles(blocks[:, 1:]), _FP4_VALUES)
    return values


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    10: BlockFormat("Q2_K", 256, 84, _q2_k),
    11: BlockFormat("Q3_K", 256, 110, _q3_k),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockFormat("IQ4_XS", 256, 136, _iq4_xs),
    30: BlockFormat("BF16", 1, 2, _bf16),
    39: BlockFormat("MXFP4", 32, 17, _mxfp4),
}

# Formats that are not supported: their names make the error message readable.
_IQ_NAMES = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS")
_OTHER_NAMES = dict(enumerate((*_IQ_NAMES, "I8", "I16", "I32", "I64", "F64", "IQ1_M"), 16))
_OTHER_NAMES |= {9: "Q8_1", 15: "Q8_K", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}
