"""The GGUF reader: content, ModelError for every damaged file, and blocks compared with values by hand."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood.errors import ModelError
from draftwood.models.gguf.conversion import convert, converted_size
from draftwood.models.gguf.dequantize import FORMATS, dequantize
from draftwood.models.gguf.reader import GgufFile
from tests.tools.gguf_writer import F32, Q4_0, Raw, f32, gguf_bytes, toy_model, write_gguf

KIND = {layout.name: kind for kind, layout in FORMATS.items()}


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def decoded(name: str, block: bytes) -> list[float]:
    return dequantize(KIND[name], np.frombuffer(block, dtype=np.uint8), "t").tolist()


def test_reads_metadata_and_tensors(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    metadata: dict[str, Any] = {"a.text": "tä", "a.flag": True, "a.list": ["x", "y"], "a.numbers": [-1, 2], "a.pi": 0.5}
    for version in (2, 3):
        path = write_gguf(tmp_path / "m.gguf", metadata | {"a.int": 7}, {"w": f32(values)}, version=version)
        with GgufFile(path) as file:
            assert file.metadata == metadata | {"a.int": 7}
            assert file.tensors["w"].shape == (3, 4)
            assert np.array_equal(file.floats(file.tensors["w"]), values)
            assert np.array_equal(file.floats(file.tensors["w"], 1, 2), values[1:])


def test_honours_the_alignment(tmp_path: Path) -> None:
    tensors = {name: f32(np.full((3,), index, dtype=np.float32)) for index, name in enumerate("ab")}
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 64}, tensors, alignment=64)
    with GgufFile(path) as file:
        assert file.tensors["b"].offset % 64 == 0
        assert file.floats(file.tensors["b"]).tolist() == [1, 1, 1]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    model = toy_model()
    whole = gguf_bytes(model.metadata, model.tensors)
    path = tmp_path / "cut.gguf"
    lengths = {*range(400), *range(400, len(whole), 997), len(whole) - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"truncated|not a valid"):
            GgufFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 12_000), value=st.integers(0, 255))
def test_a_flipped_byte_never_breaks_the_converter(tmp_path: Path, place: int, value: int) -> None:
    model = toy_model()
    damaged = bytearray(gguf_bytes(model.metadata, model.tensors))
    damaged[place] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with GgufFile(path) as file:
            converted_size(file)
            convert(file, tmp_path)
    except ModelError:
        pass  # no other exception may occur


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"PK\3\4 not a model", "bytes GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1,152,921"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims 1,152,921"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(99), "bytes in one string"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(99), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77) + bytes(99), "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 50), "numbers"),
    ],
)
def test_corrupt_headers_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        GgufFile(path)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Raw((32,), 21, bytes(64)), "w has an unsupported quantisation format.*\n.*IQ3_S"),
        (Raw((32,), 99, bytes(64)), "format number 99"),
        (Raw((31,), Q4_0, bytes(64)), "shape"),
        (Raw((0,), F32, b""), "shape"),
        (Raw((1, 1, 1, 1, 1), F32, bytes(4)), "5 dimensions"),
        (Raw((1 << 40, 1 << 40), F32, bytes(4)), "truncated"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, tensor: Raw, words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": tensor})
    with pytest.raises(ModelError, match=words):
        GgufFile(path)


def test_a_bad_alignment_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 3}, {})
    with pytest.raises(ModelError, match="power of two"):
        GgufFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_plain_formats() -> None:
    assert decoded("F32", struct.pack("<2f", 1.5, -2)) == [1.5, -2]
    assert decoded("F16", half(0.25) + half(-4)) == [0.25, -4]
    assert decoded("BF16", bytes([0x80, 0x3F, 0x20, 0xC0])) == [1.0, -2.5]


def test_blocks_of_32() -> None:
    packed = bytes(low | (15 - low) << 4 for low in range(16))  # low halves 0..15, high halves 15..0
    up, down = list(range(16)), list(range(15, -1, -1))
    assert decoded("Q4_0", half(0.5) + packed) == [(q - 8) * 0.5 for q in up + down]
    assert decoded("Q4_1", half(0.5) + half(-3) + packed) == [q * 0.5 - 3 for q in up + down]
    fifth = struct.pack("<I", 1 << 0 | 1 << 17)  # the first weight, and the second of the high halves
    quants = up + down
    quants[0] += 16
    quants[17] += 16
    assert decoded("Q5_0", half(2) + fifth + packed) == [(q - 16) * 2 for q in quants]
    assert decoded("Q5_1", half(2) + half(1) + fifth + packed) == [q * 2 + 1 for q in quants]
    assert decoded("Q8_0", half(0.25) + struct.pack("32b", *range(-16, 16))) == [q * 0.25 for q in range(-16, 16)]


def test_blocks_of_256_with_scales() -> None:
    # Q4_K: scales 1..4 and 33, 18, 3, 4 (top bits stored with the first four), minima 0 but the sixth, which is 20.
    scales = bytes([1 | 2 << 6, 2 | 1 << 6, 3, 4, 0, 0 | 1 << 6, 0, 0, 1, 2 | 4 << 4, 3, 4])
    expected = [s * q - m for s, m, q in zip([1, 2, 3, 4, 33, 18, 3, 4], [0] * 5 + [20, 0, 0], [5, 9] * 4, strict=True)]
    block = half(1) + half(1) + scales
    values = decoded("Q4_K", block + bytes([0x95]) * 128)
    assert [values[group * 32] for group in range(8)] == expected
    assert all(len(set(values[group * 32 : group * 32 + 32])) == 1 for group in range(8))
    # Q5_K: the same with a fifth bit in the third group only.
    values = decoded("Q5_K", block + bytes([1 << 2]) * 32 + bytes([0x95]) * 128)
    assert [values[group * 32] for group in range(8)] == [e + 16 * 3 * (g == 2) for g, e in enumerate(expected)]


def test_blocks_of_256_with_groups_of_16() -> None:
    # Q2_K: group g has the scale g and the minimum 1; the four pairs of bits of every byte are 0, 1, 2, 3.
    pairs = bytes([0b11_10_01_00]) * 64
    values = decoded("Q2_K", bytes(g | 1 << 4 for g in range(16)) + pairs + half(2) + half(0.5))
    assert values[::16] == [2 * g * (g // 2 % 4) - 0.5 for g in range(16)]
    # Q3_K: scales 1 - 32 and so on from their low halves; only groups whose mask bit is set keep their 4.
    low = bytes((g + 1) | 9 << 4 for g in range(8)) + bytes(4)
    values = decoded("Q3_K", bytes([0b0000_0001]) * 32 + pairs + low + half(1))
    scale = [g + 1 - 32 for g in range(8)] + [9 - 32] * 8
    assert values[::16] == [scale[g] * (g // 2 % 4 - (0 if g < 2 else 4)) for g in range(16)]
    # Q6_K: low halves 5 and 9, upper pairs 0, 1, 2, 3, scales of both signs.
    signed = struct.pack("16b", *range(-8, 8))
    values = decoded("Q6_K", bytes([0x95]) * 128 + pairs + signed + half(0.5))
    quant = [5 + 0, 5 + 16, 9 + 32, 9 + 48]
    assert values[::16] == [0.5 * (g - 8) * (quant[g // 2 % 4] - 32) for g in range(16)]


# Digests of the reference implementation's output for the same bytes.
GOLDEN = {
    "Q4_0": "42b9c08a21504c52",
    "Q4_1": "9a772a126ddb98f6",
    "Q5_0": "e5fa5a85452ac912",
    "Q5_1": "5b54c85b9782ab08",
    "Q8_0": "731f172ead5fbde5",
    "Q2_K": "54c72ee15f240589",
    "Q3_K": "2bd166b4dde78691",
    "Q4_K": "2e6d095d1fe845ef",
    "Q5_K": "66ccde749d41e480",
    "Q6_K": "f8b14487742a83e6",
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_pseudo_random_blocks_match_the_reference(name: str) -> None:
    assert hashlib.sha256(dequantize(KIND[name], noise(name), "t").tobytes()).hexdigest()[:16] == GOLDEN[name]


def noise(name: str) -> np.ndarray:
    """64 blocks of random bytes with finite scales: no byte of the top exponent."""
    layout = FORMATS[KIND[name]]
    steps = np.arange(64 * layout.num_bytes, dtype=np.uint64)
    return ((steps * 2654435761 >> 7) % 113).astype(np.uint8) + ((steps % 3) * 5).astype(np.uint8)
