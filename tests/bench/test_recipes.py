"""Recipes: the files of the package are valid, and errors in a file are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftwood.bench.recipes.recipe import ANALYSIS, FOLDER, Recipe, list_recipes, load_recipe
from draftwood.bench.records.methods import parse_methods
from draftwood.errors import DraftwoodError, OptionError

TASKS = {
    *("mt_bench", "humaneval", "mbpp", "classeval", "gsm8k", "alpaca", "cnn_dm", "aime24", "livecodebench"),
    *("spec_bench", "qa", "chat", "code", "edit", "math", "summary"),
}
ASKED_FOR = {
    *(f"goose-{item}" for item in ("table1", "table2", "table3", "figure3", "figure4", "figure5")),
    *(f"stand-{item}" for item in ("table1", "table2", "table3", "table4", "figure3")),
    *(f"salf-{item}" for item in ("table1", "table2", "table4", "figure2")),
    *(f"gto-{item}" for item in ("table1", "table3", "table4", "table5", "table6", "table7", "figure2")),
}
RUNS_TODAY = {
    *(name for name in ASKED_FOR if name.startswith("goose-")),
    *(f"stand-{item}" for item in ("table1", "table2", "table3", "table4", "figure2")),
}
PAPERS = {"goose": "GOOSE", "stand": "STAND", "salf": "SALF/TALF", "gto": "GTO"}
SMALL = """
title = "Two methods"
paper = "GOOSE"
item = "Table 9"
what = "Look at tau."
claims = [1]
"""
RUN = """
[settings]
drafters = ["plain", "pld"]
tasks = ["gsm8k", "mbpp"]
budget = [60]
limit = 10

[[run]]
name = "main"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str, **params: str) -> Recipe:
    return load_recipe(written(tmp_path, text), params)


# the recipes of the package


def test_every_table_and_figure_has_its_recipe() -> None:
    assert set(list_recipes()) >= ASKED_FOR


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_is_valid(name: str) -> None:
    recipe = load_recipe(name)
    paper, item = name.split("-")
    assert recipe.name == name
    assert recipe.paper == PAPERS[paper]
    assert recipe.item.lower().replace(" ", "") == item
    assert recipe.hardware
    assert recipe.claims
    assert set(recipe.claims) <= set(range(1, 35))
    assert bool(recipe.runs) == (recipe.kind != ANALYSIS)
    for run in recipe.runs:
        settings = recipe.settings_for(run)
        assert settings.limit is not None
        assert settings.limit <= 10, "a first run is a small one"
        assert settings.tasks
        assert set(settings.tasks) <= TASKS
        assert len(set(settings.drafters)) == len(settings.drafters)
        for figure in run.figures:
            low, high = (1.0, 20.0) if figure["metric"] != "tokens_per_second" else (1.0, 1000.0)
            assert low <= figure["value"] <= high, figure
        keys = [tuple(v for k, v in figure.items() if k != "value") for figure in run.figures]
        assert len(set(keys)) == len(keys), "a figure is there twice"


