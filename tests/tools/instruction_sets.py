"""C code of the kernel, compiled for every instruction set that can run here.

Code for ARM runs under an emulator (Debian: ``qemu-user`` and ``gcc-aarch64-linux-gnu``). Code for AMX runs with its
tile instructions replaced by C functions (``amx_emulation.h``), on a CPU with AVX-512.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.compiler import COMMON_FLAGS, LIBRARIES, describe_cpu, find_compiler
from draftwood.targets.native.cpu import build

HEADERS = Path(build.__file__).parent
SOURCES = Path(__file__).parents[1] / "targets"
AVX2, AVX512 = ("-mavx2", "-mfma", "-mf16c"), ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
VNNI = (*AVX512, "-mavx512vnni")
X86_SETS = {  # CPU features, flags
    "portable": (("fma", "f16c"), ("-mavx", "-mfma", "-mf16c")),
    "AVX2": (("avx2", "fma", "f16c"), AVX2),
    "AVX-VNNI": (("avx_vnni", "fma", "f16c"), (*AVX2, "-mavxvnni")),
    "VNNI with 256 bits": (("avx512_vnni", "fma"), (*AVX2, *VNNI, "-DVW=8", "-DGROUP=2", "-DMAX_ROWS=6")),
    "AVX-512": (("avx512bw", "avx512dq"), AVX512),
    "AVX-512-VNNI": (("avx512_vnni",), VNNI),
    "AMX": (("avx512_vnni",), (*VNNI, "-include", str(SOURCES / "amx_emulation.h"))),
}
ARM_SETS = {"NEON": "armv8-a", "NEON dot product": "armv8.2-a+dotprod", "NEON i8mm": "armv8.2-a+dotprod+i8mm"}


class InstructionSet(NamedTuple):
    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...]  # what runs a program

    def compile(self, source: Path, to: Path, *flags: str) -> None:
        common = [flag for flag in COMMON_FLAGS if flag not in ("-O3", "-fPIC", "-shared")]
        places = [f"-I{HEADERS}", str(source), "-o", str(to)]
        subprocess.run([self.compiler, "-O1", *common, *self.flags, *flags, *places, *LIBRARIES], check=True)


def find_sets() -> dict[str, InstructionSet]:
    found = {}
    compiler, features = find_compiler(), set(describe_cpu().split())
    if compiler is not None and "x86_64" in features:
        for name, (needed, flags) in X86_SETS.items():
            if features.issuperset(needed):
                found[name] = InstructionSet(compiler, flags, ())
    arm_compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if arm_compiler is not None and emulator is not None:
        for name, architecture in ARM_SETS.items():
            flags = ("-static", f"-march={architecture}")
            found[name] = InstructionSet(arm_compiler, flags, (emulator, "-cpu", "max"))
    return found


def build_programs(source: str, folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Returns the command of a program for each instruction set."""
    commands = {}
    for name, instructions in find_sets().items():
        if name in without:
            continue
        program = folder / name.replace(" ", "-")
        instructions.compile(SOURCES / source, program)
        commands[name] = [*instructions.runner, str(program)]
    return commands
