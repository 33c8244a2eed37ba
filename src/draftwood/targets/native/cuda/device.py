"""Streams, events, graph capture and properties of the device that passes run on, with stand-ins for the CPU."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from draftwood.models import ModelConfig
from draftwood.targets.native.cuda.products import Gpu
from draftwood.targets.native.rope import inverse_frequencies

INTERPRETED = Gpu(num_processors=4, shared_bytes=100_000)  # for tests without a GPU
MIN_SHARED = 99 << 10  # bytes of shared memory that a program may use on every supported GPU
_CAPTURE_LOCK = threading.Lock()


def describe_gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    # This property exists since torch 2.6.
    shared = getattr(properties, "shared_memory_per_block_optin", MIN_SHARED)
    return Gpu(properties.multi_processor_count, int(shared))


def supports_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch, which came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def new_event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """Record an event of ``device``, the current one, in its current stream. Naming the device is quicker than letting
    torch look for it, which asks the driver each time."""
    index = torch.cuda.current_device() if device.index is None else device.index
    event.record(torch.cuda.current_stream(index))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one: that is where Triton launches kernels."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device.index)


def capture(launch: Callable[[], None], stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture what ``launch`` launches. It must have run once before, so that its kernels are compiled."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    # thread_local: other threads may use the GPU during the capture.
    with _pause_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Pause garbage collection: freeing GPU resources, such as graphs of a closed engine, would abort the capture."""
    with _CAPTURE_LOCK:  # the first of two captures to finish would enable collection for the other
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def build_rotation_table(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2], rounded as in the eager decoder."""
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim).to(device))
    return angles.cos().to(dtype), angles.sin().to(dtype)