@pytest.mark.parametrize("name", sorted(RUNS_TODAY))
def test_recipe_with_existing_drafters_can_run(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.list_missing() == []
    recipe.check()
    for run in recipe.runs:
        settings = recipe.settings_for(run)
        labels = [m.label for m in parse_methods(settings.drafters, settings.memory, settings.budget)]
        optional = set(recipe.optional)
        assert {figure["method"] for figure in run.figures} <= {*labels, *optional}


def test_all_claims_have_a_recipe() -> None:
    covered = {claim for name in list_recipes() for claim in load_recipe(name).claims}
    assert covered == set(range(1, 35))


def test_published_figures_match_the_paper() -> None:
    """A few cells, looked up by hand, of tables whose rows and columns are easily swapped."""

    def value(name: str, run: str, method: str, task: str, metric: str, trajectories: int | None = None) -> float:
        runs = {r.name: r for r in load_recipe(name).runs}
        found = [
            f["value"]
            for f in runs[run].figures
            if (f["method"], f["task"], f["metric"], f.get("trajectories")) == (method, task, metric, trajectories)
        ]
        assert len(found) == 1
        return float(found[0])

    literal = "goose:bypass=copied,extension=levels,static=false,max_draft=20"
    assert value("goose-table1", "code", literal, "classeval", "tau") == 5.19
    for bypass in ("copied", "agreed"):
        assert value("goose-table2", "talk", literal.replace("copied", bypass), "gsm8k", "tau") == 3.87
    never = literal.replace("copied", "never")
    assert value("goose-table2", "talk", f"{never},spine=off", "gsm8k", "tau") == 3.76
    assert value("goose-table2", "code", f"{never},spine=transition", "mbpp", "tau") == 3.21
    assert value("goose-table3", "talk", "pld", "mt_bench", "speedup") == 1.47
    stand = "stand:harvest=emitted,renormalise=false"
    assert value("stand-table1", "main", stand, "livecodebench", "by_trajectories", 16) == 3.64
    assert value("stand-table2", "main", "anpd", "aime24", "tau") == 1.88
    assert value("salf-table2", "main", "eagle2:head={talf},growth=optimal", "*", "tau") == 3.98
    assert value("salf-table4", "main", "eagle2:head={head},growth=salf,threshold=0.5", "gsm8k", "speedup") == 2.69
    assert value("gto-table4", "sampled", "eagle3:head={m32}", "humaneval", "tau") == 5.45
    assert value("gto-table7", "greedy", "eagle3:head={head},depth=8 @50", "mt_bench", "speedup") == 3.56


WITH_MEANS = [f"{paper}-table{n}" for paper, ns in {"salf": (1, 2, 4), "gto": range(1, 8)}.items() for n in ns]


@pytest.mark.parametrize("name", WITH_MEANS)
def test_published_means_match_their_cells(name: str) -> None:
    """Detects misread numbers; rounding in the papers accounts for up to 0.015."""
    for run in load_recipe(name).runs:
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for figure in run.figures:
            rows.setdefault((figure["method"], figure["metric"]), {})[figure["task"]] = figure["value"]
        assert rows
        for row in rows.values():
            mean = row.pop("*")
            assert abs(sum(row.values()) / len(row) - mean) < 0.016, row


def test_missing_head_is_listed_once() -> None:
    recipe = load_recipe("salf-table4")
    (missing,) = recipe.list_missing()
    assert missing.startswith("pass --param head=PATH, a trained draft head")
    with pytest.raises(OptionError, match=r"salf-table4 \(SALF/TALF, Table 4\) cannot run\n.*--param head=PATH"):
        recipe.check()


def test_analysis_recipe_is_not_a_benchmark_run() -> None:
    with pytest.raises(OptionError, match=r"not a benchmark run.*drawn_or_chosen"):
        load_recipe("stand-figure3").check()


def test_optional_methods_are_added_if_available(tmp_path: Path) -> None:
    recipe = load_recipe("stand-table4")
    (run,) = recipe.runs
    assert "stand:harvest=emitted,renormalise=false,tree={tree}" not in recipe.settings_for(run).drafters
    assert len(recipe.list_skipped()) == 1
    assert "--param tree=PATH, a static tree" in recipe.list_skipped()[0]
    given = load_recipe("stand-table4", {"tree": "heuristic"})
    assert given.settings_for(given.runs[0]).drafters[-1] == "stand:harvest=emitted,renormalise=false,tree=heuristic"
    assert given.list_skipped() == []
    absent = load_recipe("stand-table4", {"tree": str(tmp_path / "none.json")})
    assert "none.json" in absent.list_skipped()[0]


# reading a file


def test_settings_are_shared_and_overridden(tmp_path: Path) -> None:
    text = SMALL + RUN + '\n[run.settings]\nlimit = 3\n\n[[run]]\nname = "second"\n'
    first, second = (recipe := load(tmp_path, text)).runs
    assert (first.name, second.name) == ("main", "second")
    assert recipe.settings_for(first).limit == 3
    assert recipe.settings_for(second).limit == 10
    typed = recipe.settings_for(first, {"limit": 1, "model": "other", "tasks": ["gsm8k"], "drafters": ["goose"]})
    assert (typed.limit, typed.model, typed.tasks, typed.drafters) == (1, "other", ("gsm8k",), ("goose",))
    assert typed.budget == (60,)


def test_figures_are_assigned_to_runs_with_their_methods(tmp_path: Path) -> None:
    text = (
        SMALL
        + 'figure = [\n  { method = "pld", task = "gsm8k", metric = "tau", value = 2.5, model = "M" },\n'
        + '  { method = "pld", task = "*", metric = "tau", value = 2.0, model = "M", run = "main" },\n]\n'
        + RUN
        + '\n[[run]]\nname = "second"\n[run.settings]\ntasks = ["mbpp"]\n'
    )
    recipe = load(tmp_path, text)
    first, second = recipe.runs
    cell = {"method": "pld", "task": "gsm8k", "metric": "tau", "value": 2.5, "model": "M"}
    assert first.figures == [cell, {**cell, "task": "*", "value": 2.0}]
    assert second.figures == []
    assert recipe.figures_for(first) == first.figures
    assert recipe.figures_for(first, {"tasks": ["gsm8k"]}) == [cell]  # the mean of the paper is over more tasks
    assert recipe.figures_for(first, {"tasks": ["mbpp"]}) == []


def test_params_are_substituted_in_methods_and_figures(tmp_path: Path) -> None:
    text = SMALL + (
        'needs = ["datastore"]\n'
        'figure = [{ method = "rest:datastore={datastore}", task = "qa", metric = "tau", value = 2, model = "M" }]\n'
        '[settings]\ndrafters = ["plain", "rest:datastore={datastore}"]\ntasks = ["qa"]\n[[run]]\nname = "main"\n'
    )
    bare = load(tmp_path, text)
    assert bare.params == ["datastore"]
    assert bare.list_missing() == ["pass --param datastore=PATH, a file written by `draftwood datastore build`"]
    assert bare.list_missing({"drafters": ["plain"]}) == []
    filled = load(tmp_path, text, datastore="some/file.ds")
    (run,) = filled.runs
    assert filled.params == []
    assert filled.list_missing() == []
    assert filled.settings_for(run).drafters == ("plain", "rest:datastore=some/file.ds")
    assert run.figures[0]["method"] == "rest:datastore=some/file.ds"
    with pytest.raises(OptionError, match=r"no parameter 'head'\n.*datastore"):
        load(tmp_path, text, head="x")
    with pytest.raises(OptionError, match="without commas"):
        load(tmp_path, text, datastore="a,b")


def test_labels_of_several_budgets_are_known(tmp_path: Path) -> None:
    figure = 'figure = [{ method = "pld @16", task = "gsm8k", metric = "tau", value = 2.5, model = "M" }]\n'
    recipe = load(tmp_path, SMALL + figure + RUN.replace("[60]", "[16, 60]"))
    assert [f["method"] for f in recipe.runs[0].figures] == ["pld @16"]
    with pytest.raises(OptionError, match="belongs to no run"):
        load(tmp_path, SMALL + figure + RUN)


def test_unknown_drafter_options_are_listed_as_missing(tmp_path: Path) -> None:
    recipe = load(tmp_path, SMALL + RUN.replace('"pld"', '"pld:speed=9"'))
    assert len(recipe.list_missing()) == 1
    assert "pld:speed=9" in recipe.list_missing()[0]
    assert "'speed'" in recipe.list_missing()[0]
    recipe = load(tmp_path, SMALL + RUN.replace('"pld"', '"pld:memory=elephant"'))
    assert "elephant" in recipe.list_missing()[0]


FIGURE = '[[figure]]\nmethod = "pld"\ntask = "gsm8k"\nmetric = "tau"\nvalue = 2.0\nmodel = "M"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SMALL + 'colour = "red"\n' + RUN, r"no key 'colour'\n.*title, paper, item"),
        (SMALL + RUN.replace("limit = 10", "limits = 10"), r"\[settings\] has no key 'limits'\n.*limit"),
        (SMALL + RUN.replace("limit = 10", 'model = "m"'), r"\[settings\] has no key 'model'"),
        (SMALL + RUN + 'folder = "x"\n', r"\[\[run\]\] has no key 'folder'"),
        (SMALL + RUN + '[run.settings]\ndata = "x"\n', r"\[run.settings\] has no key 'data'"),
        (SMALL + RUN + FIGURE + "page = 1\n", r"\[\[figure\]\] has no key 'page'"),
        (SMALL + RUN + FIGURE.replace("value = 2.0", 'value = "2"'), "incomplete"),
        (SMALL + RUN + FIGURE.replace("tau", "joy"), r"unknown metric of a figure\n.*'joy'\n.*tau, speedup"),
        (SMALL + RUN + FIGURE.replace('"pld"', '"sam"'), "belongs to no run"),
        (SMALL + RUN + FIGURE.replace("gsm8k", "qa"), "belongs to no run"),
        (SMALL + RUN + FIGURE + 'run = "other"\n', "belongs to no run"),
        (SMALL + RUN + FIGURE + "trajectories = 4\n", "by_trajectories"),
        (SMALL + RUN + '[[run]]\nname = "main"\n', "unique name"),
        (SMALL + RUN.replace('"main"', '"../main"'), "unique name"),
        (SMALL + RUN.replace("[60]", "60"), r"'budget' must be a list\n.*60"),
        (SMALL + RUN.replace("limit = 10", "limit = 0"), "limit must be a whole number"),
        (SMALL + RUN.replace('"pld"', '"pld:"') + FIGURE, "belongs to no run"),
        (SMALL + RUN.replace('"pld"', '"pld:x"'), "drafter name with options"),
        (SMALL + 'kind = "guess"\n' + RUN, "unknown kind"),
        (SMALL + 'kind = "analysis"\n' + RUN, "a command and no runs"),
        (SMALL, "runs and no command"),
        (SMALL + 'needs = ["luck"]\n' + RUN, r"unknown entry of needs\n.*'luck'"),
        (SMALL + 'needs = ["head"]\n' + RUN, "placeholders of the methods differ"),
        (SMALL + RUN.replace('"pld"', '"eagle2:head={head}"'), "placeholders of the methods differ"),
        (SMALL.replace("[1]", '["1"]') + RUN, "'claims' must be a list"),
        (SMALL.replace('title = "Two methods"', "") + RUN, "'title' is missing"),
        (SMALL.replace('"Two methods"', '" "') + RUN, "'title' must be a string"),
        (SMALL + "settings = 3\n", "'settings' must be a table"),
    ],
)
def test_errors_in_recipe_file_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=re.compile(complaint, re.DOTALL)) as caught:
        load(tmp_path, text)
    assert "own.toml" in str(caught.value)


def test_invalid_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"(?s)Unknown recipe.*Did you mean 'goose-table1'"):
        load_recipe("goose-tabel1")
    with pytest.raises(OptionError, match="no such recipe"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(DraftwoodError, match="cannot be read"):
        load(tmp_path, "title = \n")


def test_recipe_by_name_and_by_path_are_equal() -> None:
    assert load_recipe("goose-table1") == load_recipe(str(FOLDER / "goose-table1.toml"))
