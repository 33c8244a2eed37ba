"""Resources of the product kernel on a GPU, which need not be present.

``python -m tests.tools.product`` compiles the products of a layer of three models and prints a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from draftwood.targets.native.cuda.products.kernel import product_kernel
from draftwood.targets.native.cuda.products.launch import Gpu, Heads, Kind, Product
from tests.tools.triton import Resources, resources

HOPPER = Gpu(132, 227 * 1024)
MODELS = {  # hidden size, inner size, query heads, key heads, dimensions of a head, whether they are normed
    "135M": (576, 1536, 9, 3, 64, False),
    "1.5B": (1536, 8960, 12, 2, 128, False),
    "8B": (4096, 14336, 32, 8, 128, False),
    "1.7B, normed heads": (2048, 6144, 16, 8, 128, True),
    "4B, normed heads": (2560, 9728, 32, 8, 128, True),
    "8B, normed heads": (4096, 12288, 32, 8, 128, True),
}


def product_resources(
    product: Product, dtype: str = "bf16", weight: str = "bf16", *, residual: bool = False, capability: int = 90
) -> Resources:
    """After a norm, or added to hidden states; with the heads of the model."""
    launch = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")
    constants: dict[str, Any] = {key: value for key, value in product._constants.items() if key not in launch}
    turns, normed, shared = constants["D"] > 0, constants["QK_NORM"], product.scratch[1] > 0
    constants |= {"COUNT": 64, "PAD": 64, "QUANTIZED": weight != dtype, "PEAKS": False, "BIAS": False}
    constants |= {"WEIGHT_SCALE": constants["ROW_SCALE"] if weight == "fp8e4nv" else 1.0}
    constants |= {"NORMED": not residual, "RESIDUAL": residual}
    types = {"x": f"*{dtype}", "out": f"*{dtype}", "weight": f"*{weight}"}
    if constants["TENSOR_COPY"]:
        step = constants["BI"]
        types |= {"x": f"tensordesc<{dtype}[{constants['BM']}, {step}]>"}
        types |= {"weight": f"tensordesc<{weight}[{constants['BO']}, {step}]>"}
    types |= {"eps": "fp32", "head_eps": "fp32", "head_stride": "i32", "square_stride": "i32", "num_rows": "i32"}
    optional = {"bias": ("", False), "peaks": ("", False), "scales": ("*fp32", weight != dtype)}
    optional |= {"squares": ("*fp32", not residual), "next_squares": ("*fp32", residual)}
    optional |= dict.fromkeys(("scaled", "next_norm"), (f"*{dtype}", residual))
    optional |= {"parts": ("*fp32", shared), "counters": ("*i32", shared)}
    optional |= dict.fromkeys(("cos", "sin", "keys", "values"), (f"*{dtype}", turns))
    optional |= dict.fromkeys(("positions", "slots"), ("*i32", turns))
    optional |= dict.fromkeys(("q_norm", "k_norm"), (f"*{dtype}", normed))
    types |= {name: kind for name, (kind, there) in optional.items() if there}
    constants |= dict.fromkeys(name for name, (_, there) in optional.items() if not there)
    tiling = product.tiling
    return resources(
        product_kernel, types, constants,
        capability=capability, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def products_of(model: str, rows: int, weight_bytes: int = 2, gpu: Gpu = HOPPER) -> Iterator[tuple[str, Product, bool]]:
    """For a layer of a model: name, product and whether it is added to hidden states."""
    width, inner, num_heads, num_kv_heads, dim, normed = MODELS[model]
    heads = Heads(num_heads, num_kv_heads, dim, normed)
    shapes = {
        "qkv": (width, (num_heads + 2 * num_kv_heads) * dim, Kind.PLAIN, heads),
        "o": (num_heads * dim, width, Kind.PLAIN, None),
        "gate_up": (width, inner, Kind.GATED, None),
        "down": (inner, width, Kind.PLAIN, None),
    }
    for name, (num_in, num_out, kind, turning) in shapes.items():
        product = Product(
            num_in, num_out, rows, gpu, kind,
            dtype=torch.bfloat16, weight_bytes=weight_bytes, heads=turning, pdl=gpu is HOPPER,
        )  # fmt: skip
        yield name, product, name in ("o", "down")


def main() -> None:
    for model in MODELS:
        for rows in (1, 32, 64):
            for name, product, residual in products_of(model, rows):
                found = product_resources(product, residual=residual)
                print(f"{model:18} {rows:3} rows  {name:8} {product.tiling}\n    {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
