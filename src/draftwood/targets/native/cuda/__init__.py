"""The decoder for GPUs, in Triton. Nothing here is imported where Triton is missing."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import TYPE_CHECKING

import torch

from draftwood.models import ModelConfig
from draftwood.targets.cache import KVCache
from draftwood.targets.native.weights import Weights

if TYPE_CHECKING:
    from draftwood.targets.native.cuda.decoder import CudaDecoder
    from draftwood.targets.native.cuda.layers import FusedLayers

__all__ = ["new_decoder", "new_layers", "why_not_on", "why_unavailable"]

LEAST_CAPABILITY = (8, 0)  # bfloat16 on matrix units
FP8_CAPABILITY = (8, 9)


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
        return f"sizes {sizes} are not all multiples of 16, heads are larger than 256, or more than 16 share a key"
    return ""


def why_not_on(device: torch.device, quantize: str | None = None) -> str:
    """Why the decoder cannot run any model on a device; empty if it can."""
    if device.type != "cuda":
        return "" if _interprets() else "not a GPU"
    if torch.version.hip is not None:
        return "not a GPU of NVIDIA"
    least = FP8_CAPABILITY if quantize == "fp8" else LEAST_CAPABILITY
    if torch.cuda.get_device_capability(device) < least:
        instead = ", where int8 may do" if quantize == "fp8" else ""
        return f"the GPU's compute capability is below {'.'.join(map(str, least))}{instead}"
    return _why_not_built() if importlib.util.find_spec("triton") else "Triton is not installed"


def new_decoder(config: ModelConfig, weights: Weights, cache: KVCache) -> CudaDecoder:
    from draftwood.targets.native.cuda.decoder import CudaDecoder

    return CudaDecoder(config, weights, cache)


def new_layers(config: ModelConfig, weights: Weights) -> FusedLayers:
    """What the decoder's target lends."""
    from draftwood.targets.native.cuda.layers import FusedLayers

    return FusedLayers(config, weights)


def _why_not_built() -> str:
    """Triton builds what launches its kernels with the system's C compiler and Python's headers."""
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        return f"Triton cannot build its launchers, it wants a C compiler and Python's headers: {str(error)[:200]}"
    return ""


def _interprets() -> bool:
    """Whether kernels run on the CPU, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
