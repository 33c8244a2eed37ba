"""The kernel on every instruction set that can run here: same integers, same invariance, close numbers.

AMX and ARM are emulated: see ``tests/tools/instruction_sets.py``.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from draftwood.targets.native.cpu.records import FORMATS
from tests.tools.blocks import random_blocks, random_stored
from tests.tools.instruction_sets import HEADERS, build_programs, find_sets

pytestmark = [
    pytest.mark.skipif(not find_sets(), reason="no C compiler"),
    pytest.mark.xdist_group("instruction sets"),  # one process compiles them
]
# These differ from the others in integer products only.
SAME_FLOATS = ("portable", "AVX-VNNI", "VNNI with 256 bits", "AVX-512-VNNI", "NEON dot product", "NEON i8mm")
BLOCKS = [name for name in FORMATS if name not in ("F32", "BF16", "F16")]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return build_programs("products.c", tmp_path_factory.mktemp("products"))


@pytest.fixture(scope="module")
def forwards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return build_programs("forward.c", tmp_path_factory.mktemp("forwards"), without=SAME_FLOATS)


@pytest.mark.parametrize("rows", [7, 19])
@pytest.mark.parametrize("name", BLOCKS)
def test_products_of_quantised_weights_have_the_same_bits(name: str, rows: int, products: dict[str, list[str]]) -> None:
    outputs, inputs = 50, 512
    blocks = random_blocks(name, outputs, inputs, seed=1)
    x = np.random.default_rng(2).standard_normal((rows, inputs)).astype(np.float32)
    x[0, 5], x[1, :32], x[2] = 1000, 0, 1  # an outlier, a block of zeros, equal numbers
    given = blocks.tobytes() + x.tobytes()
    arguments = list(map(str, (FORMATS[name], outputs, inputs, rows, blocks.size)))
    answers = {
        label: subprocess.run([*command, *arguments], input=given, capture_output=True, check=True).stdout
        for label, command in products.items()
    }
    exact = random_stored(name, outputs, inputs, seed=1).floats()
    wanted = x @ exact.T
    for label, answer in answers.items():
        numbers = np.frombuffer(answer, dtype=np.float32)
        product, unpacked = numbers[: rows * outputs], numbers[rows * outputs :].reshape(outputs, inputs)
        assert np.array_equal(unpacked, exact), label
        error = np.linalg.norm(product.reshape(rows, outputs) - wanted, axis=1)
        assert (error / np.linalg.norm(wanted, axis=1)).max() < 0.03, label
        assert answer == next(iter(answers.values())), label


@pytest.mark.parametrize(("head_dim", "window"), [(24, 0), (64, 0), (96, 0), (128, 37)])
@pytest.mark.parametrize(("weights", "cache"), [("F32", "F32"), ("F32", "BF16"), ("BF16", "BF16")])
def test_a_node_does_not_depend_on_its_batch(
    weights: str, cache: str, head_dim: int, window: int, forwards: dict[str, list[str]]
) -> None:
    """The program compares bits of a tree and of its paths; the numbers are those of the other instruction sets."""
    arguments = list(map(str, (FORMATS[weights], FORMATS[cache], head_dim, window)))
    answers = {}
    for label, command in forwards.items():
        result = subprocess.run([*command, *arguments], capture_output=True, check=False)
        assert result.returncode == 0, label
        answers[label] = np.frombuffer(result.stdout, dtype=np.float32)
    wanted = next(iter(answers.values()))
    for label, answer in answers.items():
        tolerance = 0.03 if label == "AMX" else 1e-3 if cache == "BF16" else 1e-5  # AMX rounds inputs to bfloat16
        assert np.linalg.norm(answer - wanted) / np.linalg.norm(wanted) < tolerance, label


def test_the_kernel_compiles_for_amx(tmp_path: Path) -> None:
    """With the compiler's own tile instructions."""
    base = find_sets().get("AVX-512-VNNI")
    if base is None:
        pytest.skip("not an x86 CPU with AVX-512")
    flags = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-fsyntax-only", "-Werror")
    base.compile(HEADERS / "kernel.c", tmp_path / "kernel.so", *flags)
