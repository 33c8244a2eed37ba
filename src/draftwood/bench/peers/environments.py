"""Which Python a peer runs in, and what is missing where there is none.

1. ``DRAFTWOOD_PEER_<ENGINE>``, the path of a Python;
2. the environment that ``draftwood bench peers --install ENGINE`` made in the cache folder;
3. this Python, if it has the engine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from draftwood.bench.peers.messages import PeerModel
from draftwood.bench.peers.specs import PeerSpec
from draftwood.disk import cache_home

# Without the folder we are in: a worker does not look there, and a folder there may be called like a package.
_PROBE = """
import importlib.util, sys
sys.path = [place for place in sys.path if place]
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
_PROBE_SECONDS = 60.0
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")


def peer_home(engine: str) -> Path:
    """Where the environment of an engine is installed."""
    return cache_home() / "peers" / engine


def venv_python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def python_variable(engine: str) -> str:
    return f"DRAFTWOOD_PEER_{engine.upper()}"


def clean_environment() -> dict[str, str]:
    """Our variables without those that tell a Python where to look for packages: a peer's Python knows its own."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def find_python(spec: PeerSpec) -> Path | None:
    """The Python to run the peer's worker with; None if there is none. ``explain_absence`` checks that it works."""
    chosen = os.environ.get(python_variable(spec.engine))
    if chosen:
        return Path(chosen).expanduser()
    installed = venv_python(peer_home(spec.engine))
    if installed.exists():
        return installed
    return Path(sys.executable) if importlib.util.find_spec(spec.packages[0]) is not None else None


def explain_absence(spec: PeerSpec, model: PeerModel | None = None) -> str | None:
    """None if the peer can run, else why not and how to get it. With a model also whether the peer can read that."""
    python = find_python(spec)
    variable = python_variable(spec.engine)
    is_chosen = bool(os.environ.get(variable))  # it goes before what is installed
    unset = "unset it and " if is_chosen else ""
    install = f"{unset}get it with: draftwood bench peers --install {spec.engine}"
    if python is None:
        return f"{spec.name} is not installed; {install}"
    missing = _missing(python, spec.packages)
    named = f"{variable} names {python}, which" if is_chosen else python
    if missing is None:
        return f"{spec.name} is absent: {named} does not run; {install}"
    if missing:
        return f"{spec.name} is absent: {named} has no {' and no '.join(missing)}; {_remedy(missing, python, install)}"
    if model is not None and spec.needs_gguf and model.gguf is None:
        return f"{spec.name} needs the model as a GGUF file, and there is none; name one, as in --model FILE.gguf"
    return None


def _missing(python: Path, packages: Sequence[str]) -> list[str] | None:
    """The packages this Python cannot import; None if it cannot even be asked."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE, *packages],
            capture_output=True,
            text=True,
            errors="replace",
            env=clean_environment(),
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split() if done.returncode == 0 else None


def _remedy(missing: Sequence[str], python: Path, install: str) -> str:
    """arctic_inference has no wheels for every machine, so it is the one that an installed environment may lack."""
    if list(missing) == ["arctic_inference"]:
        return f"get it with: {python} -m pip install --no-deps arctic-inference (it needs a C++ compiler)"
    return install
