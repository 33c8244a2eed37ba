"""Looking at models: nothing is fetched or converted. Names that the user gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.errors import ModelError
from draftwood.heads import find_local_fingerprint, find_local_shape, load_target_shape
from draftwood.models import (
    add_model,
    catalog,
    fetch,
    find_local,
    list_models,
    model_path,
    remove_model,
    resolve,
    short_name,
)
from draftwood.models import find as find_module
from draftwood.models.find import KnownModel
from draftwood.models.look import read_configs
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.model_cache import home, known, toy  # noqa: F401 - fixtures


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching and converting fail."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("fetched or converted")

    for name in ("wheel_gguf", "hub_snapshot", "download_from_hub"):
        monkeypatch.setattr(fetch, name, never)
    monkeypatch.setattr(find_module, "new_folder", never)


@pytest.mark.usefixtures("no_work")
def test_a_gguf_file_is_described_as_it_is(toy: Path, home: Path, draftwood_command: Command) -> None:
    shown = json.loads(draftwood_command("models", "show", str(toy), "--json").out)
    assert (shown["architecture"], shown["num_layers"], shown["context_length"]) == ("LlamaForCausalLM", 2, 128)
    assert (shown["licence"], shown["has_chat_template"]) == ("mit", True)
    assert (shown["path"], shown["num_bytes"]) == (str(toy), toy.stat().st_size)
    assert draftwood_command("models", "path", str(toy)).out == f"{toy}\n"
    assert not (home / "models").exists()


def test_looking_and_loading_agree(toy: Path) -> None:
    at_first, fingerprint = load_target_shape(str(toy)), find_local_fingerprint(str(toy))
    folder = resolve(str(toy)).path
    assert load_target_shape(str(folder)) == at_first == find_local_shape(str(toy))
    assert find_local_fingerprint(str(folder)) == fingerprint != ""
    described = catalog.describe(toy)
    assert catalog.describe(folder).num_parameters == described.num_parameters


@pytest.mark.usefixtures("no_work")
def test_a_known_model_is_described_before_it_is_fetched(known: KnownModel, draftwood_command: Command) -> None:
    result = draftwood_command("models", "show", "pebble")
    assert result.code == 0
    assert "Pebble" in result.out
    assert "not downloaded, see: draftwood models get pebble" in result.out
    shown = json.loads(draftwood_command("models", "show", "pebble", "--json").out)
    assert (shown["path"], shown["licence"]) == (None, known.licence)
    for action in ("path", "rm"):
        assert draftwood_command("models", action, "pebble").code == 2


@pytest.mark.usefixtures("no_work")
def test_a_head_is_checked_against_a_model_without_preparing_it(
    toy: Path, known: KnownModel, draftwood_command: Command
) -> None:
    result = draftwood_command("inspect", "head", "smollm2-eagle3", "--model", str(toy))
    assert result.code == 1
    assert "hidden size: the head needs" in result.out
    missing = draftwood_command("inspect", "head", "smollm2-eagle3", "--model", "pebble")
    assert missing.code == 2
    assert "draftwood models get pebble" in missing.err


def test_a_model_on_the_hub_is_looked_at_by_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    monkeypatch.setattr(fetch, "find_snapshot", lambda _: None)
    monkeypatch.setattr(fetch, "fetch_configs", lambda _: tmp_path)
    assert read_configs("stones/boulder") == ({"architectures": ["GPT2LMHeadModel"]}, {})
    assert find_local("stones/boulder") is None
    with pytest.raises(ModelError, match="models get stones/boulder"):
        model_path("stones/boulder")


# Names that the user gave


def test_a_name_stands_for_its_model(toy: Path, draftwood_command: Command) -> None:
    assert draftwood_command("models", "add", "stone", str(toy)).out == f"stone: {toy}\n"
    assert model_path("stone") == toy
    folder = resolve("stone")
    assert (folder.name, folder.path) == ("stone", resolve(str(toy)).path)
    assert draftwood_command("models", "path", "stone").out == f"{toy}\n"
    assert "LlamaForCausalLM" in draftwood_command("models", "show", "stone").out
    assert str(toy) in draftwood_command("models", "list").out
    add_model("pebbles", str(folder.path))
    assert resolve("pebbles").path == folder.path
    with pytest.raises(ModelError, match="Did you mean 'pebbles'"):
        resolve("peblles")
    assert remove_model("stone") == 0
    assert toy.exists()
    assert [entry.name for entry in list_models() if entry.name in ("stone", "pebbles")] == ["pebbles"]


def test_a_given_name_comes_before_a_file_of_the_same_name(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading and serving agree on what a name stands for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stone.v2").write_text("not a model")
    add_model("stone.v2", str(toy))
    assert resolve("stone.v2").name == short_name("stone.v2") == "stone.v2"


def test_a_name_can_be_given_again(toy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(toy.read_bytes())
    add_model("stone", str(toy))
    add_model("stone", str(other))
    assert model_path("stone") == other
    other.unlink()
    with pytest.raises(ModelError, match="moved or removed"):
        model_path("stone")
    assert [entry.path for entry in list_models() if entry.name == "stone"] == [None]


@pytest.mark.parametrize("name", ["smollm2", "tiny", "a/b", "", ".hidden", "-x", "x.gguf", ".."])
def test_some_names_are_taken_or_could_not_be_typed(name: str, toy: Path) -> None:
    with pytest.raises(ModelError, match="This name cannot be given"):
        add_model(name, str(toy))


def test_only_models_get_names(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("text")
    for path in ("/no/such/file", str(tmp_path / "file.txt"), str(tmp_path)):
        with pytest.raises(ModelError):
            add_model("stone", path)
    assert "stone" not in [entry.name for entry in list_models()]


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"stone": 3}'])
def test_a_damaged_list_of_names_counts_for_nothing(content: str, home: Path, toy: Path) -> None:
    home.mkdir()
    (home / "aliases.json").write_text(content)
    add_model("stone", str(toy))
    assert model_path("stone") == toy
