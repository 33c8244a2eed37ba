"""``benchmarks/gto_reward.py`` on a tiny model: its figures equal those of GTO training."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from draftwood.train.base import Batch
from draftwood.train.config import load_config
from draftwood.train.loop.setup import prepare
from tests.tools.script import load_script
from tests.tools.trainer import configuration, data_folder, run


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gto_reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two different heads."""
    folder = tmp_path_factory.mktemp("heads")
    run(configuration(folder / "one"))
    run(configuration(folder / "other", "optim.lr=0.05", "optim.steps=8"))
    return folder


def settings(folder: Path) -> list[str]:
    return [
        f"head.start={folder / 'one' / 'head'}", "model.name=tiny", f"data.folder={data_folder()}", "data.held_out=6",
        "run.max_tokens=400", "method.group_size=2", "method.groups=2", "method.nodes=20", "method.depth=3",
        "method.width=6", "method.token.steps=1",
    ]  # fmt: skip


def test_figures_match_training(
    script: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = str(folder / "other" / "head"), tmp_path / "reward.json"
    assert script.main([head, *settings(folder), "--out", str(out)]) == 0
    shown, told = capsys.readouterr()
    assert f"careful: {head}" in told  # it was trained with nothing held out
    assert f"\n{head}: " in shown
    content = json.loads(out.read_text(encoding="utf-8"))
    reference, other = content["heads"].values()
    assert len(content["heads"]) == 2
    assert reference["reward"]["value"] == 0.0 != other["reward"]["value"]
    assert reference["best branch"]["mean"] < reference["reward"]["mean"]
    assert other["reward"]["low"] <= other["reward"]["value"] <= other["reward"]["high"]
    assert other["reward"]["mean"] - reference["reward"]["mean"] == pytest.approx(other["reward"]["value"])

    config = load_config(None, [*settings(folder), "run.out=nowhere", "optim.steps=1", "run.max_tokens=9999"], "gto")
    setup = prepare(config)
    setup.method.head.eval()
    batch = Batch.of(setup.held_out.shuffled(config.run.seed))
    parts = setup.method.losses(batch, setup.frozen.signals(batch)).parts
    for figure, name in (("reward", "reward"), ("accepted", "accepted")):
        assert reference[figure]["mean"] == pytest.approx(float(parts[name]), abs=1e-4)


def test_gains_are_per_tree_and_intervals_per_text(script: ModuleType) -> None:
    figures = np.zeros((2, 6, 4))
    figures[1] = [[1.0, 2.0, -1.0, 0.0]] * 4 + [[3.0, 4.0, -3.0, 0.0]] * 2
    found = script.Measured(figures, np.array([0, 0, 1, 1, 2, 2]))
    reward, branch, leaves, accepted = script.over_reference(found, 1)
    assert reward.value == pytest.approx(10 / 6)
    assert (reward.low, reward.high) == (1.0, 3.0)
    assert branch.value == pytest.approx(16 / 6)
    assert leaves.value == -reward.value
    assert tuple(accepted) == (0.0, 0.0, 0.0)
    along = script.going_along(found, 1)
    assert along["best branch"] == pytest.approx(1.0)
    assert along["log leaves"] == pytest.approx(-1.0)
    assert np.isnan(along["accepted"])


def test_errors_are_reported(script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(configuration(folder / "eagle", method="eagle"))
    wanted = settings(folder)
    for argv, told in (
        (["--texts", "0"], "--texts"),
        (["no-such-head", *wanted], "no-such-head"),
        (["data.folder=there", "method.nothing=1"], "nothing"),
        ([*wanted, "data.held_out=0"], "held out"),
        ([str(folder / "eagle" / "head"), *wanted], "reads other hidden states"),
    ):
        assert script.main(argv) == 2
        assert told in capsys.readouterr().err
