"""``draftwood bench`` on the command line."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from draftwood.bench.figures.diff import CONFIDENCE, FLOOR, MIN_PROMPTS
from draftwood.bench.records.run_folder import RequestRecord, append_records
from draftwood.bench.replay.recording import DEFAULT_WIDTH
from draftwood.bench.run.engines import DrafterEngine, SampleResult
from draftwood.bench.settings import BenchSettings
from draftwood.cli.bench.tables import figures_table, prose_table
from draftwood.cli.console.terminal import CLEAR_LINE, Paint, ProgressBar
from draftwood.config import SamplingParams
from tests.tools.cli import Command, Terminal, _plain_environment, draftwood_command  # noqa: F401

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


def test_figures_as_json(draftwood_command: Command, tmp_path: Path) -> None:
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
    changes = json.loads(draftwood_command("bench", "diff", a, b, "--json").out)["changes"]
    assert {"value", "low", "high"} == set(next(one["ratio"] for one in changes if one["ratio"]))


def test_methods_of_different_labels_are_compared(draftwood_command: Command, tmp_path: Path) -> None:
    for name, drafters in (("a", "plain,goose:match=suffix"), ("b", "plain,pld,goose")):
        assert draftwood_command(*BENCH, "--drafters", drafters, "--out", str(tmp_path / name)).code == 0
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    diff = draftwood_command("bench", "diff", a, b, "--pair", "suffix", "pld")
    assert diff.code == 0, diff.err
    names = [line.split("  ")[0] for line in diff.out.splitlines()[1:]]
    assert set(names[:-1]) == {"goose:match=suffix -> pld"}
    assert "speedup" in diff.out
    line = ("bench", "diff", b, b, "--pair", "pld", "goo", "--pair", "plain", "pld", "--json")
    content = json.loads(draftwood_command(*line).out)
    assert content["pairs"] == [
        {"method": "pld -> goose", "before": "pld", "after": "goose"},
        {"method": "plain -> pld", "before": "plain", "after": "pld"},
    ]
    assert {one["method"] for one in content["changes"]} == {"pld -> goose", "plain -> pld"}
    assert {one["metric"] for one in content["changes"]} >= {"speedup", "tokens_per_second", "tau", "first_token_ms"}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("pld", "sam"), ("No method matches in the second run (a)", "'sam'", "'plain', 'pld'", "Give a label")),
        (("pl", "pld"), ("Several methods match in the first run (a)", "'pl'", "'plain', 'pld'", "Give a label")),
        (("pld",), ("--pair: expected 2 arguments",)),
    ],
)
def test_invalid_pairs_are_refused(
    draftwood_command: Command, tmp_path: Path, pair: tuple[str, ...], words: tuple[str, ...]
) -> None:
    a = str(tmp_path / "a")
    assert draftwood_command(*BENCH, "--drafters", "plain,pld", "--out", a).code == 0
    result = draftwood_command("bench", "diff", a, a, "--pair", *pair)
    assert (result.code, result.out) == (2, "")
    assert all(word in result.err for word in words)
    assert "Traceback" not in result.err


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


def test_recipe_runs_with_command_line_options(draftwood_command: Command, tmp_path: Path) -> None:
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
def test_invalid_options_are_refused_before_model_loads(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], word: str
) -> None:
    monkeypatch.setattr("draftwood.bench.run.runner.load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    result = draftwood_command("bench", "--model", "tiny", "--out", str(tmp_path / "a"), *line)
    assert result.code == 2
    assert word in result.err
    assert not (tmp_path / "a").exists()


def test_invalid_numbers_are_refused(draftwood_command: Command) -> None:
    for line in (("--budget", "many"), ("--trajectories", "1,x")):
        result = draftwood_command("bench", *line)
        assert result.code == 2
        assert f"{line[1]!r} is not a list of" in result.err


def test_folder_without_run_is_refused(draftwood_command: Command, tmp_path: Path) -> None:
    for line in (("report", str(tmp_path)), ("diff", str(tmp_path), str(tmp_path))):
        result = draftwood_command("bench", *line)
        assert result.code == 2
        assert "not a benchmark run" in result.err


# -- output ------------------------------------------------------------------------------------------------------------


def test_help_shows_defaults(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = draftwood_command("bench", "--help").out.splitlines()
    for f in fields(BenchSettings):
        flag = f"  --{f.name.replace('_', '-')} "
        (line,) = [a + b for a, b in pairwise(lines) if a.startswith(flag)]  # with the line after it
        if isinstance(f.default, tuple) and f.default:
            assert f"(default: {','.join(map(str, f.default))})" in line
        elif type(f.default) in (int, float, str):
            assert f"(default: {f.default:{'g' if isinstance(f.default, float) else ''}})" in line
    assert f"(default: {DEFAULT_WIDTH})" in draftwood_command("bench", "record", "--help").out
    text = " ".join(draftwood_command("bench", "diff", "--help").out.split())
    assert f"{CONFIDENCE:.0%} interval excludes 1, it is more than {FLOOR:.0%}" in text
    assert f"at least {MIN_PROMPTS} prompts" in text


@pytest.mark.parametrize("command", ["report", "diff", "recipes", "peers", "record", "replay"])
def test_every_command_has_examples(draftwood_command: Command, command: str) -> None:
    text = draftwood_command("bench", command, "--help").out
    assert f"  draftwood bench {command}" in text.split("examples:", 1)[1]


def test_recipe_description_lists_missing_inputs(draftwood_command: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'title = "Short"\npaper = "GOOSE"\nitem = "Table 9"\nwhat = "Look for this."\nthen = "Divide by two."\n'
        'optional = ["rest:datastore={datastore}"]\n'
        '[settings]\ndrafters = ["plain"]\ntasks = ["code"]\nlimit = 1\nmax_tokens = 4\n[[run]]\nname = "one"\n'
    )
    result = draftwood_command("bench", "--recipe", str(recipe), "--model", "tiny", "--out", str(tmp_path / "a"))
    assert result.code == 0, result.err
    places = [result.err.index(text) for text in ("Table 9", "Look for this.", "rest", "wrote", "Divide by two.")]
    assert places == sorted(places)
    shown = draftwood_command("bench", "recipes", str(recipe))
    for text in ("Look for this.", "Divide by two.", "tasks code", "--param datastore=PATH"):
        assert text in shown.out
    content = json.loads(draftwood_command("bench", "recipes", str(recipe), "--json").out)
    assert content["then"] == "Divide by two."
    assert content["params"] == ["datastore"]
    assert content["runs"][0]["settings"]["limit"] == 1


def test_recipes_and_peers_as_json(draftwood_command: Command) -> None:
    recipes = json.loads(draftwood_command("bench", "recipes", "--json").out)["recipes"]
    assert {"name", "paper", "item", "title", "kind", "needs"} == set(recipes[0])
    assert "transformers:lookup" in json.loads(draftwood_command("bench", "peers", "--json").out)["peers"]


def test_a_later_part_of_a_recipe_is_refused_before_the_first_runs(draftwood_command: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'title = "t"\npaper = "GOOSE"\nitem = "Table 9"\nwhat = "w"\n[settings]\ndrafters = ["plain"]\nlimit = 1\n'
        '[[run]]\nname = "one"\n[run.settings]\ntasks = ["code"]\n'
        '[[run]]\nname = "two"\n[run.settings]\ntasks = ["humaneval"]\n'
    )
    result = draftwood_command("bench", "--recipe", str(recipe), "--model", "tiny", "--out", str(tmp_path / "a"))
    assert result.code == 2
    assert "humaneval" in result.err
    assert "--data" in result.err
    assert not (tmp_path / "a").exists()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_interrupted_run_prints_how_to_resume(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = (*BENCH, "--drafters", "plain,pld")
    monkeypatch.setattr("sys.argv", ["draftwood", *line])
    written = []

    def append(folder: Path, records: list[RequestRecord]) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(records)
        append_records(folder, records)

    with monkeypatch.context() as patch:
        patch.setattr("draftwood.bench.run.runner.append_records", append)
        result = draftwood_command(*line)
    assert result.code == 130
    (folder,) = tmp_path.iterdir()
    assert f"draftwood {' '.join(line)} --out {folder.name}\n" in result.err
    assert f"draftwood bench report {folder.name}\n" in result.err
    (folder / "requests.jsonl").rename(tmp_path / "kept")
    assert "not finished" in draftwood_command("bench", "report", folder.name).err  # and there is nothing to show
    (tmp_path / "kept").rename(folder / "requests.jsonl")
    half = draftwood_command("bench", "report", folder.name)
    assert half.code == 0
    assert "not finished" in half.err
    assert "not finished" in (folder / "report.md").read_text()
    whole = draftwood_command(*line, "--out", folder.name)
    assert whole.code == 0
    assert "3 of 8 jobs are done" in whole.err
    assert "not finished" not in whole.err
    assert "not finished" not in (folder / "report.md").read_text()


def test_interrupt_before_first_measurement(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwood.bench.run.runner.load_target", interrupted)
    result = draftwood_command(*BENCH, "--out", str(tmp_path / "a"))
    assert result.code == 130
    assert "No results yet" in result.err


def test_failing_method_and_absent_peer_are_reported(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = DrafterEngine.generate

    def failing(self: DrafterEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[SampleResult]]:
        if self.llm.drafter == "pld":
            raise RuntimeError("out of\nmemory")
        return answer(self, prompts, params)

    monkeypatch.setattr(DrafterEngine, "generate", failing)
    out = tmp_path / "a"
    result = draftwood_command(*BENCH, "--drafters", "plain,pld", "--out", str(out))
    assert result.code == 1
    assert "pld failed: RuntimeError: out of memory\n" in result.err
    assert "FAILED" in result.out
    manifest = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(
        json.dumps({**manifest, "absent": {"vllm": "vllm is not installed;\n get it", "llamacpp": "no file"}})
    )
    again = draftwood_command("bench", "report", str(out))
    assert again.code == 1
    assert "\nvllm is not installed; get it\nllamacpp is absent: no file\n" in again.err


def test_absent_peer_is_reported_before_the_run(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("DRAFTWOOD_PEER_VLLM", str(tmp_path / "no-python"))
    monkeypatch.setattr("draftwood.bench.run.runner.load_target", stopped)
    result = draftwood_command("bench", "--peers", "vllm", "--out", str(tmp_path / "a"))
    assert "no-python" in result.err
    assert "bench peers --install vllm" in result.err


def test_report_of_several_runs_needs_output_path(draftwood_command: Command, tmp_path: Path) -> None:
    result = draftwood_command("bench", "report", str(tmp_path), str(tmp_path))
    assert result.code == 2
    assert "--out" in result.err


def test_param_option_requires_recipe(draftwood_command: Command) -> None:
    assert "--recipe" in draftwood_command("bench", "--param", "head=x").err
    assert "KEY=VALUE" in draftwood_command("bench", "--recipe", "gto-table7", "--param", "head").err


def test_recordings_as_json(draftwood_command: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "own.recording")
    short = ("--tasks", "code, chat", "--limit", "1", "--max-tokens", "8", "--model", "tiny", "--json")
    told = json.loads(draftwood_command("bench", "record", "--budget", "8", *short, "--out", path).out)
    assert told["recording"] == path
    assert told["texts"] == 3  # one turn of code, two turns of chat
    figures = json.loads(draftwood_command("bench", "replay", path, "--budget", "8", "--json").out)["figures"]
    assert [one["method"] for one in figures] == ["goose", "recycling"]
    assert "'many'" in draftwood_command("bench", "replay", path, "--budget", "many").err


# -- narrow terminals --------------------------------------------------------------------------------------------------

ROWS = [
    ("method", "speed-up", "95%", "tau", "tokens/s", "nodes", "output"),
    ("plain", "1.00x", "1.00-1.00", "1.00", "100.0", "1.0", "24 identical"),
    ("goose:bypass=copied,extension=levels,static=false", "2.00x", "1.90-2.10", "3.00", "200.0", "60.0", "1 tie"),
]


@pytest.mark.parametrize("room", [30, 60, 80, 200])
def test_figures_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setenv("COLUMNS", str(room))
    lines = figures_table(Paint("never", Terminal()), ROWS)
    assert max(len(line.rstrip()) for line in lines) <= room
    text = "".join("".join(lines).split())
    for word in ("plain", "extension=", "2.00x", "1.90-2.10", "200.0", "60.0", "1tie", *(ROWS[0])):
        assert word in text
    assert len(figures_table(Paint("never", io.StringIO()), ROWS)) == 3  # a pipe gets whole rows


def test_texts_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [
        ("vllm", "vllm is not installed; install it with: draftwood bench peers --install vllm"),
        ("b", "installed"),
    ]
    lines = prose_table(Paint("never", Terminal()), rows)
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == f"{rows[0][0]} {rows[0][1]} b installed"
    assert prose_table(Paint("never", io.StringIO()), rows)[0] == f"vllm  {rows[0][1]}"


@pytest.mark.parametrize("room", [12, 30, 40, 80])
def test_a_progress_bar_stays_on_its_line(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setenv("COLUMNS", str(room))
    stream = Terminal()
    ProgressBar(Paint("never", stream))("measuring 12 methods" * 5, 5, 10)
    assert len(stream.getvalue().removeprefix(CLEAR_LINE)) < room
