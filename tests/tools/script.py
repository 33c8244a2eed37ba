"""The scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.tools.paths import BENCHMARKS


def load_script(name: str) -> ModuleType:
    """Load a script under its own name; it can import modules of its folder, like a real script."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses need it
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    return module
