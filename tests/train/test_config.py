"""The configuration of a training run: strict, and unchanged after writing and reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.disk.toml import read_toml
from draftwood.errors import DraftwoodError, OptionError
from draftwood.train.arguments import NAMES
from draftwood.train.config import CONFIGURATION, TrainConfig, load_config, write_toml
from draftwood.train.methods import METHODS

NEEDED = ("data.folder=data", "run.out=out", "optim.steps=10")


def config(*changes: str, method: str = "eagle3") -> TrainConfig:
    return load_config(None, [*NEEDED, *changes], method)


def test_file_is_read_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        '[data]\nfolder = "texts"\n[method]\nname = "hass"\nsteps = 4\n[optim]\nlr = 3e-5\nepochs = 2\n'
        '[head.changes]\nnum_layers = 2\n[run]\nout = "there"\n'
    )
    found = load_config(path, ["optim.lr=1e-3", "method.top_k=5", 'model.name="my model"', "optim.betas=[0.8, 0.9]"])
    assert found.data.folder == "texts"
    assert found.optim.lr == 1e-3
    assert found.optim.betas == (0.8, 0.9)
    assert found.optim.epochs == 2
    assert found.method.name == "hass"
    assert found.method.options == {"steps": 4, "top_k": 5}
    assert found.model.name == "my model"
    assert found.head.changes == {"num_layers": 2}


def test_one_folder_or_several() -> None:
    assert config().data.folders == ("data",)
    assert config('data.folder=["one", "two"]').data.folders == ("one", "two")
    for wrong in ("[]", '[""]', "3", '["one", 2]'):
        with pytest.raises(OptionError, match=r"data\.folder"):
            config(f"data.folder={wrong}")


def test_resolved_configuration_round_trips(tmp_path: Path) -> None:
    first = config("method.steps=3", "head.changes.num_layers=2", "optim.ema=0.99", "data.held_out=0.1")
    path = tmp_path / "config.toml"
    path.write_text(write_toml(first.tables()), encoding="utf-8")
    assert load_config(path) == first


@given(
    text=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1),
    lr=st.floats(0.0, 1.0),
    steps=st.integers(1, 10**9),
    flag=st.booleans(),
    growths=st.lists(st.sampled_from(("beam", "salf", "chain")), max_size=3),
)
def test_any_values_round_trip(
    tmp_path_factory: pytest.TempPathFactory, text: str, lr: float, steps: int, flag: bool, growths: list[str]
) -> None:
    content: dict[str, Any] = {
        "data": {"folder": text},
        "method": {"name": "eagle"},
        "optim": {"lr": lr, "steps": steps},
        "validate": {"growths": growths},
        "run": {"out": text, "checkpointing": flag},
    }
    first = TrainConfig.of(content)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(write_toml(first.tables()), encoding="utf-8")
    assert TrainConfig.of(read_toml(path, CONFIGURATION)) == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optim.learning_rate=1", "betas"),
        ("optimizer.lr=1", "optim"),
        ("optim.lr=fast", "0 to 1"),
        ("optim.lr=-1", "0 to 1"),
        ("optim.lr=nan", "0 to 1"),
        ("optim.betas=[0.9]", "two numbers"),
        ("optim.betas=[0.9, 1.0]", "two numbers"),
        ("optim.accumulate=0", "1 or more"),
        ("optim.accumulate=true", "1 or more"),
        ("optim.epochs=2", "one of the three"),
        ("optim.steps=0", "one of the three"),
        ("data.held_out=1.5", "fraction"),
        ("run.dtype=float16", "bfloat16"),
        ("run.strategy=pipeline", "fsdp"),
        ("run.checkpointing=1", "true or false"),
        ("run.out=", "a string"),
        ("validate.growths=beam", "salf"),
        ('validate.growths=["wide"]', "salf"),
        ("head.changes=2", "a table"),
        ("head.changes.a.b=2", "SECTION.KEY=VALUE"),
        ("lr=2", "SECTION.KEY=VALUE"),
        ("optim.lr", "SECTION.KEY=VALUE"),
        ("model.target=fast", "native"),
    ],
)
def test_invalid_value_error_lists_allowed_values(change: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        config(change)
    assert said in str(caught.value)


def test_initial_head_determines_the_shape() -> None:
    with pytest.raises(OptionError, match="already sets the shape"):
        config("head.start=there", "head.draft_vocab_size=10")
    with pytest.raises(OptionError, match="already sets the shape"):
        config("head.start=there", "head.changes.num_layers=2")
    assert config("head.start=there", "head.changes.intermediate_size=64").head.changes == {"intermediate_size": 64}


def test_requested_method_must_match_the_file() -> None:
    with pytest.raises(OptionError, match="another method"):
        config("method.name=hass", method="eagle")
    with pytest.raises(OptionError, match=r"method\.name is unknown"):
        load_config(None, NEEDED)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such configuration"):
        load_config(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_text("[optim\n")
    with pytest.raises(DraftwoodError, match=r"bad\.toml cannot be read"):
        load_config(path)
    path.write_text("optim = 3\n")
    with pytest.raises(OptionError, match="invalid value"):
        load_config(path)


def test_the_command_knows_every_method() -> None:
    assert set(NAMES) == set(METHODS)


def test_head_overrides_are_plain_values() -> None:
    for name, said in (("rope", "no key 'rope'"), ("num_layers", "an integer")):
        with pytest.raises(OptionError, match=said):
            TrainConfig.of({**config().tables(), "head": {"changes": {name: {"theta": 5e5}}}})
