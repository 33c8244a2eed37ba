"""Files are written completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftwood.disk.files import new_file
from draftwood.errors import DraftwoodError


def write(final: Path, writer: Callable[[Path], object]) -> None:
    with new_file(final) as temporary:
        writer(temporary)


def write_half_then_raise(error: BaseException) -> Callable[[Path], None]:
    def writer(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise error

    return writer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_exists_after_the_block(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "table.bin"
    with new_file(final) as temporary:
        temporary.write_bytes(b"whole")
        assert temporary.parent == final.parent  # a rename across file systems is not atomic
        assert not final.exists()
    assert final.read_bytes() == b"whole"
    assert names(final.parent) == ["table.bin"]


def test_new_file_has_default_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    write(tmp_path / "table.safetensors", lambda path: save_file({"a": np.ones(3)}, path))
    assert (tmp_path / "table.safetensors").stat().st_mode == usual.stat().st_mode


def test_old_file_remains_until_new_one_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    final.write_bytes(b"old")
    with final.open("rb") as reader:
        with new_file(final) as temporary:
            temporary.write_bytes(b"new")
            assert final.read_bytes() == b"old"
        assert final.read_bytes() == b"new"
        assert reader.read() == b"old"  # an open file keeps its old content
    assert names(tmp_path) == ["table.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_error_leaves_no_file_and_propagates(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "table.bin"
    final.write_bytes(b"old")
    with pytest.raises(error):
        write(final, write_half_then_raise(error()))
    assert final.read_bytes() == b"old"
    assert names(tmp_path) == ["table.bin"]


def test_full_disk_is_reported(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    with pytest.raises(DraftwoodError, match="cannot be written") as refused:
        write(final, write_half_then_raise(OSError(28, "No space left on device")))
    assert "No space left" in str(refused.value)
    assert str(final) in str(refused.value)
    assert names(tmp_path) == []


def test_disk_errors_of_safetensors_are_reported(tmp_path: Path) -> None:
    def writer(temporary: Path) -> None:
        save_file({"a": np.zeros(2)}, temporary / "no folder")

    with pytest.raises(DraftwoodError, match="cannot be written"):
        write(tmp_path / "table.safetensors", writer)
    assert names(tmp_path) == []


def test_folder_at_file_path_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    (final / "inside").mkdir(parents=True)
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(final) as temporary:
        temporary.write_bytes(b"new")
    assert names(tmp_path) == ["folder"]
    assert names(final) == ["inside"]


def test_file_at_folder_path_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a file")
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(tmp_path / "file" / "table.bin"):
        pytest.fail("there is no place to write to")
    assert names(tmp_path) == ["file"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(tmp_path / "table.bin"):
        pass
    assert names(tmp_path) == []


def test_concurrent_writers_use_separate_files(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    with new_file(final) as first, new_file(final) as second:
        assert first != second
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert final.read_bytes() == b"first"  # the one that finished last
    assert names(tmp_path) == ["table.bin"]
