"""Builds the C libraries into the wheel, in a variant per CPU feature set; everything else is in pyproject.toml.

The libraries are loaded with ctypes, so one wheel per platform serves every Python version. Without a C compiler the
wheel is a pure one, and the libraries are compiled at first use. Editable installs always compile at first use.
"""

import logging
import platform
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).parent / "src" / "draftwood"
COMPILER = runpy.run_path(str(PACKAGE / "disk" / "compiler.py"))
# Only the decoder's kernel is written in vectors: the others compute the same, as fast, with any feature set.
BUILDS = [("cpu", PACKAGE / "targets" / "native" / "cpu" / "kernel.c", variant) for variant in COMPILER["VARIANTS"]]
BUILDS.append(("core", PACKAGE / "compiled" / "core.c", "baseline"))
BUILDS.append(("inputs", PACKAGE / "targets" / "native" / "cuda" / "inputs.c", "baseline"))


def find_compiler() -> str | None:
    return COMPILER["find_compiler"]() if sys.platform in ("linux", "darwin") else None


def warn(message: str) -> None:
    logging.warning("draftwood: %s", message)


class BuildWithLibraries(build_py):
    def run(self) -> None:
        super().run()
        compiler = find_compiler()
        if self.editable_mode:
            return
        if compiler is None:
            warn("no C compiler found (cc, gcc, clang or DRAFTWOOD_CC): building a pure wheel without C libraries")
            return
        folder = Path(self.build_lib, "draftwood", "disk", "prebuilt")
        folder.mkdir(parents=True, exist_ok=True)

        def build(name: str, source: Path, variant: str) -> None:
            try:
                COMPILER["compile_variant"](compiler, source, folder / f"{name}-{variant}.so", variant)
            except COMPILER["CompileError"] as error:  # an older compiler does not know the newest features
                warn(f"{name}-{variant} is left out: {error}")

        with ThreadPoolExecutor() as pool:
            list(pool.map(build, *zip(*BUILDS, strict=True)))


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel belongs to a platform."""
        return find_compiler() is not None


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform_tag = super().get_tag()[2]
        return "py3", "none", platform_tag.replace("universal2", platform.machine())  # of this architecture only


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
