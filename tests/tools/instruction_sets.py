"""C code of the kernel, compiled for every instruction set that can run here.

What the CPU does not have runs under an emulator (Debian: ``qemu-user``, and ``gcc-aarch64-linux-gnu`` or
``gcc-x86-64-linux-gnu`` for the other architecture), which has no AVX-512. Code for AMX runs with its tile instructions
replaced by C functions (``amx_emulation.h``), on a CPU with AVX-512.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from draftwood.disk.compiler import COMMON_FLAGS, LIBRARIES, SHARED, describe_cpu, find_compiler
from draftwood.targets.native.cpu import build

HEADERS = Path(build.__file__).parent
SOURCES = Path(__file__).parents[1] / "targets"
AVX2, AVX512 = ("-mavx2", "-mfma", "-mf16c"), ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
VNNI = (*AVX512, "-mavx512vnni")
EMULATED = ("avx2", "fma", "f16c", "asimddp", "i8mm")  # CPU features
X86_SETS = {  # CPU features, flags
    "portable": (("fma", "f16c"), ("-mavx", "-mfma", "-mf16c")),
    "AVX2": (("avx2", "fma", "f16c"), AVX2),
    "AVX-VNNI": (("avx_vnni", "fma", "f16c"), (*AVX2, "-mavxvnni")),
    "VNNI with 256 bits": (("avx512_vnni", "fma"), (*AVX2, *VNNI, "-DVW=8", "-DGROUP=2", "-DMAX_ROWS=6")),
    "AVX-512": (("avx512bw", "avx512dq"), AVX512),
    "AVX-512-VNNI": (("avx512_vnni",), VNNI),
    "AMX": (("avx512_vnni",), (*VNNI, "-include", str(SOURCES / "amx_emulation.h"))),
}
ARM_SETS = {
    "NEON": ((), ("-march=armv8-a",)),
    "NEON dot product": (("asimddp",), ("-march=armv8.2-a+dotprod",)),
    "NEON i8mm": (("asimddp", "i8mm"), ("-march=armv8.2-a+dotprod+i8mm",)),
}
SETS = {"x86_64": X86_SETS, "aarch64": ARM_SETS}


class InstructionSet(NamedTuple):
    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...]  # what runs a program

    def compile(self, source: Path, to: Path, *flags: str) -> None:
        common = [flag for flag in COMMON_FLAGS if flag not in ("-O3", "-fPIC", "-shared")]
        places = [f"-I{HEADERS}", f"-I{SHARED}", str(source), "-o", str(to)]
        subprocess.run([self.compiler, "-O1", *common, *self.flags, *flags, *places, *LIBRARIES], check=True)


def find_sets() -> dict[str, InstructionSet]:
    found = {}
    for architecture, sets in SETS.items():
        for name, (needed, flags) in sets.items():
            way = _find_way(architecture, needed)
            if way is not None:
                compiler, runner = way
                found[name] = InstructionSet(compiler, flags, runner)
    return found


def _find_way(architecture: str, needed: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """The compiler, and what runs its programs: nothing where the CPU does, else an emulator."""
    features = set(describe_cpu().split())
    native = find_compiler() if architecture in features else None
    if native is not None and features.issuperset(needed):
        return native, ()
    compiler = native or shutil.which(f"{architecture}-linux-gnu-gcc")
    emulator = shutil.which(f"qemu-{architecture}")
    if compiler is None or emulator is None or not set(needed).issubset(EMULATED):
        return None
    libraries = () if native else ("-L", f"/usr/{architecture}-linux-gnu")
    return compiler, (emulator, "-cpu", "max", *libraries)


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
