"""Triton kernels without a GPU: interpreted in a separate process, or compiled for an absent GPU.

Whether kernels are interpreted is fixed for the whole process when Triton is first imported. So a test file that
needs it runs itself again: ``run_interpreted(__file__)`` in one test, ``runs_kernels`` on the kernel tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

runs_kernels = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU or the interpreter")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


def run_interpreted(test_file: str) -> None:
    """Run the kernel tests of a file in the interpreter; fail with their report."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-x", test_file]
    done = subprocess.run(
        command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def patch_interpreter() -> None:
    """Fix defects of the interpreter in some versions: loop bounds under numpy 2.4, bfloat16 (products, constants; it
    truncates where a GPU rounds), integer masks, and slow calls."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    convert_float = interpreter._convert_float

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(data: Any, source: Any, result: Any, rounding: Any) -> Any:
        if (source, result) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, result) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(data).view(np.uint32).reshape(data.shape)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
            return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)
        return convert_float(data, source, result, rounding)

    def from_integer(self: Any, source: Any, result: Any) -> Any:
        if result.scalar == tl.bfloat16:
            source = self.cast_impl(source, tl.float32)
        return self.cast_impl(source, result)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (
            convert(x.data, x.dtype, tl.float32, None).view(np.float32) if x.dtype == tl.bfloat16 else x.data
            for x in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def constant(_: Any, value: float) -> Any:
        return interpreter.TensorHandle(
            convert(np.array([value], np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16
        )

    masked_load = interpreter.InterpreterBuilder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        return masked_load(self, pointers, interpreter.TensorHandle(mask.data.astype(bool), tl.int1), *others)

    prepared: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in prepared:  # once is enough, not at every call
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang_tensor = with_index
    interpreter.InterpreterBuilder.get_bf16 = constant
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_masked_load = load
    interpreter.InterpreterBuilder.create_si_to_fp = from_integer
    interpreter._convert_float = convert


if INTERPRETED:
    patch_interpreter()


class Resources(NamedTuple):
    """Resources of a compiled kernel."""

    registers: int  # per thread
    stack: int  # bytes of local memory per thread: spills
    shared: int  # bytes per program


def resources(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    **options: int,
) -> Resources:
    """Compile ``kernel`` for a GPU of this capability; pointers and integers are multiples of 16, as in practice,
    except those excluded from specialization."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    even = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types.get(name, "fp32") != "fp32" and name not in (kernel.do_not_specialize or ())
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=even),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(_number("REG", usage), _number("STACK", usage), compiled.metadata.shared)


def _resource_usage(cubin: bytes) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])
