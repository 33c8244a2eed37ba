"""What passes need of the device they run on: streams, events, graphs; stand-ins where there is no GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from draftwood.models import ModelConfig
from draftwood.targets.native.cuda.products import Gpu
from draftwood.targets.native.rope import inverse_frequencies

INTERPRETED = Gpu(num_processors=4, shared_bytes=100_000)  # where kernels are tried without a GPU
_ONE_AT_A_TIME = threading.Lock()
LEAST_SHARED = 99 << 10  # bytes that a program may have on every GPU of the family


def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    # Torch tells a program's part of a processor's shared memory since 2.6.
    shared = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
    return Gpu(properties.multi_processor_count, int(shared))


def can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def new_event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be this one."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device.index)


def capture(launch: Callable[[], None], stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.CUDAGraph:
    """What ``launch`` launches, as a graph. It has run once before, so that its kernels are compiled."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # Other threads may use the GPU meanwhile: what they do is none of the graph's business.
    with _no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """What garbage holds of the GPU, graphs of an engine that is gone among it, must not be given back in the midst of
    a capture: that would end it."""
    with _ONE_AT_A_TIME:  # who is done with his own lets collections begin again
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def rotation_table(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2], rounded as the eager decoder rounds them."""
    places = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(places, inverse_frequencies(config.rope, config.head_dim).to(device))
    return angles.cos().to(dtype), angles.sin().to(dtype)
