"""C libraries: prebuilt variants, first-use builds, and libraries that another user could have written."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
import torch

from draftwood.disk import compiler, library
from draftwood.disk.library import Library
from draftwood.targets import tiny_target
from draftwood.targets.native.cpu import build
from tests.conftest import logits_after

CC = compiler.find_compiler()
NOBODY = 65534
pytestmark = pytest.mark.skipif(CC is None or os.name != "posix", reason="no C compiler")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "prebuilt")
    (tmp_path / "prebuilt").mkdir()
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "answer.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return 42; }\n")
    return path


def answer(source: Path) -> int:
    """The result of a new ``Library``."""
    loaded = Library("answer", source).load()
    assert loaded is not None
    return int(loaded.answer())


def write_prebuilt(variant: str, value: int, folder: Path) -> None:
    path = folder / f"{variant}.c"
    path.write_text(f"int answer(void) {{ return {value}; }}\n")
    assert CC is not None
    compiler.compile_library(CC, path, library.PREBUILT / f"answer-{variant}.so")


def change_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of ``path``."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


class TestPrebuilt:
    def test_is_loaded_without_a_compiler(
        self, home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_prebuilt("baseline", 1, tmp_path)
        monkeypatch.setenv("PATH", "")
        assert answer(source) == 1
        assert not home.exists()

    def test_fastest_supported_variant_is_loaded(
        self, home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler, "VARIANTS", {"fast": ("b",), "good": ("a",), "baseline": ()})
        for value, variant in enumerate(compiler.VARIANTS):
            write_prebuilt(variant, value, tmp_path)
        for features, expected in (("x86_64 a b", 0), ("x86_64 a", 1), ("x86_64 ab", 2)):
            monkeypatch.setattr(compiler, "describe_cpu", lambda features=features: features)
            assert answer(source) == expected

    def test_a_chosen_compiler_builds_natively(
        self, home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_prebuilt("baseline", 1, tmp_path)
        monkeypatch.setenv("DRAFTWOOD_CC", str(CC))
        assert answer(source) == 42

    def test_unloadable_library_is_compiled(self, home: Path, source: Path) -> None:
        (library.PREBUILT / "answer-baseline.so").write_bytes(b"for another system")
        assert answer(source) == 42

    def test_missing_library_and_compiler_error_says_what_to_install(
        self, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "")
        assert Library("answer", source).load() is None
        assert "no prebuilt kernel" in (why := Library("answer", source).why_unavailable())
        assert "install a C compiler such as gcc" in why

    def test_it_is_known_whether_the_compiler_will_run(
        self, home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh = Library("answer", source)
        assert fresh.needs_build()
        fresh.load()
        assert not fresh.needs_build()
        assert not Library("answer", source).needs_build()  # built by an earlier run
        source.write_text("int answer(void) { return 7; }\n")
        assert Library("answer", source).needs_build()
        write_prebuilt("baseline", 1, tmp_path)
        assert not Library("answer", source).needs_build()
        monkeypatch.setenv("DRAFTWOOD_CC", str(CC))
        assert Library("answer", source).needs_build()
        monkeypatch.setenv("DRAFTWOOD_NO_KERNEL", "1")
        assert not Library("answer", source).needs_build()


class TestTrust:
    def test_the_folder_and_its_files_are_private(self, home: Path, source: Path) -> None:
        before = os.umask(0o002)
        try:
            assert answer(source) == 42
        finally:
            os.umask(before)
        (built,) = (home / "kernels").iterdir()
        assert (home / "kernels").stat().st_mode & 0o777 == 0o700
        assert built.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_a_folder_that_others_can_write_is_refused(self, home: Path, source: Path, mode: int) -> None:
        assert answer(source) == 42
        (home / "kernels").chmod(mode)
        refused = Library("answer", source)
        assert refused.load() is None
        assert f"other users can write to {home / 'kernels'}" in refused.why_unavailable()
        assert "DRAFTWOOD_HOME" in refused.why_unavailable()

    def test_a_folder_of_another_user_is_refused(
        self, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (home / "kernels").mkdir(parents=True, mode=0o700)
        change_owner(home / "kernels", monkeypatch)
        refused = Library("answer", source)
        assert refused.load() is None
        assert "other users can write" in refused.why_unavailable()

    @pytest.mark.parametrize("case", ["group", "world", "owner"])
    def test_a_file_that_others_could_write_is_built_again(
        self, case: str, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (home / "kernels").mkdir(parents=True, mode=0o700)
        assert answer(source) == 42
        (built,) = (home / "kernels").iterdir()
        built.unlink()  # a new file: the loaded one stays mapped
        built.write_bytes(b"planted")
        built.chmod({"group": 0o720, "world": 0o702, "owner": 0o700}[case])
        if case == "owner":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            change_owner(built, monkeypatch)
        assert answer(source) == 42
        assert built.read_bytes() != b"planted"
        assert built.stat().st_mode & 0o777 == 0o700


class TestDamage:
    @pytest.mark.parametrize("size", [0, 100, 0.5, 0.99])
    def test_a_truncated_library_is_built_again(
        self, size: float, home: Path, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Loading it could end the process (SIGBUS)."""
        assert answer(source) == 42
        (built,) = (home / "kernels").iterdir()
        whole = built.read_bytes()
        built.unlink()  # a new file: the loaded one stays mapped
        built.write_bytes(whole[: int(size if size > 1 else size * len(whole))])
        built.chmod(0o700)
        assert answer(source) == 42
        assert built.read_bytes() == whole
        (record,) = caplog.records
        assert "is built again" in record.getMessage()
        assert str(built) in record.getMessage()

    def test_changed_code_is_not_loaded(self, home: Path, source: Path) -> None:
        assert answer(source) == 42
        (built,) = (home / "kernels").iterdir()
        other = source.with_name("other.c")
        other.write_text("int answer(void) { return 666; }\n")
        built.unlink()
        assert CC is not None
        compiler.compile_library(CC, other, built)
        other.unlink()
        assert answer(source) == 42

    def test_an_intact_library_is_loaded_without_a_word(
        self, home: Path, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert answer(source) == 42
        (built,) = (home / "kernels").iterdir()
        before = built.stat().st_mtime_ns
        assert answer(source) == 42
        assert built.stat().st_mtime_ns == before
        assert not caplog.records

    def test_a_folder_that_cannot_be_written(self, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The advice is not to install a compiler."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(home))

        monkeypatch.setattr(Path, "mkdir", refuse)
        why = Library("answer", source).why_unavailable()
        assert "Read-only file system" in why
        assert "DRAFTWOOD_HOME" in why
        assert "compiler" not in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_prebuilt_variant_computes_the_bits_of_a_native_build(
    dtype: torch.dtype, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants with other vector widths may differ in the last bits because the order of summation differs."""
    text = [index * 7 % 251 for index in range(70)]

    def compute() -> torch.Tensor:
        monkeypatch.setattr(build.KERNEL, "_state", None)
        target = tiny_target(dtype=dtype, device=torch.device("cpu"), cache_tokens=128)
        assert target.info.backend == "fused-cpu"
        return logits_after(target, text)

    assert CC is not None
    variant = compiler.fitting_variants()[0]
    kernel = Path(build.__file__).parent / "kernel.c"
    native = compute()
    compiler.compile_variant(CC, kernel, library.PREBUILT / f"cpu-{variant}.so", variant)
    prebuilt = compute()
    loaded = build.KERNEL.load()
    assert isinstance(loaded, ctypes.CDLL)
    assert Path(loaded._name).parent == library.PREBUILT
    assert torch.equal(native.view(torch.int32), prebuilt.view(torch.int32))
