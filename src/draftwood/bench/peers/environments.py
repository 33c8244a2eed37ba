"""Finds the Python that runs a peer, or explains what is missing.

1. ``DRAFTWOOD_PEER_<ENGINE>``, the path of a Python interpreter;
2. the environment that ``draftwood bench peers --install ENGINE`` created in the cache folder;
3. the current interpreter, if it has the engine.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from draftwood.bench.peers.messages import PeerModel
from draftwood.bench.peers.specs import PeerSpec
from draftwood.disk import cache_home

# Without the current folder: a worker does not search it, and it may contain a folder named like a package.
_PROBE = """
import importlib.util, sys
sys.path = [place for place in sys.path if place]
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
_PROBE_SECONDS = 60.0
_PYTHON_PATHS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")


def peer_home(engine: str) -> Path:
    """Return the folder of an engine's environment."""
    return cache_home() / "peers" / engine


def venv_python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def python_variable(engine: str) -> str:
    return f"DRAFTWOOD_PEER_{engine.upper()}"


def clean_environment() -> dict[str, str]:
    """Copy the environment without Python's path variables, which are wrong for another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in _PYTHON_PATHS}


def find_python(spec: PeerSpec) -> Path | None:
    """Find the Python for the peer's worker; None if there is none. ``explain_absence`` checks that it works."""
    chosen = os.environ.get(python_variable(spec.engine))
    if chosen:
        return Path(chosen).expanduser()
    installed = venv_python(peer_home(spec.engine))
    if installed.exists():
        return installed
    return Path(sys.executable) if importlib.util.find_spec(spec.packages[0]) is not None else None


def explain_absence(spec: PeerSpec, model: PeerModel | None = None) -> str | None:
    """Explain why the peer cannot run and how to install it; None if it can run, and read ``model`` if given."""
    python = find_python(spec)
    variable = python_variable(spec.engine)
    is_chosen = bool(os.environ.get(variable))  # has priority over an installed environment
    unset = "unset it and " if is_chosen else ""
    install = f"{unset}install it with: draftwood bench peers --install {spec.engine}"
    if python is None:
        return f"{spec.name} is not installed; {install}"
    missing = _list_missing(python, spec.packages)
    named = f"{variable} names {python}, which" if is_chosen else python
    if missing is None:
        return f"{spec.name} is absent: {named} does not run; {install}"
    if missing:
        return f"{spec.name} is absent: {named} has no {' and no '.join(missing)}; {_advise(missing, python, install)}"
    if model is not None and spec.needs_gguf and model.gguf is None:
        return f"{spec.name} needs the model as a GGUF file; use --model FILE.gguf"
    return None


def _list_missing(python: Path, packages: Sequence[str]) -> list[str] | None:
    """List the packages that this Python cannot import; None if it does not run."""
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


def _advise(missing: Sequence[str], python: Path, install: str) -> str:
    """Advise how to install. An environment may lack arctic_inference, which has no wheels for some machines."""
    if list(missing) == ["arctic_inference"]:
        return f"install it with: {python} -m pip install --no-deps arctic-inference (it needs a C++ compiler)"
    return install
