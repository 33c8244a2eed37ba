"""The encoders of block formats: the reader of GGUF files gets back what was meant."""

import numpy as np
import pytest

from draftwood.models.gguf.dequantize import dequantize
from tests.tools.blocks import KIND
from tests.tools.script import load_script

LIMITS = {
    "Q4_1": 0.08, "Q5_0": 0.045, "Q5_1": 0.04, "Q5_K": 0.04, "Q6_K": 0.02,
    "IQ4_NL": 0.085, "IQ4_XS": 0.085, "MXFP4": 0.12
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_error_of_normal_weights(name: str) -> None:
    script = load_script("block_encoders")
    assert set(LIMITS) == set(script.ENCODERS)
    for size in (1.0, 1e-2, 0.0):
        weight = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32) * np.float32(size)
        values = dequantize(KIND[name], script.encode(weight, name).reshape(-1), "w").reshape(weight.shape)
        assert np.linalg.norm(values - weight) <= LIMITS[name] * np.linalg.norm(weight)
