"""``draftwood inspect calibration``: the table, JSON, the plot, errors. Counting: tests/engine/test_calibration.py."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures

RUN = ("inspect", "calibration", "--model", "tiny", "--drafter", "blend", "--budget", "8", "--max-tokens", "24")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("one two one two one\nhello hello hello\n", encoding="utf-8")
    return str(path)


def test_shows_chances_sources_and_the_error(draftwood_command: Command, prompts: str) -> None:
    result = draftwood_command(*RUN, "--prompts", prompts)
    assert result.code == 0
    assert "Calibration error: 0." in result.out
    for name in ("chance", "source", "expected", "accepted", "transition"):
        assert name in result.out


def test_json_and_plot(draftwood_command: Command, prompts: str, tmp_path: Path) -> None:
    plot = tmp_path / "reliability.svg"
    result = draftwood_command(*RUN, "--prompts", prompts, "--limit", "1", "--json", "--plot", str(plot))
    content = json.loads(result.out)
    assert content["prompts"] == 1
    assert content["tokens"] == 24
    found = content["calibration"]
    assert found["tried"] == sum(own["tried"] for own in found["bins"])
    assert found["tried"] == sum(own["tried"] for own in found["sources"].values()) > 0
    assert 0.0 <= found["error"] <= 1.0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_the_first_tokens_can_be_left_out(draftwood_command: Command, prompts: str) -> None:
    everything, rest = (
        json.loads(draftwood_command(*RUN, "--prompts", prompts, "--json", "--skip-tokens", skipped).out)["calibration"]
        for skipped in ("0", "30")
    )
    assert 0 < rest["tried"] < everything["tried"]


def test_all_prompts_of_a_file_are_used(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one two one\nhello hello\nred green red\n", encoding="utf-8")
    result = draftwood_command(*RUN, "--prompts", str(path), "--skip-tokens", "500")
    assert "No guesses were counted in 72 tokens" in result.out
    assert "--skip-tokens" in result.out


def test_bundled_prompts(draftwood_command: Command) -> None:
    content = json.loads(draftwood_command(*RUN, "--limit", "1", "--json").out)
    assert content["prompts"] > 2


def test_the_plot_must_be_svg(draftwood_command: Command) -> None:
    result = draftwood_command(*RUN, "--plot", "x.png")
    assert result.code != 0
    assert ".svg" in result.err
