"""``draftwood tune``: costs and successors in the cache, static trees in files, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.config import ModelOptions
from draftwood.sizing import costs
from draftwood.sizing.costs import load_profile
from draftwood.sources.successors import WIDTH, load_successors
from draftwood.targets.load import Loaded
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import VOCAB_SIZE, ByteTokenizer
from draftwood.tree.shapes import TreeShape, chain_tree
from tests.tools.cli import Command, Result, _plain_environment, draftwood_command, prompt_file  # noqa: F401 - fixtures

MODEL = ("--model", "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("draftwood.sizing.costs.cache_home", lambda: folder)
    monkeypatch.setattr("draftwood.sources.successors.cache_home", lambda: folder)
    monkeypatch.setattr(costs, "WARM_UP_SECONDS", 0.0)
    return folder


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a model is loaded."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("draftwood.cli.setup.tune.load_target", never)


def tiny_info() -> Any:
    from draftwood.targets.load import load_target  # tests may replace it

    return load_target(ModelOptions(model="tiny", max_batch=1)).target.info


# -- the machine -----------------------------------------------------------------------------------------------------


def test_tune_measures_and_saves(draftwood_command: Command, cache: Path) -> None:
    result = draftwood_command("tune", *MODEL)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].split() == ["positions", "context", "16", "context", "512", "context", "960"]
    first, second = lines[1].split(), lines[2].split()
    assert first[0] == "1"
    assert first[2:4] == ["ms", "1.00x"]
    assert len(first) == 1 + 3 * 3  # size; milliseconds and their ratio at each context
    assert second[0] == "2"
    assert float(second[1]) >= float(first[1]) > 0.0
    assert "these sizes" not in result.out  # passes may have any size
    kept = [Path(line.removeprefix("stored in ")) for line in lines if line.startswith("stored in ")]
    assert [path.parent for path in kept] == [cache / "profiles", cache / "successors"]
    assert all(path.is_file() for path in kept)
    assert costs.LABEL in result.err
    assert "successors of each token" in result.err


def test_tuned_profile_is_used(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draftwood_command("tune", *MODEL).code == 0
    info = tiny_info()
    profile, table = load_profile(info), load_successors(info, WIDTH)
    assert profile is not None
    assert table is not None
    assert table.ids.shape == (VOCAB_SIZE, WIDTH)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(costs, "measure_costs", never)
    result = draftwood_command("generate", "abab", *MODEL, "--drafter", "goose", "--max-tokens", "40", "--json")
    assert result.code == 0
    assert load_profile(info) == profile  # not refined either


def test_tune_as_json(draftwood_command: Command) -> None:
    result = draftwood_command("tune", *MODEL, "--json")
    assert result.code == 0
    content = json.loads(result.out)
    assert content["model"] == "tiny"
    assert content["sizes"][:3] == [1, 2, 3]
    assert content["contexts"] == [16, 512, 1024 - 64]  # 2,048 exceeds the context of the model
    assert [len(row) for row in content["seconds"]] == [len(content["sizes"])] * 3
    assert (content["device"], content["stepped"], content["pass_sizes"]) == ("cpu", False, [])
    assert content["largest_tree"] == content["sizes"][-1]
    assert [Path(path).is_file() for path in content["kept"]] == [True, True]


def test_tune_without_successors(draftwood_command: Command) -> None:
    result = draftwood_command("tune", *MODEL, "--no-successors", "--json")
    assert result.code == 0
    assert len(json.loads(result.out)["kept"]) == 1
    assert load_profile(tiny_info()) is not None
    assert load_successors(tiny_info(), WIDTH) is None


def test_tune_measures_known_profiles_again(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (1.0, 2.0):
        monkeypatch.setattr(costs, "time_pass", lambda *_, seconds=seconds: seconds)
        assert draftwood_command("tune", *MODEL, "--no-successors").code == 0
        profile = load_profile(tiny_info())
        assert profile is not None
        assert profile.seconds[0][0] == seconds


def test_unwritable_cache_is_reported(draftwood_command: Command, cache: Path) -> None:
    cache.write_text("no folder", encoding="utf-8")
    result = draftwood_command("tune", *MODEL)
    assert result.code == 2
    assert "cannot be written" in result.err


# -- a target with fixed pass sizes ----------------------------------------------------------------------------------

PASS_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 768, 1024)


@pytest.fixture(params=["cpu", "cuda"])
def stepping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replaces a decoder with CUDA graphs: the tiny model with a given device and given pass sizes."""

    def load(*_: object, **__: object) -> Loaded:
        target = tiny_target(replace(TINY_CONFIG, context_length=16_384), cache_tokens=16_384)
        target.info = replace(target.info, pass_sizes=PASS_SIZES, device=torch.device(request.param))
        return Loaded(target, ByteTokenizer())

    monkeypatch.setattr("draftwood.cli.setup.tune.load_target", load)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(costs, "_fill", lambda *_: None)
    monkeypatch.setattr(costs, "time_pass", lambda target, sequence, size: 0.002 + 0.00001 * size)
    return str(request.param)


