"""Quantising to block formats: the reader of GGUF files gets back what was meant, as closely as the bits allow."""

import pytest
import torch

from draftwood.models.gguf.dequantize import dequantize
from draftwood.targets.native.block_formats import choose_format, quantize_rows
from tests.tools.blocks import KIND


def error_of(weight: torch.Tensor, name: str) -> float:
    blocks = quantize_rows(weight, name)
    values = torch.from_numpy(dequantize(KIND[name], blocks.numpy().reshape(-1), "w")).view(weight.shape)
    return float((values - weight).norm() / weight.norm())


@pytest.mark.parametrize(
    ("name", "limit"), [("Q8_0", 0.006), ("Q4_0", 0.11), ("Q4_1", 0.075), ("Q4_K", 0.075), ("BF16", 0.003)]
)
def test_error_of_normal_weights(name: str, limit: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert error_of(weight, name) < limit
    assert error_of(weight * 1e-3, name) < limit


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_zeros_and_outliers(name: str) -> None:
    weight = torch.zeros(4, 256)
    assert not dequantize(KIND[name], quantize_rows(weight, name).numpy().reshape(-1), "w").any()
    weight[1, 40] = -3.0
    weight[2] = 1.0
    assert error_of(weight, name) < 0.02


def test_formats_by_matrix() -> None:
    assert choose_format("q4_k", 512, is_table=False) == "Q4_K"
    assert choose_format("q4_k", 512, is_table=True) == "Q8_0"
    assert choose_format("q4_k", 96, is_table=False) == "Q8_0"
    assert choose_format("q4_0", 96, is_table=False) == "Q4_0"
    assert choose_format("q4_0", 48, is_table=False) == "BF16"
