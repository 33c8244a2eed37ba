"""``draftwood train data``: output, exit codes, and resuming."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.cli.console.pace import PaceBar
from draftwood.cli.console.terminal import Paint
from draftwood.train.data.read import TrainingData
from tests.tools.cli import Command, Result, Terminal, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.train_data import contents, lines

SMALL = ("--model", "tiny", "--max-tokens", "10", "--prompt-tokens", "6", "--shard-size", "2")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return lines(tmp_path / "prompts.jsonl", *({"turns": [f"question {number}"]} for number in range(5)))


def train_data(run: Command, out: Path, *argv: str) -> Result:
    return run("train", "data", *argv, "--out", str(out), *SMALL)


def test_data_from_files_and_synthetic_prompts(draftwood_command: Command, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = train_data(draftwood_command, out, prompts, "--self", "2", "--licence", "CC0")
    assert result.code == 0
    assert result.out.startswith(f"{out}: 7 examples, ")
    assert " answered tokens, " in result.out
    assert result.out.endswith(" tokens/s\n")
    assert "answering prompts" in result.err
    data = TrainingData.open(out)
    assert len(data) == 7
    assert data.folders[0].manifest.licence == "CC0"


def test_data_summary_as_json(draftwood_command: Command, prompts: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "more.jsonl", {"turns": ["x" * 200]}, {"turns": []}, {"turns": ["fine"]})
    out = tmp_path / "data"
    result = train_data(draftwood_command, out, prompts, path, "--max-length", "60", "--json")
    content = json.loads(result.out)
    data = TrainingData.open(out)
    assert content == {
        "path": str(out),
        "model": "tiny",
        "prompts": 7,
        "examples": 6,
        "tokens": int(data.lengths.sum()),
        "answered_tokens": sum(int(data[place].answered.sum()) for place in range(6)),
        "too_long": 1,
        "empty": 1,
    }


def test_skipped_prompts_are_reported(draftwood_command: Command, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"turns": ["x" * 200]}, {"turns": ["fine"]})
    result = train_data(draftwood_command, tmp_path / "data", path, "--max-length", "60")
    assert "1 prompts too long" in result.out


def test_the_same_command_gives_the_same_bytes(draftwood_command: Command, prompts: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        argv = (prompts, "--self", "1", "--temperature", "0.9", "--top-p", "0.9", "--seed", "3")
        assert train_data(draftwood_command, tmp_path / name, *argv).code == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert train_data(draftwood_command, tmp_path / "c", prompts, "--temperature", "0.9", "--seed", "4").code == 0
    assert contents(tmp_path / "c")["part-00000.safetensors"] != contents(tmp_path / "a")["part-00000.safetensors"]


def test_answers_can_be_kept(draftwood_command: Command, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    path = lines(tmp_path / "chats.jsonl", {"messages": messages})
    assert train_data(draftwood_command, tmp_path / "data", path, "--keep-answers").code == 0
    ids, answered = TrainingData.open(tmp_path / "data")[0]
    assert bytes(ids[answered].tolist()) == b"Ho.\n"


def test_ctrl_c_exits_with_130_and_prints_resume_command(
    draftwood_command: Command, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_data(draftwood_command, tmp_path / "whole", prompts).code == 0
    out = tmp_path / "my data"
    heard = 0

    def interrupt(self: PaceBar, tokens: int) -> None:
        nonlocal heard
        heard += tokens
        if heard > 25:  # in the second part
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PaceBar, "add_tokens", interrupt)
        result = train_data(draftwood_command, out, prompts)
    assert result.code == 130
    assert f"draftwood train data {prompts} --out '{out}'" in result.err
    assert sorted(contents(out)) == ["manifest.json", "part-00000.safetensors"]
    assert train_data(draftwood_command, out, prompts).code == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_progress_bar_shows_tokens_per_second(
    draftwood_command: Command, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("draftwood.cli.console.terminal.REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    assert train_data(draftwood_command, tmp_path / "data", prompts).code == 0
    assert "━" in screen.getvalue()
    assert "answering prompts, " in screen.getvalue()
    assert "tokens/s" in screen.getvalue()


def test_rate_is_counted_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bar = PaceBar(Paint("never", Terminal()))
    now = 200.0
    assert bar.pace == ""
    bar.add_tokens(1000)
    assert bar.pace == ""
    now = 202.0
    bar.add_tokens(2000)
    assert bar.pace == ", 1,500 tokens/s"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "nothing to answer"),
        (("none.txt",), "none.txt cannot be read"),
        (("--self", "1", "--prompt-temperature", "0"), "all be the same"),
        (("--self", "1", "--temperature", "-1"), "temperature is out of range"),
        (("--self", "1", "--drafter", "gose"), "Did you mean 'goose'?"),
        (("--self", "1", "--max-length", "5000"), "at most 1024"),
        (("--self", "1", "--batch", "0"), "batch must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused(
    argv: tuple[str, ...], expected: str, draftwood_command: Command, tmp_path: Path
) -> None:
    result = train_data(draftwood_command, tmp_path / "data", *argv)
    assert result.code == 2
    assert expected in result.err
    assert not (tmp_path / "data").exists()


def test_prompts_are_read_before_a_model_is_loaded(draftwood_command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"turns": ["fine"]}\n{"turns"\n')
    argv = ("train", "data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "data"), "--model", "no-such-model")
    result = draftwood_command(*argv)
    assert result.code == 2
    assert "a.jsonl, line 2 is not valid JSON" in result.err


def test_different_run_in_same_folder_is_refused(draftwood_command: Command, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "data"
    assert train_data(draftwood_command, out, prompts).code == 0
    before = contents(out)
    result = train_data(draftwood_command, out, prompts, "--seed", "7")
    assert result.code == 2
    assert "was started with other settings" in result.err
    assert "settings.seed 7" in result.err
    assert contents(out) == before


def test_help_of_subcommand_does_not_import_torch() -> None:
    code = "import sys, draftwood.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_of_subcommand_shows_defaults(draftwood_command: Command) -> None:
    result = draftwood_command("train", "data", "--help")
    assert result.code == 0
    for told in ("(default: 512)", "--self N", "--drafter NAME", "(default: plain)"):
        assert told in " ".join(result.out.split())
