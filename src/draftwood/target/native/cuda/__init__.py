"""The decoder for GPUs, in Triton. Nothing here is imported where Triton is missing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from draftwood.target.cache import KVCache
from draftwood.target.native.config import ModelConfig
from draftwood.target.native.weights import Weights

if TYPE_CHECKING:
    from draftwood.target.native.cuda.decoder import CudaDecoder

LEAST_CAPABILITY = (8, 0)  # bfloat16 on matrix units


def why_unavailable(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why the decoder cannot run a model; empty if it can."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
            return f"the GPU's compute capability is below {'.'.join(map(str, LEAST_CAPABILITY))}"
    elif not _interprets():
        return "not a GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    group = config.num_heads // config.num_kv_heads
    sizes = (config.hidden_size, config.intermediate_size, config.q_size, config.head_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        return "only bfloat16 and float16"
    if any(size % 16 for size in sizes) or config.head_dim > 256 or group > 16:
        return f"sizes {sizes} are not all multiples of 16, heads are larger than 256, or more than 16 share a key"
    return ""


def new_decoder(config: ModelConfig, weights: Weights, cache: KVCache) -> CudaDecoder:
    from draftwood.target.native.cuda.decoder import CudaDecoder

    return CudaDecoder(config, weights, cache)


def _interprets() -> bool:
    """Whether kernels run on the CPU, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
