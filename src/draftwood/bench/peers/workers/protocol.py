"""The protocol of peer workers: one JSON object per line in, one per line out.

Workers run in another Python and import nothing of Draftwood. The first message loads a model, each further message
requests one generation. A worker exits at the end of its input.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Generate = Callable[[Message], Message]
Load = Callable[[Message], tuple[Generate, Message]]  # model -> generate function, version and dtype

_STATUS, _REFERENCES = "/proc/self/status", "/proc/self/clear_refs"


def serve(load: Load) -> None:
    """Handle requests until the input ends.

    Standard output is redirected to the log, so that library output cannot mix with replies. Standard input is empty,
    so that child processes cannot consume requests.
    """
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    generate: Generate | None = None
    for line in requests:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                generate, reply = load(message)
            else:
                assert generate is not None, "no model is loaded"
                reply = generate(message)
        except Exception as error:  # noqa: BLE001 - report any error to the parent
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps({"id": message["id"], **reply}) + "\n")
        replies.flush()


def reset_peak() -> None:
    """Reset the process's peak memory, if the system supports it."""
    try:
        with open(_REFERENCES, "w") as handle:  # noqa: PTH123
            handle.write("5")
    except OSError:
        pass


def peak_bytes() -> int | None:
    """Read the process's peak memory since the reset, or since its start if a reset is not supported."""
    try:
        with open(_STATUS) as handle:  # noqa: PTH123
            found = [line.split()[1] for line in handle if line.startswith("VmHWM:")]
        return int(found[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def choose_dtype(model: Message) -> str:
    """Choose the dtype: as requested, but float32 on a CPU that would emulate a 16-bit type."""
    dtype = str(model["dtype"])
    if not model["dtype_is_free"] or model["device"] != "cpu" or dtype == "float32":
        return dtype
    flags = cpu_flags()
    return dtype if flags is None or flags & {"bf16", "avx512_bf16", "amx_bf16"} else "float32"


def cpu_flags() -> set[str] | None:
    """Read the processor's feature flags; None if unknown."""
    try:
        with open("/proc/cpuinfo") as handle:  # noqa: PTH123
            lines = [line for line in handle if line.lower().startswith(("flags", "features"))]
    except OSError:
        return None
    return set(lines[0].partition(":")[2].split()) if lines else None
