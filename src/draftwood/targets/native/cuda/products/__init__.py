"""Matrix products in Triton with norms, gates, residuals, rotation and cache writes fused in."""

from draftwood.targets.native.cuda.products.launch import (
    HALF_SCALE,
    HEAD_BLOCK,
    MAX_ROWS,
    CacheWrite,
    Gpu,
    Heads,
    Hidden,
    Kind,
    Product,
    Rotation,
)