def test_tune_lists_pass_sizes(draftwood_command: Command, cache: Path, stepping: str) -> None:
    result = draftwood_command("tune", *MODEL)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    contexts = ["16", "512", "2048"] if stepping == "cpu" else ["16", "2048", "8192"]
    assert lines[0].split()[2::2] == contexts
    rows = [line.split() for line in lines[1:12]]
    assert [int(row[0]) for row in rows] == list(PASS_SIZES[:11])
    assert rows[0][1:4] == ["2.01", "ms", "1.00x"]
    assert rows[8][1:4] == ["3.28", "ms", "1.63x"]
    kind = "CUDA graphs" if stepping == "cuda" else "passes"
    assert lines[12].startswith(f"{kind} exist for these sizes only (also 768, 1024, not timed)")
    assert "up to 128 positions" in lines[13]
    assert len(list(cache.rglob("*.json"))) == len(list(cache.rglob("*.safetensors"))) == 1


def test_pass_sizes_as_json(draftwood_command: Command, stepping: str) -> None:
    result = draftwood_command("tune", *MODEL, "--no-successors", "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    assert (content["device"], content["stepped"], content["largest_tree"]) == (stepping, True, 128)
    assert content["sizes"] == list(PASS_SIZES[:11])
    assert content["pass_sizes"] == list(PASS_SIZES)


def test_static_tree_with_fixed_pass_sizes(
    draftwood_command: Command, prompt_file: Path, tmp_path: Path, stepping: str
) -> None:
    """A tree of 625 nodes is larger than any measured size."""
    output = tmp_path / "tree.json"
    result = tune_tree(draftwood_command, output, prompt_file, "--drafter", "recycling", "--size", "20")
    assert result.code == 0, result.err
    assert len(TreeShape.load(output)[0]) == 20


# -- a static tree ---------------------------------------------------------------------------------------------------


def tune_tree(run: Command, output: Path, prompts: Path, *more: str) -> Result:
    return run("tune", "--static-tree", str(output), "--prompts", str(prompts), *MODEL, "--max-tokens", "10", *more)


@pytest.mark.parametrize(
    ("drafter", "more"),
    [("stand", ("--temperature", "0.6", "--seed", "1", "--samples", "2")), ("recycling", ()), ("sequoia", ())],
)
def test_a_static_tree_is_measured_and_can_be_used(
    draftwood_command: Command, prompt_file: Path, tmp_path: Path, drafter: str, more: tuple[str, ...]
) -> None:
    output = tmp_path / "tree.json"
    result = tune_tree(draftwood_command, output, prompt_file, "--drafter", drafter, "--size", "20", *more)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].startswith("20 nodes, ")
    assert result.out.splitlines()[1] == f"written to {output}"
    shape, about = TreeShape.load(output)
    assert len(shape) == 20
    assert (about["drafter"], about["model"], about["prompts"]) == (drafter, "tiny", 2)
    assert about["samples"] == (2 if more else 1)
    assert 1.0 <= about["tau"] <= about["start_tau"]
    used = draftwood_command(
        "generate", "one two one", *MODEL, "--drafter", drafter, "--drafter-option", f"tree={output}",
        "--max-tokens", "12", "--budget", "24", "--json",
    )  # fmt: skip
    assert used.code == 0, used.err
    plain = draftwood_command(
        "generate", "one two one", *MODEL, "--drafter", "plain", "--max-tokens", "12", "--budget", "24", "--json"
    )
    assert json.loads(used.out)["text"] == json.loads(plain.out)["text"]
    assert json.loads(used.out)["stats"]["mean_tree_size"] > 1


