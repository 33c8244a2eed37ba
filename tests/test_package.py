"""The wheel in a clean environment: it is complete, and its kernels run without a C compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from draftwood.disk.compiler import VARIANTS, find_compiler
from tests.tools.paths import ROOT

pytestmark = pytest.mark.slow

GENERATE = """
import json
import draftwood
llm = draftwood.LLM("tiny", device="cpu", drafter="goose")
(completion,) = llm.generate("abab", draftwood.SamplingParams(max_tokens=8, ignore_eos=True))
print(json.dumps([draftwood.__file__, llm.info.backend, len(completion.token_ids)]))
"""


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build from a copy of the sources, so that nothing is left in the checkout."""
    copy = folder / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, copy], check=True, env=os.environ | environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_the_wheel_runs_the_fused_kernel_without_a_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    libraries = {f"cpu-{variant}" for variant in VARIANTS} | {"core-baseline", "inputs-baseline"}
    assert names_in(wheel) >= {f"draftwood/disk/prebuilt/{name}.so" for name in libraries}
    clean = tmp_path / "clean"
    venv.create(clean)
    python = clean / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )
    # The dependencies are those of this environment: a line in a .pth file is quicker than a second torch. An editable
    # Draftwood here stays invisible, because .pth files of added folders are not read.
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = tmp_path / "home"
    environment = {"PATH": "", "DRAFTWOOD_HOME": str(home), "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-I", "-c", GENERATE], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    file, backend, num_tokens = json.loads(done.stdout)
    assert Path(file).is_relative_to(clean)
    assert (backend, num_tokens) == ("fused-cpu", 8)
    assert not (home / "kernels").exists()


def test_wheel_built_without_compiler_is_pure(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, DRAFTWOOD_CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = names_in(wheel)
    assert not [name for name in names if name.endswith(".so")]
    assert {"draftwood/compiled/core.c", "draftwood/targets/native/cpu/kernel.c", "draftwood/py.typed"} <= names
