"""Random weights in the block formats of GGUF files."""

import numpy as np

from draftwood.models.gguf.dequantize import FORMATS, dequantize
from draftwood.models.gguf.stored import StoredTensor

KIND = {layout.name: kind for kind, layout in FORMATS.items()}
# Places of 16-bit scales in a block, and what they should be so that weights are about as large as 1.
SCALES = {
    "Q4_0": {0: 0.1},
    "Q4_1": {0: 0.1, 2: -0.8},
    "Q5_0": {0: 0.06},
    "Q5_1": {0: 0.05, 2: -0.8},
    "Q8_0": {0: 0.01},
    "Q4_K": {0: 0.003, 2: 0.02},
    "Q5_K": {0: 0.0015, 2: 0.02},
    "Q6_K": {208: 0.0003},
    "IQ4_NL": {0: 0.01},
    "IQ4_XS": {0: 0.0005},
}


def random_blocks(name: str, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Rows of blocks whose codes are random and whose scales vary."""
    layout = FORMATS[KIND[name]]
    assert inputs % layout.elements == 0
    rng = np.random.default_rng(seed)
    count = outputs * inputs // layout.elements
    if layout.elements == 1:
        values = rng.standard_normal(count).astype(np.float32)
        halves = {"F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}
        return halves.get(name, values).view(np.uint8).reshape(outputs, -1)
    blocks = rng.integers(0, 256, (count, layout.num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(124, 128, count)
    for place, size in SCALES.get(name, {}).items():
        scales = (size * rng.uniform(0.5, 1.5, count)).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(outputs, -1)


def random_stored(name: str, outputs: int, inputs: int, seed: int, scale: float = 1.0) -> StoredTensor:
    rows = random_blocks(name, outputs, inputs, seed)
    values = dequantize(KIND[name], rows.reshape(-1), "w").reshape(outputs, inputs)
    assert scale == 1.0 or name == "F32"
    return StoredTensor(name, (outputs, inputs), lambda: rows, lambda: values)
