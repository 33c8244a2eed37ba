"""The kernel of the fused CPU decoder is compiled once and kept; what fails is named."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from draftwood.targets.native.cpu import CpuDecoder, build
from tests.tools.cpu_decoder import BASE, CPU

pytestmark = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")


class TestBuild:
    def fresh(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(build.KERNEL, "_state", None)
        monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))

    def test_it_can_be_switched_off(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.fresh(monkeypatch, tmp_path)
        monkeypatch.setenv("DRAFTWOOD_NO_KERNEL", "1")
        assert not CpuDecoder.is_available()
        assert CpuDecoder.why_declined(BASE, torch.float32, CPU)
        assert "DRAFTWOOD_NO_KERNEL" in CpuDecoder.why_unavailable()

    def test_a_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.fresh(monkeypatch, tmp_path)
        monkeypatch.setenv("DRAFTWOOD_CC", "no-such-compiler")
        assert build.load_kernel() is None
        assert "no C compiler" in build.why_unavailable()

    def test_a_failing_compiler_is_quoted(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        compiler = tmp_path / "broken-cc"
        compiler.write_text("#!/bin/sh\necho 'kernel.c:1: error: out of luck' >&2\nexit 1\n")
        compiler.chmod(0o755)
        self.fresh(monkeypatch, tmp_path)
        monkeypatch.setenv("DRAFTWOOD_CC", str(compiler))
        assert build.load_kernel() is None
        assert "out of luck" in build.why_unavailable()

    def test_the_library_is_kept(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.fresh(monkeypatch, tmp_path)
        assert isinstance(build.load_kernel(), ctypes.CDLL)
        (library,) = (tmp_path / "kernels").iterdir()
        written = library.stat().st_mtime_ns
        monkeypatch.setattr(build.KERNEL, "_state", None)
        assert build.load_kernel() is not None
        assert library.stat().st_mtime_ns == written
