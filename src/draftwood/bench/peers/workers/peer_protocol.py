"""What the workers of peers share: one JSON object a line in, one out.

Workers run in another Python than Draftwood's and import nothing of it. Each is started with nothing, told to load a
model, and then asked for one answer at a time; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Generate = Callable[[Message], Message]
Load = Callable[[Message], tuple[Generate, Message]]  # the model -> how it answers, and facts about it

_STATUS, _REFERENCES = "/proc/self/status", "/proc/self/clear_refs"


def serve(load: Load) -> None:
    """Answers until the input ends.

    Whatever libraries print goes to the log, never between the answers; and whoever reads the standard input, a child
    for instance, finds nothing there instead of the next question.
    """
    questions, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    generate: Generate | None = None
    for line in questions:
        message = json.loads(line)
        try:
            if message["op"] == "load":
                generate, answer = load(message)
            else:
                assert generate is not None, "there is no model yet"
                answer = generate(message)
        except Exception as error:  # noqa: BLE001  whatever it is, the other side should read it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": message["id"], **answer}) + "\n")
        answers.flush()


def reset_peak() -> None:
    """Starts counting the process's highest memory anew, where the system can."""
    try:
        with open(_REFERENCES, "w") as handle:  # noqa: PTH123
            handle.write("5")
    except OSError:
        pass


def peak_bytes() -> int | None:
    """The process's highest memory since the reset; since its start where the system cannot reset."""
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
    """The dtype to load: that which was asked for, but float32 on a CPU that would have to imitate a shorter one."""
    dtype = str(model["dtype"])
    if not model["dtype_is_free"] or model["device"] != "cpu" or dtype == "float32":
        return dtype
    flags = cpu_flags()
    return dtype if flags is None or flags & {"bf16", "avx512_bf16", "amx_bf16"} else "float32"


def cpu_flags() -> set[str] | None:
    """What the processor can do, where the system tells."""
    try:
        with open("/proc/cpuinfo") as handle:  # noqa: PTH123
            lines = [line for line in handle if line.lower().startswith(("flags", "features"))]
    except OSError:
        return None
    return set(lines[0].partition(":")[2].split()) if lines else None
