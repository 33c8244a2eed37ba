"""Draftwood: a language model generates faster, and its output stays the same."""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwood.config import SamplingParams, Structured
    from draftwood.errors import DraftwoodError
    from draftwood.llm import LLM, Completion

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "DraftwoodError", "SamplingParams", "Structured", "__version__"]

# Threads of torch wait for each other after every operation, by default for milliseconds of busy waiting. If another
# process needs a core, they then wait for a thread that is not running: eager decoding becomes ten times slower. These
# variables limit busy waiting to some ten microseconds; they are read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # GNU
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # Intel and LLVM, milliseconds

# Torch takes a second to import: a help text should not wait for it.
_HOMES = {  # modules
    "LLM": "llm",
    "Completion": "llm",
    "SamplingParams": "config",
    "Structured": "config",
    "DraftwoodError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
    return getattr(importlib.import_module(f"draftwood.{_HOMES[name]}"), name)
