"""``benchmarks/gto_controls.py`` on a tiny model: it trains, and changes advantages within groups."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftwood.train.methods import METHODS
from draftwood.train.methods.gto import GtoMethod, GtoOptions, Verdicts
from draftwood.train.trees import Branch
from tests.tools.script import load_script
from tests.tools.train import method_for
from tests.tools.trainer import configuration, data_folder, run
from tests.tools.tree import draft_head


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gto_controls")


@pytest.mark.parametrize("control", ["permuted", "negated"])
def test_a_control_trains_a_head(script: ModuleType, tmp_path: Path, control: str) -> None:
    run(configuration(tmp_path / "start"))
    settings = [
        f"head.start={tmp_path / 'start' / 'head'}", "model.name=tiny", f"data.folder={data_folder()}",
        "data.held_out=2", "run.max_tokens=400", "method.group_size=2", "method.nodes=40", "method.depth=2",
        "method.width=30", "method.token.steps=1", "method.groups=2", "optim.steps=2", "validate.prompts=0",
        f"run.out={tmp_path / 'out'}",
    ]  # fmt: skip
    assert script.main([control, *settings]) == 0
    assert (tmp_path / "out" / "head").is_dir()
    assert not [name for name in METHODS if name.startswith("gto_")]


def test_controls_change_advantages_within_groups(script: ModuleType) -> None:
    head = draft_head("eagle")
    options = GtoOptions(groups=2, group_size=3, debias=False)
    rewards = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    verdicts = Verdicts(rewards, torch.zeros_like(rewards), Branch(rewards.long()[..., None], rewards.long()))
    frozen = method_for("gto", head).frozen
    kinds = (GtoMethod, script.Permuted, script.Negated)
    own, permuted, negated = (cls(options, head, frozen).advantages(verdicts).view(2, 2, 3) for cls in kinds)
    assert torch.equal(negated, -own)
    assert not torch.equal(permuted, own)
    assert torch.equal(permuted.sort(-1).values, own.sort(-1).values)
