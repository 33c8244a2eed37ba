"""Checks of the structure: layers, public names of packages, import cycles, importable modules, file sizes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import draftwood
from draftwood.drafters.registry import BUILTIN
from tests.tools.paths import ROOT

SOURCE = Path(draftwood.__file__).parent
MAX_LINES = 400
# The core has no further requirements; these come with an extra and are imported where they are used.
EXTRAS = {"transformers", "huggingface_hub", "xllamacpp", "vllm", "pyarrow", "tensorboard", "llguidance"}
# Packages that exist only with their extra: they import it at the top, and others import them where they are used.
OWN_EXTRAS = {"serve": {"uvicorn", "starlette", "prometheus_client"}}

# Modules that import Triton; packages of the GPU decoder report whether they can run without importing it.
NEEDS_TRITON = ("draftwood.targets.native.cuda.", "draftwood.sources.neural.head_graphs")

MODULES = sorted(path for path in SOURCE.rglob("*.py") if "workers" not in path.parts)  # workers are scripts


def read_layers() -> list[set[str]]:
    """The layers from top to bottom, from the place that lists them."""
    block = re.search(r"```layers\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert block is not None, "docs/architecture.md has no block ```layers"
    return [set(re.split(r"  +", line)[0].split(" | ")) for line in block.group(1).splitlines()]


LEVEL = {name: level for level, names in enumerate(read_layers()) for name in names}


class Import(NamedTuple):
    line: int
    module: str  # the module or package that is imported from, or the submodule itself
    name: str | None  # None: the module itself
    at_top: bool  # runs when the importing module is imported


def module_name(path: Path) -> str:
    parts = ("draftwood", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in MODULES}
PACKAGES = {name for name, path in PATHS.items() if path.name == "__init__.py"}


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of the file, those for type checkers included."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                where = (inner, None) if inner in PATHS else (node.module, alias.name)
                found.append(Import(node.lineno, *where, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, None, id(node) in top) for alias in node.names]
    return tuple(found)


def inner_imports(path: Path) -> Iterator[Import]:
    return (each for each in imports(path) if each.module.startswith("draftwood."))


@cache
def face(package: str) -> frozenset[str]:
    """What outsiders may import from a package: what its ``__init__.py`` defines or imports from its own modules."""
    names: set[str] = set()
    body = ast.parse(PATHS[package].read_text()).body
    lazy = [inner for node in body if isinstance(node, ast.If) for inner in node.body]  # for type checkers
    for node in [*body, *lazy]:
        match node:
            case ast.ImportFrom(module=str(module)) if f"{module}.".startswith(f"{package}."):
                names.update(alias.name for alias in node.names)
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names.add(name)
    return frozenset(name for name in names if not name.startswith("_"))


def by_path(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=by_path)
def test_layers_import_downwards(path: Path) -> None:
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return  # the package itself names what users import
    assert own in LEVEL, f"{own} belongs to no layer: add it to docs/architecture.md"
    for each in imports(path):
        if each.module.split(".")[0] in EXTRAS.union(*OWN_EXTRAS.values()) - OWN_EXTRAS.get(own, set()):
            assert not each.at_top, f"{path}:{each.line}: {each.module} is an extra: import it where it is used"
    for each in inner_imports(path):
        other = each.module.split(".")[1]
        assert other == own or LEVEL[own] < LEVEL[other], f"{path}:{each.line}: {own} must not import {other}"
        needs_extra = other in OWN_EXTRAS and other != own
        assert not (needs_extra and each.at_top), (
            f"{path}:{each.line}: {other} needs an extra: import it where it is used"
        )


@pytest.mark.parametrize("path", MODULES, ids=by_path)
def test_packages_are_imported_through_their_public_names(path: Path) -> None:
    """A module imports siblings and parent packages directly, everything else from the public names of a package."""
    name = module_name(path)
    if name == "draftwood.__main__":
        return  # an entry point, like the script that pyproject.toml names
    room = name if name in PACKAGES else name.rpartition(".")[0]
    for each in inner_imports(path):
        parent = each.module.rpartition(".")[0]
        if f"{room}.".startswith(f"{parent}.") or (each.module in PACKAGES and each.name is None):
            continue
        package, wanted = (each.module, each.name) if each.name else (parent, each.module.rpartition(".")[2])
        assert package in PACKAGES, f"{path}:{each.line}: import {wanted} from {parent}, not from {each.module}"
        assert wanted in face(package), f"{path}:{each.line}: {package} does not offer {wanted!r} in its __init__.py"


def dependencies(package: str) -> Mapping[str, set[str]]:
    """Which direct children of a package, files or subfolders, import which others."""
    depth = package.count(".") + 1
    found: dict[str, set[str]] = {}
    for name, path in PATHS.items():
        if name.startswith(f"{package}."):
            child = name.split(".")[depth]
            inside = [each.module for each in inner_imports(path) if each.module.startswith(f"{package}.")]
            found.setdefault(child, set()).update({module.split(".")[depth] for module in inside} - {child})
    return found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_import_cycles_within_packages(package: str) -> None:
    try:
        TopologicalSorter(dependencies(package)).prepare()
    except CycleError as error:
        pytest.fail(f"{package}: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", MODULES, ids=by_path)
def test_files_are_small_and_have_docstrings(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def importable_modules() -> list[str]:
    """Every module, except packages whose extra is not installed."""
    absent = [name for name, extras in OWN_EXTRAS.items() if not all(map(importlib.util.find_spec, extras))]
    names = [module.name for module in pkgutil.walk_packages([str(SOURCE)], "draftwood.")]
    return [name for name in names if not name.endswith("__main__") and name.split(".")[1] not in absent]


def test_every_module_can_be_imported() -> None:
    """All but those of the GPU decoder where Triton is missing."""
    for name in importable_modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != "triton" or not name.startswith(NEEDS_TRITON):
                raise


def test_only_the_gpu_decoder_needs_triton() -> None:
    """Everything else can be imported without Triton and does not import it indirectly."""
    modules = importable_modules()
    wanted = [name for name in modules if not name.startswith(NEEDS_TRITON)]
    assert len(wanted) < len(modules)
    code = f"import importlib, sys; sys.modules['triton'] = None; [importlib.import_module(m) for m in {wanted}]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_project_contains_no_machine_specific_paths() -> None:
    suspects = ("/" + "root/", "/" + "work/", "/" + "home/")
    for path in [
        *MODULES,
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]:
        text = path.read_text()
        assert not [word for word in suspects if word in text], path


def test_every_built_in_drafter_is_an_entry_point_too() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."draftwood.drafters"]\n')[1].split("\n\n")[0]
    entries = dict(line.replace('"', "").split(" = ") for line in section.splitlines())
    assert entries == BUILTIN
