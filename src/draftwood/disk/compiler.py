"""Build C sources into shared libraries, for one CPU feature set or for the CPU of this machine.

Standard library only: ``setup.py`` runs this file by itself to build the libraries of a wheel.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# No contraction: every multiply-add is written out, so that all inlined copies round alike. No early scheduling: the
# micro-kernels are written in the order they should run (GCC 12 on ARM; elsewhere it is off or unknown anyway).
COMMON_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-schedule-insns", "-fPIC", "-shared")
# The first that the compiler accepts. -march=native is the x86 spelling, -mcpu=native the one of ARM and POWER.
NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
LIBRARIES = ("-lm", "-pthread")
TIMEOUT_S = 300
SHARED = Path(__file__).resolve().parent  # headers that several libraries include

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
# CPU features, by their names in /proc/cpuinfo, that each prebuilt variant needs: fastest variant first. These are the
# features that vec.h, integers.h and amx.h test for, so the first variant that fits computes the same bits as a native
# build.
_X86_64 = {
    "amx": (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512vnni": (*_AVX512, "avx512_vnni"),
    "avx512": _AVX512,
    "avx2vnni": (*_AVX2, "avx_vnni"),
    "avx2": _AVX2,
    "baseline": (),
}
_AARCH64: dict[str, tuple[str, ...]] = {"i8mm": ("asimddp", "i8mm"), "dotprod": ("asimddp",), "baseline": ()}
_ARM_FLAGS = {"asimddp": "-march=armv8.2-a+dotprod", "i8mm": "-march=armv8.2-a+dotprod+i8mm"}  # the last one counts
_ALL_VARIANTS = {"x86_64": _X86_64, "aarch64": _AARCH64}
VARIANTS: dict[str, tuple[str, ...]] = _ALL_VARIANTS.get(platform.machine(), {"baseline": ()})


class CompileError(Exception):
    """The compiler refused a source file. The message is its first error line."""


def find_compiler() -> str | None:
    chosen = os.environ.get("DRAFTWOOD_CC")
    candidates = (chosen,) if chosen else ("cc", "gcc", "clang")
    return next((found for name in candidates if (found := shutil.which(name))), None)


def compile_variant(compiler: str, source: Path, to: Path, variant: str) -> None:
    compile_library(compiler, source, to, [list(map(_flag, VARIANTS[variant]))])


def _flag(feature: str) -> str:
    """The compiler flag for a CPU feature."""
    if feature in _ARM_FLAGS:
        return _ARM_FLAGS[feature]
    return f"-m{feature.replace('amx_', 'amx-').replace('_', '')}"


def compile_library(
    compiler: str, source: Path, to: Path, flag_choices: Iterable[Iterable[str]] = NATIVE_FLAGS
) -> None:
    """Compile with the first of ``flag_choices`` that the compiler accepts."""
    complaint = ""
    for flags in flag_choices:
        command = [compiler, *COMMON_FLAGS, *flags, f"-I{SHARED}", str(source), "-o", str(to), *LIBRARIES]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if result.returncode == 0:
            return
        complaint = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
    raise CompileError(complaint or "it gave no reason")


def fitting_variants() -> list[str]:
    """The variants that this CPU can run, fastest first."""
    features = set(describe_cpu().split())
    return [variant for variant, needed in VARIANTS.items() if features.issuperset(needed)]


@cache
def describe_cpu() -> str:
    """The machine type, CPU model and feature names, in lower case: whatever tells one CPU from another."""
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(fields)}
    except OSError:  # macOS
        keys = [f"machdep.cpu.{key}" for key in ("brand_string", "features", "leaf7_features")]
        sysctl = shutil.which("sysctl", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        result = subprocess.run(
            [sysctl or "true", "-n", *keys], capture_output=True, text=True, timeout=60, check=False
        )
        lines = {platform.platform(), *result.stdout.splitlines()}
    return "\n".join([platform.machine(), *sorted(lines)]).lower()
