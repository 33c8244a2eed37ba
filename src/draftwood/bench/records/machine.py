"""The machine a benchmark runs on, and peak memory."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from draftwood import __version__
from draftwood.sizing import processor
from draftwood.targets import TargetInfo

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "triton")
_RESET_PEAK = "5"  # written to clear_refs, Linux resets the peak resident set size


def describe_machine() -> dict[str, Any]:
    """Hardware facts that affect the figures; nothing that identifies a person or a host."""
    facts: dict[str, Any] = {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    memory = _memory_bytes()
    if memory:
        facts["memory_gb"] = round(memory / 1e9)
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def list_versions() -> dict[str, str]:
    found = {"draftwood": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_model(info: TargetInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "architecture": info.architecture,
        "backend": info.backend,
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "parameters": info.num_parameters,
        "context_length": info.context_length,
    }


class LoadMeter:
    """The share of the cores that other processes use while it exists."""

    def __init__(self) -> None:
        self._started = (time.monotonic(), _busy_seconds(), _own_seconds())

    def read(self) -> float | None:
        """None if the system does not tell."""
        (since, busy, own), now = self._started, _busy_seconds()
        seconds = time.monotonic() - since
        if busy is None or now is None or seconds < 1.0:
            return None
        others = (now - busy) - (_own_seconds() - own)
        return max(0.0, others / (seconds * (os.cpu_count() or 1)))


def _busy_seconds() -> float | None:
    """CPU time of all processes since the machine started, other virtual machines included."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, first)  # the others are idle
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def _own_seconds() -> float:
    """CPU time of this process and of finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(slots=True)
class PeakMemory:
    """Peak memory of a code block; None if unknown."""

    num_bytes: int | None = None


@contextmanager
def measure_peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak of GPU memory if ``device`` is a GPU, else of this process, earlier allocations included."""
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    _reset_peak()
    yield peak
    peak.num_bytes = _read_peak()


def _processor_name() -> str:
    """Ask lscpu first: on ARM the kernel reports cores by number only."""
    try:
        output = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return processor()
    names = [line.partition(":")[2].strip() for line in output.splitlines() if line.startswith("Model name:")]
    return ", ".join(dict.fromkeys(names)) or processor()


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return  # the peak then covers the whole process, which is still an upper bound


def _read_peak() -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        import resource  # missing on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
