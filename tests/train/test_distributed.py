"""Training with several processes equals one process with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from draftwood.train.config import write_toml
from draftwood.train.loop.checkpoint import Checkpoints
from draftwood.train.loop.logs import read_log
from tests.tools.trainer import Tensors, configuration, losses, run, state_of

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not (dist.is_available() and dist.is_gloo_available()),
    reason="there is no way here for processes to talk",
)
OWN = ("optim.ema=0.8", "run.checkpoint_every=2", "data.held_out=4", "validate.positions=0", "validate.prompts=0")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with two micro-batches per step."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(configuration(out, *OWN, "optim.accumulate=2"))
    return out


def together(out: Path, strategy: str) -> Path:
    """Two processes with one micro-batch each."""
    path = out.with_suffix(".toml")
    path.write_text(write_toml(configuration(out, *OWN, f"run.strategy={strategy}").tables()), encoding="utf-8")
    started = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "draftwood.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *started, "--config", str(path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.terminate()  # it stops its processes, which a kill would leave running
    assert process.returncode == 0, said
    return out


def close(one: Tensors, other: Tensors) -> bool:
    return all(torch.allclose(one[name].float(), other[name].float(), rtol=1e-4, atol=1e-6) for name in one)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_match_one_with_same_batches(tmp_path: Path, alone: Path, strategy: str) -> None:
    out = together(tmp_path / strategy, strategy)
    lines = read_log(out / "log.jsonl")
    one = read_log(alone / "log.jsonl")
    assert losses(lines) == pytest.approx(losses(one), rel=1e-5)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    for name in ("weight", "tokens", "gradient_norm", "lr"):
        both = [[line[name] for line in each if line["kind"] == "train"] for each in (lines, one)]
        assert both[0] == pytest.approx(both[1], rel=1e-4)
    for name in ("head", "best", "checkpoints/step-00000004/head"):
        assert close(state_of(out / name), state_of(alone / name))
    states = [Checkpoints(folder, 2).load(4).state for folder in (out, alone)]
    for name, moments in states[0]["optimizer"].items():
        assert close(moments, states[1]["optimizer"][name])
    assert len(states[0]["random"]) == 2
