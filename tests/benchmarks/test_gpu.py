"""``benchmarks/gpu.py`` on a tiny model and a CPU: every part runs, and unsupported setups are reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from draftwood.models.tensors import tensor_shapes
from tests.tools.script import load_script

QUICK = ("--shapes", "tiny", "--contexts", "16,32", "--sizes", "1,4", "--repeats", "2", "--dtype", "float32")
RUN = ("--model", "tiny", "--max-tokens", "8", "--rounds", "1", "--batch", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load_script("gpu")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    folder = tmp_path / "prompts"
    folder.mkdir()
    lines = [json.dumps({"id": name, "turns": ["one two one two"]}) for name in "ab"]
    (folder / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(folder)


def test_every_part_has_rows(gpu: ModuleType, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main([*QUICK, *RUN, "--data", prompts, "--out", str(out)]) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    rows = content["rows"]
    assert [(row["part"], row["case"]) for row in rows[:4]] == [
        ("forward", "n=1, context 16"),
        ("forward", "n=4, context 16"),
        ("context", "n=1, context 32"),
        ("context", "n=4, context 32"),
    ]
    for row in rows[:4]:
        figures = row["figures"]
        assert row["ms"] == pytest.approx(figures["floor ms"] * figures["times the floor"])
        assert row["device_ms"] is None  # there is no GPU
    assert rows[1]["figures"]["times n=1"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"])
    assert rows[3]["figures"]["times context 16"] == pytest.approx(rows[3]["ms"] / rows[1]["ms"])
    cycle = rows[4]["figures"]
    assert rows[4]["part"] == "cycle"
    assert set(cycle) == {"draft ms", "verify ms", "accept ms", "outside the forward ms", "tau", "nodes"}
    assert min(cycle.values()) > 0.0
    assert [row["part"] for row in rows[5:]] == ["speed"] * 3 + ["batch"] * 3
    for row in rows[5:]:
        assert row["tokens_per_second"] > 0.0
        assert row["figures"].get("identical", 1.0) == 1.0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {8}
    assert content["copy_gigabytes_per_second"] > 0.0
    assert content["prompts"]["own"]["number"] == 2


def test_parts_run_alone(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*QUICK, "--parts", "forward"]) == 0
    out = capsys.readouterr().out
    assert out.count("| forward |") == 2
    assert "| context |" not in out


def test_shapes_have_parameter_counts_of_the_models(gpu: ModuleType) -> None:
    """Shapes are correct if they have as many parameters as their models."""
    expected = {"135M": 134_515_008, "1.5B": 1_543_714_304, "8B": 8_030_261_248}
    for name, number in expected.items():
        shapes = tensor_shapes(gpu.SHAPES[name]).values()
        assert sum(math.prod(shape) for shape in shapes) == number


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--parts", "backward"], ["no such part", "forward, context"]),
        (["--shapes", "70B"], ["no such shape", "135M"]),
        (["--parts", "speed"], ["--model"]),
        ([*QUICK, "--repeats", "0"], ["--repeats", "1 or more"]),
        ([*QUICK, "--contexts", "40000"], ["fits into a context"]),
        ([*QUICK, "--device", "toaster"], ["device"]),
        ([*QUICK, *RUN, "--data", "no-such-folder"], ["no-such-folder"]),
    ],
)
def test_invalid_arguments_are_refused(
    gpu: ModuleType, argv: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(argv) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in told), err


def test_without_a_gpu_large_shapes_are_refused(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for argv in ([], [*QUICK, "--model", "smollm2"]):
        assert gpu.main(argv) == 2
        err = capsys.readouterr().err
        assert "There is no GPU here" in err
        assert "--shapes tiny" in err
