"""Shared by tests of the command line: run it in this process, on the built-in model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from draftwood.cli.main import main
from draftwood.targets.native.cpu import CpuDecoder

TINY = ("--model", "tiny", "--budget", "8")
SHORT = (*TINY, "--max-tokens", "12")
ESCAPE = "\x1b["


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())  # a user who types nothing
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "DRAFTWOOD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    if not CpuDecoder.is_available():  # its absence has its own test
        monkeypatch.setattr("draftwood.cli.console.loading._slow_on_cpu", lambda _: False)


@pytest.fixture
def draftwood_command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process; return the exit code whether it was returned or raised."""

    def run(*argv: str) -> Result:
        try:
            code = main(argv)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("one two one two one\n\nthree\n", encoding="utf-8")
    return path


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
