"""The structure is a test: layers import downwards only, every module can be imported, files stay readable."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftwood
from draftwood.drafters.registry import BUILTIN

SOURCE = Path(draftwood.__file__).parent

# Each line may import only lines below it; names on one line do not import each other.
LAYERS = [
    {"cli"},
    {"bench", "serve"},
    {"check", "train", "tune"},
    {"compare"},
    {"corpus", "prompts", "llm"},
    {"engine"},
    {"drafters"},
    {"growth", "sources"},
    {"verify"},
    {"compiled"},
    {"heads"},
    {"target"},
    {"sampling", "tree"},
    {"config", "display", "files", "toml"},
    {"errors"},
]
MAX_LINES = 400
# The core has no further requirements; these come with an extra and are imported where they are used.
EXTRAS = {"transformers", "huggingface_hub", "matplotlib", "xllamacpp", "vllm", "pyarrow", "tensorboard", "uvicorn"}

NEEDS_TRITON = "draftwood.targets.native.cuda."  # modules of that package; the package itself says whether they can run

MODULES = sorted(SOURCE.rglob("*.py"))
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """Line, module and whether the import runs at import time."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found.append((node.lineno, node.module, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in top) for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_layers_import_downwards(path: Path) -> None:
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return  # the package itself names what users import
    assert own in LEVEL, f"{own} belongs to no layer: add it to LAYERS and to docs/architecture.md"
    for line, module, at_import in imports(path):
        if module.split(".")[0] in EXTRAS:
            assert not at_import, f"{path}:{line}: {module} is an extra and must be imported where it is used"
        if not module.startswith("draftwood."):
            continue
        other = layer_of(module)
        if other != own:
            assert LEVEL[own] < LEVEL[other], f"{path}:{line}: {own} must not import {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_every_module_can_be_imported() -> None:
    """All but those of the GPU decoder where Triton is missing."""
    for module in pkgutil.walk_packages([str(SOURCE)], "draftwood."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                if missing.name != "triton" or not module.name.startswith(NEEDS_TRITON):
                    raise


def test_only_the_gpu_decoder_needs_triton() -> None:
    """Everything else is imported where there is none, and nothing of it imports Triton by the way."""
    modules = [module.name for module in pkgutil.walk_packages([str(SOURCE)], "draftwood.")]
    wanted = [name for name in modules if not name.endswith("__main__") and not name.startswith(NEEDS_TRITON)]
    assert len(wanted) < len(modules) - 1
    code = f"import importlib, sys; sys.modules['triton'] = None; [importlib.import_module(m) for m in {wanted}]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_documentation_names_every_layer() -> None:
    page = Path(__file__).parent.parent / "docs" / "architecture.md"
    text = page.read_text()
    missing = [name for name in LEVEL if f"{name}" not in text]
    assert not missing


def test_nothing_of_one_machine_is_in_the_project() -> None:
    root = Path(__file__).parent.parent
    suspects = ("/" + "root/", "/" + "work/", "/" + "home/")
    for path in [
        *MODULES,
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
        root / "Makefile",
        root / "pyproject.toml",
    ]:
        text = path.read_text()
        assert not [word for word in suspects if word in text], path


def test_every_built_in_drafter_is_an_entry_point_too() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."draftwood.drafters"]\n')[1].split("\n\n")[0]
    entries = dict(line.replace('"', "").split(" = ") for line in section.splitlines())
    assert entries == BUILTIN
