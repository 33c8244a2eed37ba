"""``benchmarks/tree_direction.py`` on a tiny model: every loss has its rows, and directions are what they claim."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from draftwood.train.base import Batch
from draftwood.train.methods.gto import GtoMethod
from draftwood.train.trees import padded
from tests.tools.script import load_script
from tests.tools.train import method_for, written_examples
from tests.tools.trainer import configuration, data_folder, run
from tests.tools.tree import batch_and_signals, draft_head, moved

LOSSES = ["token loss", "gto", "gto, permuted", "gto, max", "gto, mean", "gto, no reference", "reach"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("tree_direction")


def test_every_loss_has_a_row(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(configuration(tmp_path / "start"))
    wanted = [
        f"head.start={tmp_path / 'start' / 'head'}", "model.name=tiny", f"data.folder={data_folder()}",
        "data.held_out=2", "run.max_tokens=400", "method.group_size=2", "method.nodes=40", "method.depth=2",
        "method.width=30", "method.token.steps=1", "method.groups=2", "optim.lr=1e-3",
    ]  # fmt: skip
    out = tmp_path / "found.json"
    options = ["--batches", "2", "--drift", "2", "--texts", "2", "--lengths", "0.5", "--out", str(out)]
    assert script.main([*wanted, *options]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["loss"] for row in rows] == LOSSES * 2
    assert [row["texts"] for row in rows[:: len(LOSSES)]] == ["in sample", "held out"]
    assert capsys.readouterr().out.count("\n| ") == 2 + len(rows)


def test_slope_is_half_the_difference(script: ModuleType) -> None:
    figures = np.zeros((3, 4, 4))
    figures[1, :, 0], figures[2, :, 0] = 3.0, 1.0
    (row,) = script.rows_of(script.Measured(figures, np.arange(4)), ["one"], "here", 1.0)
    assert (row["reward along"][0], row["reward against"][0], row["reward slope"][0]) == (3.0, 1.0, 1.0)


def test_steps_have_the_given_length_and_go_downhill(script: ModuleType) -> None:
    head = draft_head("eagle")
    gradient = [torch.randn_like(each) for each in head.parameters()]
    scale = [torch.rand_like(each) for each in head.parameters()]
    after = script.moved(head, script.Direction("one", gradient), scale, 0.5)
    pairs = [(a, b.detach(), g) for a, b, g in zip(after.parameters(), head.parameters(), gradient, strict=True)]
    assert float(sum((a - b).square().sum() for a, b, _ in pairs)) == pytest.approx(0.25, rel=1e-3)
    assert float(sum(((a - b) * g).sum() for a, b, g in pairs)) < 0


def test_permuted_advantages_stay_in_their_groups(script: ModuleType) -> None:
    head = moved(draft_head("eagle"), 0.0).requires_grad_(True)
    small = {"groups": 2, "group_size": 3, "width": 3, "nodes": 8, "depth": 3, "debias": False}
    method = method_for("gto", head, **small)
    methods = script.make_methods(method, 0)
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    verdicts = methods["gto"]._judge(batch, signals, *groups_of(methods["gto"], batch))
    own, other = (methods[name].advantages(verdicts).view(2, 2, 3) for name in ("gto", "gto, permuted"))
    assert not torch.equal(own, other)
    assert torch.equal(own.sort(-1).values, other.sort(-1).values)


def test_variants_judge_the_same_trees(script: ModuleType) -> None:
    head = moved(draft_head("eagle"), 0.0).requires_grad_(True)
    method = method_for("gto", head, groups=1, group_size=2, width=3, nodes=8, depth=3)
    methods = script.make_methods(method, 0)
    batch, signals = batch_and_signals(written_examples(count=2), method.frozen)
    roots, rows = groups_of(methods["gto"], batch)
    by_name = {
        name: methods[name]._judge(batch, signals, roots, rows)
        for name in ("gto", "gto, max", "gto, mean", "gto, no reference")
    }
    own = by_name["gto"]
    assert all(torch.equal(each.branch.tokens, own.branch.tokens) for each in by_name.values())
    assert bool((own.rewards > by_name["gto, max"].rewards).all())
    assert bool((by_name["gto, max"].rewards >= by_name["gto, mean"].rewards).all())
    assert torch.equal(by_name["gto, no reference"].rewards, own.rewards)


def groups_of(method: GtoMethod, batch: Batch) -> tuple[torch.Tensor, list[list[int]]]:
    rows = method._sample_groups(batch)
    return padded(rows, 1, batch.token_ids.device)[0], rows


def test_errors_are_reported(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--batches", "0"]) == 2
    assert "--batches" in capsys.readouterr().err