def test_a_static_tree_as_json(draftwood_command: Command, prompt_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "tree.json"
    result = tune_tree(
        draftwood_command, output, prompt_file, "--drafter", "recycling", "--size", "9", "--limit", "1", "--json"
    )
    assert result.code == 0
    content = json.loads(result.out)
    assert (content["tree"], content["nodes"], content["prompts"]) == (str(output), 9, 1)


def test_existing_file_needs_force(draftwood_command: Command, prompt_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "tree.json"
    chain_tree(3).save(output)
    refused = tune_tree(draftwood_command, output, prompt_file, "--drafter", "recycling", "--size", "9")
    assert refused.code == 2
    assert "exists" in refused.err
    assert "--force" in refused.err
    assert len(TreeShape.load(output)[0]) == 4
    assert (
        tune_tree(draftwood_command, output, prompt_file, "--drafter", "recycling", "--size", "9", "--force").code == 0
    )
    assert len(TreeShape.load(output)[0]) == 9


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--drafter", "pld"), ["'pld' does not use a static tree", "stand, recycling, sam+recycling, sequoia"]),
        ((), ["does not use a static tree", "--drafter"]),
        (("--drafter", "no-such"), ["no-such"]),
        (("--drafter", "stand", "--drafter-option", "no_such=1"), ["no_such"]),
        (("--drafter", "stand", "--size", "626"), ["626", "1 to 625"]),
        (("--drafter", "stand", "--size", "0"), ["1 to 625"]),
        (("--drafter", "stand", "--samples", "0"), ["n", "0"]),
        (("--drafter", "stand", "--limit", "0"), ["limit", "1 or more"]),
    ],
)
def test_invalid_arguments_are_refused_before_model_loads(
    draftwood_command: Command, prompt_file: Path, tmp_path: Path, more: tuple[str, ...], told: list[str]
) -> None:
    result = tune_tree(draftwood_command, tmp_path / "tree.json", prompt_file, *more)
    assert result.code == 2
    assert all(word in result.err for word in told), result.err
    assert not (tmp_path / "tree.json").exists()


@pytest.mark.usefixtures("no_model")
def test_static_tree_needs_prompts_and_output(draftwood_command: Command, prompt_file: Path, tmp_path: Path) -> None:
    missing = draftwood_command("tune", "--static-tree", str(tmp_path / "t.json"), "--drafter", "stand", *MODEL)
    assert missing.code == 2
    assert "--prompts" in missing.err
    nowhere = tune_tree(draftwood_command, tmp_path / "t.json", tmp_path / "none.txt", "--drafter", "stand")
    assert nowhere.code == 2
    assert "none.txt cannot be read" in nowhere.err
    for output in (tmp_path, tmp_path / "no" / "folder.json"):
        result = tune_tree(draftwood_command, output, prompt_file, "--drafter", "stand", "--force")
        assert result.code == 2
        assert "a file in an existing folder" in result.err


@pytest.mark.usefixtures("no_model")
def test_options_without_effect_are_refused(draftwood_command: Command, prompt_file: Path, tmp_path: Path) -> None:
    idle = draftwood_command("tune", *MODEL, "--prompts", str(prompt_file))
    assert idle.code == 2
    assert "--static-tree" in idle.err
    for more in (("--budget", "9"), ("--memory", "process")):
        result = tune_tree(draftwood_command, tmp_path / "t.json", prompt_file, "--drafter", "stand", *more)
        assert result.code == 2
        assert more[0] in result.err


# -- priors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_file", [False, True])
def test_priors_are_measured_and_kept(
    in_file: bool, draftwood_command: Command, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.growth.priors.cache_home", lambda: tmp_path)
    place = [str(tmp_path / "own.json")] if in_file else []
    result = draftwood_command(
        "tune", *MODEL, "--priors", *place, "--prompts", str(prompt_file), "--max-tokens", "16", "--json"
    )
    content = json.loads(result.out)
    assert content["guesses"] > 0
    kept = Path(content["priors"])
    assert kept == Path(place[0]) if in_file else kept.parent == tmp_path / "priors"
    assert set(json.loads(kept.read_text())) == {"rates", "weights"}
