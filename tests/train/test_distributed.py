"""Training with several processes equals one process with the same batches."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

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

SHORT = "run.max_tokens=48"  # enough micro-batches that four processes do not reach the end of an epoch


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with two micro-batches per step."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(configuration(out, *OWN, "optim.accumulate=2"))
    return out


def start(out: Path, strategy: str, *torchrun: str, changes: tuple[str, ...] = (), resume: bool = False) -> Any:
    path = out.with_suffix(".toml")
    own = configuration(out, *OWN, f"run.strategy={strategy}", *changes)
    path.write_text(write_toml(own.tables()), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *torchrun, "-m"]
    command += ["draftwood.train", "--config", str(path), *(["--resume"] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(*started: Any) -> None:
    try:
        said = [process.communicate(timeout=180)[1] for process in started]
    finally:
        for process in started:
            process.terminate()  # it stops its processes, which a kill would leave running
    assert [process.returncode for process in started] == [0] * len(started), said


def together(out: Path, strategy: str) -> Path:
    """Two processes with one micro-batch each."""
    finish(start(out, strategy, "--standalone"))
    return out


def on_two_nodes(out: Path, strategy: str, **more: Any) -> None:
    """Two agents, as on two machines, which meet at an address; two processes each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one")
    finish(*[start(out, strategy, *meeting, changes=(SHORT,), **more) for _ in range(2)])


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_stopped_and_resumed_match_one_process(tmp_path: Path, strategy: str) -> None:
    """Four processes on two nodes; the second run starts from the first one's middle."""
    run(configuration(tmp_path / "alone", *OWN, SHORT, "optim.accumulate=4"))
    out = tmp_path / "nodes"
    on_two_nodes(out, strategy)
    for name in ("head", "best", "checkpoints/step-00000004"):  # as if it had been killed before they were written
        shutil.rmtree(out / name)
    on_two_nodes(out, strategy, resume=True)
    lines, one = (read_log(folder / "log.jsonl") for folder in (out, tmp_path / "alone"))
    assert losses(lines) == pytest.approx(losses(one), rel=1e-5)
    assert close(state_of(out / "head"), state_of(tmp_path / "alone" / "head"))
