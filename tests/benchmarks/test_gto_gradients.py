"""``benchmarks/gto_gradients.py`` on a tiny model: it runs, and its figures are correct."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.tools.script import load_script
from tests.tools.trainer import configuration, data_folder, run


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gto_gradients")


def test_similarity_of_gradients(script: ModuleType) -> None:
    shared, own = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.eye(4)[1:]
    length, cosine, deviation = script.summary([shared + one for one in own])
    assert (length, cosine, deviation) == pytest.approx((2.0**0.5, 0.5, 0.0))


def test_both_terms_have_a_row(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(configuration(tmp_path / "start"))
    wanted = [
        f"head.start={tmp_path / 'start' / 'head'}", "model.name=tiny", f"data.folder={data_folder()}",
        "data.held_out=0", "run.max_tokens=400", "method.group_size=2", "method.nodes=40", "method.depth=2",
        "method.width=30", "method.token.steps=1",
    ]  # fmt: skip
    assert script.main([*wanted, "--batches", "3", "--drift", "2"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [("| token loss", "3"), ("| GTO's term", "3")]
    assert all(float(row[2]) > 0.0 for row in rows)


def test_errors_are_reported(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--batches", "2"]) == 2
    assert "--batches" in capsys.readouterr().err
    assert script.main(["data.folder=there", "method.nothing=1"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_interrupt_is_not_an_internal_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "measure", interrupted)
    assert script.main([]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
