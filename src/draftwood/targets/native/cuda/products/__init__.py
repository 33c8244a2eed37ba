"""Matrix products in Triton with norms, gates, residuals and rotation fused in."""

from draftwood.targets.native.cuda.products.launch import (
    HALF_SCALE,
    HEAD_BLOCK,
    MOST_ROWS,
    Gpu,
    Heads,
    Hidden,
    Kind,
    Product,
    Rotation,
    Turned,
)

__all__ = [
    "HALF_SCALE",
    "HEAD_BLOCK",
    "MOST_ROWS",
    "Gpu",
    "Heads",
    "Hidden",
    "Kind",
    "Product",
    "Rotation",
    "Turned",
]
