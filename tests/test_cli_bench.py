"""``draftwood bench`` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_tools import Command, _plain_environment, draftwood_command  # noqa: F401

BENCH = ("bench", "--model", "tiny", "--tasks", "code,chat", "--limit", "2", "--max-tokens", "12", "--budget", "8")


def test_a_bench_writes_its_report_and_shows_the_main_figures(draftwood_command: Command, tmp_path: Path) -> None:
    result = draftwood_command(
        *BENCH, "--drafters", "plain,pld,goose:bypass=never,match=suffix", "--out", str(tmp_path / "a")
    )
    assert result.code == 0, result.err
    for word in ("speed-up", "plain", "pld", "goose:bypass=never,match=suffix", "identical"):
        assert word in result.out
    found = {path.name for path in (tmp_path / "a").iterdir()}
    assert found == {"run.json", "requests.jsonl", "report.md", "report.html", "summary.json"}
    assert str(tmp_path / "a" / "report.html") in result.err


def test_figures_for_programs(draftwood_command: Command, tmp_path: Path) -> None:
    result = draftwood_command(*BENCH, "--drafters", "plain,goose", "--out", str(tmp_path / "a"), "--json")
    (summary,) = json.loads(result.out)["summaries"]
    assert set(summary["cells"]) == {"plain", "goose"}
    assert summary["cells"]["plain"]["*"]["speedup"]["value"] == 1.0
    assert summary["cells"]["goose"]["code"]["requests"] == 2


def test_runs_are_merged_and_compared(draftwood_command: Command, tmp_path: Path) -> None:
    for name, drafters in (("a", "plain,goose"), ("b", "plain,pld")):
        assert draftwood_command(*BENCH, "--drafters", drafters, "--out", str(tmp_path / name)).code == 0
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    merged = draftwood_command("bench", "report", a, b, "--out", str(tmp_path / "merged"))
    assert merged.code == 0, merged.err
    assert all(method in merged.out for method in ("plain", "goose", "pld"))
    assert (tmp_path / "merged" / "report.html").exists()
    diff = draftwood_command("bench", "diff", a, b)
    assert diff.code == 0, diff.err
    assert "goose" in diff.out
    assert json.loads(draftwood_command("bench", "diff", a, b, "--json").out)["changes"]


def test_several_budgets_make_a_curve(draftwood_command: Command, tmp_path: Path) -> None:
    line = (*BENCH[:-1], "4,8", "--drafters", "plain,goose", "--out", str(tmp_path / "a"))
    assert draftwood_command(*line).code == 0
    methods = json.loads((tmp_path / "a" / "run.json").read_text())["methods"]
    assert [(m["label"], m["family"]) for m in methods] == [
        ("plain", "plain"),
        ("goose @4", "goose"),
        ("goose @8", "goose"),
    ]
    assert "udget" in (tmp_path / "a" / "report.md").read_text()


def test_a_recipe_runs_with_what_is_typed(draftwood_command: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'title = "t"\npaper = "GOOSE"\nitem = "Table 9"\nwhat = "w"\n'
        '[settings]\ndrafters = ["plain", "pld"]\ntasks = ["code"]\nlimit = 1\nmax_tokens = 100\nbudget = [8]\n'
        '[[run]]\nname = "one"\n[[run]]\nname = "two"\n[run.settings]\nmemory = "request"\n'
        '[[figure]]\nmethod = "pld"\ntask = "code"\nmetric = "tau"\nvalue = 2.5\nmodel = "M"\nrun = "one"\n'
    )
    line = ("bench", "--recipe", str(recipe), "--model", "tiny", "--max-tokens", "8", "--out", str(tmp_path / "a"))
    result = draftwood_command(*line)
    assert result.code == 0, result.err
    manifest = json.loads((tmp_path / "a" / "one" / "run.json").read_text())
    assert manifest["recipe"] == "own"
    assert manifest["settings"]["max_tokens"] == 8
    assert manifest["paper"][0]["value"] == 2.5
    assert json.loads((tmp_path / "a" / "two" / "run.json").read_text())["settings"]["memory"] == "request"
    assert "2.5" in (tmp_path / "a" / "report.md").read_text()
    assert "Table 1" in draftwood_command("bench", "recipes").out


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (("--drafters", "goos"), "goose"),
        (("--tasks", "nonsense"), "code"),
        (("--trajectories", "4"), "temperature"),
        (("--recipe", "goose-table"), "goose-table1"),
        (("--recipe", "salf-table4"), "head"),
        (("--peers", "transformer"), "transformers"),
        (("--data", "nowhere"), "nowhere"),
        (("--budget", "0"), "budget"),
    ],
)
def test_slips_are_explained_before_a_model_loads(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], word: str
) -> None:
    monkeypatch.setattr("draftwood.bench.runner.load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    result = draftwood_command("bench", "--model", "tiny", "--out", str(tmp_path / "a"), *line)
    assert result.code == 2
    assert word in result.err
    assert not (tmp_path / "a").exists()


def test_numbers_that_are_none(draftwood_command: Command) -> None:
    for line in (("--budget", "many"), ("--trajectories", "1,x")):
        result = draftwood_command("bench", *line)
        assert result.code == 2
        assert line[1] in result.err


def test_a_folder_that_is_no_run(draftwood_command: Command, tmp_path: Path) -> None:
    for line in (("report", str(tmp_path)), ("diff", str(tmp_path), str(tmp_path))):
        result = draftwood_command("bench", *line)
        assert result.code == 2
        assert "no benchmark run" in result.err
