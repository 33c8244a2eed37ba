"""Files that are whole or not there."""

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


def half_then(error: BaseException) -> Callable[[Path], None]:
    def writer(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise error

    return writer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "table.bin"
    with new_file(final) as temporary:
        temporary.write_bytes(b"whole")
        assert temporary.parent == final.parent  # a rename across file systems is none
        assert not final.exists()
    assert final.read_bytes() == b"whole"
    assert names(final.parent) == ["table.bin"]


def test_others_may_read_what_they_may_read_of_any_new_file(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    write(tmp_path / "table.safetensors", lambda path: save_file({"a": np.ones(3)}, path))
    assert (tmp_path / "table.safetensors").stat().st_mode == usual.stat().st_mode


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    final.write_bytes(b"old")
    with final.open("rb") as reader:
        with new_file(final) as temporary:
            temporary.write_bytes(b"new")
            assert final.read_bytes() == b"old"
        assert final.read_bytes() == b"new"
        assert reader.read() == b"old"  # who has it open goes on reading what was there
    assert names(tmp_path) == ["table.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_behind_and_passes_through(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "table.bin"
    final.write_bytes(b"old")
    with pytest.raises(error):
        write(final, half_then(error()))
    assert final.read_bytes() == b"old"
    assert names(tmp_path) == ["table.bin"]


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    with pytest.raises(DraftwoodError, match="cannot be written") as refused:
        write(final, half_then(OSError(28, "No space left on device")))
    assert "No space left" in str(refused.value)
    assert str(final) in str(refused.value)
    assert names(tmp_path) == []


def test_what_safetensors_says_about_a_disk_is_explained_too(tmp_path: Path) -> None:
    def writer(temporary: Path) -> None:
        save_file({"a": np.zeros(2)}, temporary / "no folder")

    with pytest.raises(DraftwoodError, match="cannot be written"):
        write(tmp_path / "table.safetensors", writer)
    assert names(tmp_path) == []


def test_a_folder_in_the_place_of_the_file_is_left_alone(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    (final / "inside").mkdir(parents=True)
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(final) as temporary:
        temporary.write_bytes(b"new")
    assert names(tmp_path) == ["folder"]
    assert names(final) == ["inside"]


def test_a_file_in_the_place_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a file")
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(tmp_path / "file" / "table.bin"):
        pytest.fail("there is no place to write to")
    assert names(tmp_path) == ["file"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftwoodError, match="cannot be written"), new_file(tmp_path / "table.bin"):
        pass
    assert names(tmp_path) == []


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    final = tmp_path / "table.bin"
    with new_file(final) as first, new_file(final) as second:
        assert first != second
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert final.read_bytes() == b"first"  # the one that ended last
    assert names(tmp_path) == ["table.bin"]
