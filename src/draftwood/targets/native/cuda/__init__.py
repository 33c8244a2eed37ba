"""The GPU decoder, in Triton. Modules that need Triton are imported on demand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from typing import TYPE_CHECKING

import torch

from draftwood.disk import is_unwritable
from draftwood.models import ModelConfig
from draftwood.targets.cache import KVCache
from draftwood.targets.native.weights import Weights

if TYPE_CHECKING:
    from draftwood.targets.native.cuda.decoder import CudaDecoder
    from draftwood.targets.native.cuda.layers import FusedLayers


MIN_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)  # bfloat16 and 8-bit tensor cores


def why_unavailable(config: ModelConfig, dtype: torch.dtype, device: torch.device, quantize: str | None = None) -> str:
    """Why the decoder cannot run a model; empty if it can."""
    if why := why_not_on(device, quantize):
        return why
    if extras := config.list_extras():
        return f"the model has {' and '.join(extras)}"
    group = config.num_heads // config.num_kv_heads
    sizes = (config.hidden_size, config.intermediate_size, config.q_size, config.head_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        return "only bfloat16 and float16"
    if any(size % 16 for size in sizes) or config.head_dim > 256 or group > 16:
        return f"sizes {sizes} are not all multiples of 16, head_dim exceeds 256, or over 16 query heads share a key"
    return ""


def why_not_on(device: torch.device, quantize: str | None = None) -> str:
    """Why the decoder cannot run any model on a device; empty if it can."""
    if device.type != "cuda":
        return "" if _is_interpreted() else "not a GPU"
    if torch.version.hip is not None:
        return "not an NVIDIA GPU"
    required = FP8_CAPABILITY if quantize == "fp8" else MIN_CAPABILITY
    if torch.cuda.get_device_capability(device) < required:
        instead = "; int8 may work" if quantize == "fp8" else ""
        return f"the GPU's compute capability is below {'.'.join(map(str, required))}{instead}"
    return _why_not_built() if importlib.util.find_spec("triton") else "Triton is not installed"


def new_decoder(config: ModelConfig, weights: Weights, cache: KVCache, *, exact: bool = False) -> CudaDecoder:
    from draftwood.targets.native.cuda.decoder import CudaDecoder

    return CudaDecoder(config, weights, cache, exact=exact)


def new_layers(config: ModelConfig, weights: Weights) -> FusedLayers:
    """The layers that the decoder's target exposes, for training."""
    from draftwood.targets.native.cuda.layers import FusedLayers

    return FusedLayers(config, weights)


def _why_not_built() -> str:
    """Why Triton cannot build the launchers of its kernels, which takes a C compiler and Python's headers."""
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        needed = "a C compiler and Python's headers"
        if is_unwritable(error):
            needed = "a folder that it can write to, as set by TRITON_CACHE_DIR"
        return f"Triton cannot build its launchers; it needs {needed}: {str(error)[:200]}"
    return ""


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU, for tests."""
    if "TRITON_INTERPRET" not in os.environ or importlib.util.find_spec("triton") is None:
        return False  # not asked of Triton itself: importing it takes 70 MB
    import triton

    return bool(triton.knobs.runtime.interpret)
