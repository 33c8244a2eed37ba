"""``draftwood inspect theory``: the table, the plots, errors. The formulas are tested in tests/tree/test_theory.py."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftwood.cli.console.terminal import Paint
from draftwood.cli.inspect.theory import _block_character
from draftwood.tree.theory import (
    best_isotropic,
    best_spine,
    chain_yield,
    geometric_acceptance,
    isotropic_yield,
    sequoia,
)
from tests.tools.cli import ESCAPE, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures

RATES = ("inspect", "theory", "--ps", "0.3", "--pt", "0.03", "--budget", "60")


def test_theory_shows_a_table_and_two_plots(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    result = draftwood_command(*RATES)
    assert result.code == 0
    assert ESCAPE not in result.out
    lines = result.out.split("\n")
    for name in ("spine tree", "chain", "isotropic 3", "isotropic 5", "best isotropic", "sequoia", "best of both"):
        assert any(line.startswith(name) for line in lines), name
    assert f"{best_spine(0.3, 0.03, 60, 6).expected:.3f}" in next(line for line in lines if line.startswith("spine"))
    bars = [line for line in lines if "█" in line]
    assert sum(line.endswith(" best") for line in bars) == 1
    assert 40 < max(map(len, bars)) <= 60
    monkeypatch.setenv("COLUMNS", "30")
    assert max(len(line) for line in draftwood_command(*RATES).out.split("\n") if "█" in line) <= 30


def test_theory_json(draftwood_command: Command) -> None:
    content = json.loads(draftwood_command(*RATES, "--json").out)
    plan = best_spine(0.3, 0.03, 60, 6)
    assert content["spine"] == {**plan._asdict(), "widths": list(plan.widths)}
    assert len(content["yield_by_spine_length"]) == 59
    assert max(content["yield_by_spine_length"]) == plan.expected
    trees = {tree["name"]: tree for tree in content["trees"]}
    assert trees["isotropic 3"]["expected"] == isotropic_yield(0.03, 3, 60)
    assert trees["best isotropic"]["expected"] == best_isotropic(0.03, 60)[1]
    assert trees["sequoia"]["expected"] == pytest.approx(sequoia(geometric_acceptance(0.03, 59), 60, 59)[1])
    assert trees["chain"]["ratio"] == chain_yield(0.3, 59) / plan.expected


@pytest.mark.parametrize(
    "rates",
    [("0", "0", "2"), ("0.1", "0.4", "20"), ("0.95", "0", "40"), ("0", "0.9", "12"), ("0.97", "0.5", "500")],
    ids="/".join,
)
def test_theory_at_the_edges(rates: tuple[str, str, str], draftwood_command: Command) -> None:
    p_s, p_t, budget = rates
    result = draftwood_command("inspect", "theory", "--ps", p_s, "--pt", p_t, "--budget", budget)
    assert (result.code, result.err) == (0, "")
    assert ("best of both" in result.out) == (float(p_s) >= float(p_t))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--ps", "1"), "p_s"),
        (("--pt", "-0.1"), "p_t"),
        (("--ps", "nan"), "p_s"),
        (("--budget", "1"), "2 to 10000"),
        (("--budget", "10001"), "2 to 10000"),
        (("--branch-depth", "0"), "branch depth"),
        (("--plot", "x.png"), ".svg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_theory_refuses_invalid_arguments(options: tuple[str, str], what: str, draftwood_command: Command) -> None:
    result = draftwood_command("inspect", "theory", *options)
    assert (result.code, result.out) == (2, "")
    assert what in result.err
    assert "Traceback" not in result.err


def test_theory_has_help(draftwood_command: Command) -> None:
    result = draftwood_command("inspect", "theory", "--help")
    assert result.code == 0
    assert 2 <= result.out.split("examples:\n")[1].count("draftwood ") <= 3


def test_bars_without_block_characters() -> None:
    for encoding, letter in (("ascii", "#"), ("latin-1", "#"), ("utf-8", "█")):
        assert _block_character(Paint("never", io.TextIOWrapper(io.BytesIO(), encoding=encoding))) == letter


def test_a_plot_is_written(draftwood_command: Command, tmp_path: Path) -> None:
    result = draftwood_command(*RATES, "--plot", str(tmp_path / "x.svg"))
    assert result.code == 0
    labels = {node.get("data-m") for node in ElementTree.parse(tmp_path / "x.svg").iter() if "data-m" in node.attrib}
    assert labels == {"spine tree", "best: 4", "chain", "best isotropic", "sequoia"}
    lost = draftwood_command(*RATES, "--plot", str(tmp_path / "missing" / "x.svg"))
    assert (lost.code, "cannot be written" in lost.err) == (2, True)
