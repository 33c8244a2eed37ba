"""Recipes: one TOML file for each table or figure of a paper that can be run on a given model.

A recipe has settings that all of its runs share, one or more runs with settings of their own, and the paper's figures
for the report. What only the user has, a trained head for instance, stands in a method as ``{head}`` and is filled from
``--param head=PATH``; methods under ``optional`` are left out as long as something of theirs is not there. A recipe of
the kind ``analysis`` is no benchmark run: it names the command that yields the figure.

Files are read strictly. A key that is not known, or a figure of a method that no run has, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from draftwood.bench.figures import ALL_TASKS
from draftwood.bench.recipes.recipe_file import RecipeFile
from draftwood.bench.records import DEFAULT_METHODS, BenchSettings, list_labels, parse_method, parse_methods
from draftwood.config import DEFAULT_MEMORY
from draftwood.drafters import drafter_names
from draftwood.errors import DraftwoodError, OptionError, did_you_mean

FOLDER = Path(__file__).parent
BENCH, ANALYSIS = "bench", "analysis"
BY_TRAJECTORIES = "by_trajectories"
METRICS = ("tau", "speedup", "tokens_per_second", BY_TRAJECTORIES)  # as in summary.Cell
USERS = ("model", "dtype", "quantize", "device", "target", "data")  # settings that are the user's alone
NEEDS = {
    "head": "a trained draft head: its folder, or the name of one that ships",
    "draft-model": "a small model with the same tokenizer",
    "datastore": "a file of `draftwood datastore build`",
    "training": "heads that were trained for this comparison",
}
_SETTINGS = tuple(f.name for f in fields(BenchSettings) if f.name not in USERS)
_LISTS = tuple(f.name for f in fields(BenchSettings) if isinstance(f.default, tuple))
_LISTED = {"claims": int, "needs": str, "optional": str}
_HEADS = "heads:"
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigure:
    """One number of the paper."""

    method: str  # its label in the run
    task: str  # ALL_TASKS: the mean
    metric: str
    value: float
    model: str  # as the paper calls it
    run: str | None = None  # None: every run that has the task and the method
    trajectories: int | None = None  # with BY_TRAJECTORIES: over the first so many samples


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRun:
    """One run: a folder of its own below that of the recipe."""

    name: str
    settings: dict[str, Any]  # with the shared ones
    figures: list[dict[str, Any]]  # for the manifest: method, task, metric, value, model


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    title: str
    paper: str
    item: str
    what: str
    claims: tuple[int, ...] = ()  # numbers of docs/reproduction.md
    kind: str = BENCH
    hardware: str = ""  # what size of machine is reasonable
    command: str = ""  # of an analysis
    then: str = ""  # what turns the run into the figure, where the report does not
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # methods that run where what they need is there
    runs: list[RecipeRun] = field(default_factory=list)

    @property
    def params(self) -> list[str]:
        """The names that ``--param`` takes and that are not filled yet."""
        methods = [*self.optional, *(text for run in self.runs for text in _methods(run))]
        return _unique(name for text in methods for name in _PLACEHOLDER.findall(text))

    def settings_for(self, run: RecipeRun, typed: Mapping[str, Any] | None = None) -> BenchSettings:
        """What a run measures. What the user ``typed``, by the names of Settings, goes before what the recipe says."""
        own = {"drafters": (*_methods(run), *(text for text in self.optional if not _lacks(text)))}
        return BenchSettings.from_dict({**run.settings, **own, **(typed or {})})

    def figures_for(self, run: RecipeRun, typed: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The paper's figures for what is run: its means are of its tasks, and of no others."""
        tasks = set((typed or {}).get("tasks", run.settings.get("tasks", ())))
        is_whole = tasks == set(run.settings.get("tasks", ()))
        return [f for f in run.figures if f["task"] in tasks or (f["task"] == ALL_TASKS and is_whole)]

    def missing(self, typed: Mapping[str, Any] | None = None) -> list[str]:
        """What stands in the way of running it, in words; nothing where it can run."""
        if self.kind == ANALYSIS:
            return [f"it is no benchmark run: the figure comes from {self.command}"]
        methods = (typed or {}).get("drafters") or [text for run in self.runs for text in _methods(run)]
        return _unique(reason for text in methods for reason in _lacks(text))

    def left_out(self) -> list[str]:
        """Optional methods that will not run, each with the reason."""
        return [f"{text} is left out: {'; '.join(_lacks(text))}" for text in self.optional if _lacks(text)]

    def check(self, typed: Mapping[str, Any] | None = None) -> None:
        """Refuses a recipe that cannot run."""
        missing = self.missing(typed)
        if missing:
            raise OptionError(f"The recipe {self.name} ({self.paper}, {self.item}) cannot run", got="; ".join(missing))


def list_recipes() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str | Path, params: Mapping[str, str] | None = None) -> Recipe:
    """A recipe of the package by its name, or any by the path of its .toml file; ``params`` fill its places."""
    is_path = isinstance(name, Path) or name.endswith(".toml")
    path = Path(name).expanduser() if is_path else FOLDER / f"{name}.toml"
    if not is_path and name not in list_recipes():
        raise OptionError(
            "There is no recipe of that name",
            got=repr(name),
            allowed=[*list_recipes(), "the path of a .toml file"],
            next_step=did_you_mean(name, list_recipes()),
        )
    recipe = _Reader(path).recipe()
    return _with_params(recipe, params) if params else recipe


class _Reader(RecipeFile):
    """From the content of a file to a recipe."""

    def recipe(self) -> Recipe:
        single = [f.name for f in fields(Recipe) if f.name not in ("name", "runs")]
        self.only(self.content, [*single, "settings", "run", "figure"], "the file")
        values = {name: self._value(name) for name in single if name in self.content}
        for name in ("title", "paper", "item", "what"):
            if name not in values:
                self.refuse(f"{name!r} is missing", allowed=single)
        recipe = Recipe(name=self.path.stem, **values, runs=self._runs())
        self._check_kind(recipe)
        self._check_needs(recipe)
        return recipe

    def _runs(self) -> list[RecipeRun]:
        shared = self.table(self.content, "settings")
        self.only(shared, _SETTINGS, "[settings]")
        figures = [self._figure(values) for values in self.tables("figure")]
        runs: list[RecipeRun] = []
        for values in self.tables("run"):
            self.only(values, ("name", "settings"), "[[run]]")
            name, own = values.get("name"), self.table(values, "settings")
            self.only(own, _SETTINGS, "[run.settings]")
            if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name) or name in _names(runs):
                self.refuse("a run needs a name of its own", repr(name), "small letters, digits and hyphens")
            runs.append(self._new_run(name, {**shared, **own}, figures))
        stray = [f for f in figures if not any(_as_dict(f) in run.figures for run in runs if f.run in (None, run.name))]
        if stray:
            self.refuse("a figure belongs to no run", stray[0], _names(runs))
        return runs

    def _new_run(self, name: str, settings: dict[str, Any], figures: Sequence[PaperFigure]) -> RecipeRun:
        for key, value in settings.items():
            if key in _LISTS and not isinstance(value, list):
                self.refuse(f"{key!r} is a list", repr(value), f"[{value!r}]")
        try:
            asked = BenchSettings.from_dict(settings)
            methods = [*asked.drafters, *self._value("optional")]
            labels = {label for text in methods for label, _ in list_labels(text, asked.budget)}
        except OptionError as error:
            self.refuse(f"the run {name!r} cannot be: {error.what}", error.got, error.allowed)
        places = (ALL_TASKS, *asked.tasks)
        own = [f for f in figures if f.run in (None, name) and f.method in labels and f.task in places]
        return RecipeRun(name=name, settings=settings, figures=[_as_dict(figure) for figure in own])

    def _figure(self, values: Mapping[str, Any]) -> PaperFigure:
        known = [f.name for f in fields(PaperFigure)]
        self.only(values, known, "[[figure]]")
        texts = all(isinstance(values.get(name), str) for name in ("method", "task", "model", "metric"))
        if not texts or not isinstance(values.get("run", ""), str) or not isinstance(values.get("value"), (int, float)):
            self.refuse("a figure is not complete", dict(values), "method, task, metric, value, model")
        figure = PaperFigure(**values)
        if figure.metric not in METRICS:
            self.refuse("a figure's metric is unknown", repr(figure.metric), METRICS)
        if (figure.metric == BY_TRAJECTORIES) != (type(figure.trajectories) is int):
            self.refuse("trajectories belong to by_trajectories, and only there", dict(values))
        return figure

    def _check_kind(self, recipe: Recipe) -> None:
        if recipe.kind not in (BENCH, ANALYSIS):
            self.refuse("the kind is unknown", repr(recipe.kind), (BENCH, ANALYSIS))
        is_analysis = recipe.kind == ANALYSIS
        if is_analysis != bool(recipe.command) or is_analysis == bool(recipe.runs):
            self.refuse("an analysis has a command and no runs, a benchmark has runs and no command")

    def _check_needs(self, recipe: Recipe) -> None:
        """What a recipe says it needs is what its methods have places for."""
        places: list[str] = []
        for need in recipe.needs:
            if not need.startswith(_HEADS) and need not in NEEDS:
                self.refuse("a need is unknown", repr(need), [*NEEDS, f"{_HEADS}NAME,NAME"])
            if need.startswith(_HEADS):
                places += need[len(_HEADS) :].split(",")
            elif need != "training":
                places.append(need.replace("-", "_"))
        wanted = _unique(n for r in recipe.runs for text in _methods(r) for n in _PLACEHOLDER.findall(text))
        if recipe.kind == BENCH and sorted(places) != sorted(wanted):
            self.refuse("needs and the places in methods differ", f"needs {places}, places {wanted}")

    def _value(self, name: str) -> Any:
        return self.listed(name, _LISTED[name]) if name in _LISTED else self.text(name)


def _with_params(recipe: Recipe, params: Mapping[str, str]) -> Recipe:
    unknown = sorted(set(params) - set(recipe.params))
    if unknown:
        raise OptionError(
            f"The recipe {recipe.name} has no parameter {', '.join(map(repr, unknown))}",
            allowed=recipe.params or "no parameters",
        )
    for name, value in params.items():
        if not value or "," in value:  # a comma would end the option that it becomes
            raise OptionError(f"The parameter {name} is no usable value", got=repr(value), allowed="no comma in it")
    runs = [
        replace(
            run,
            settings={**run.settings, "drafters": [_filled(text, params) for text in _methods(run)]},
            figures=[{**figure, "method": _filled(figure["method"], params)} for figure in run.figures],
        )
        for run in recipe.runs
    ]
    return replace(recipe, optional=tuple(_filled(text, params) for text in recipe.optional), runs=runs)


def _filled(text: str, params: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: params.get(match[1], match[0]), text)


def _lacks(text: str) -> list[str]:
    """Why a method cannot run: its drafter or an option of it does not exist, or a place in it is empty."""
    empty = _PLACEHOLDER.findall(text)
    reasons = [f"pass --param {name}=PATH, {_described(name)}" for name in empty]
    name, _ = parse_method(text)
    if name not in drafter_names():
        return [f"the drafter {name!r} is not in this version", *reasons]
    if not empty:
        try:
            parse_methods([text], DEFAULT_MEMORY, [1])
        except DraftwoodError as error:
            reasons.append(f"{text}: {error.what}" + (f", got {error.got}" if error.got is not None else ""))
    return reasons


def _described(place: str) -> str:
    if place.endswith("tree"):
        return "a static tree that `draftwood tune` wrote"
    return NEEDS.get(place.replace("_", "-"), NEEDS["head"])


def _methods(run: RecipeRun) -> list[str]:
    return list(run.settings.get("drafters", DEFAULT_METHODS))


def _as_dict(figure: PaperFigure) -> dict[str, Any]:
    content = {f.name: getattr(figure, f.name) for f in fields(PaperFigure) if f.name != "run"}
    return {name: value for name, value in content.items() if value is not None}


def _names(runs: Sequence[RecipeRun]) -> list[str]:
    return [run.name for run in runs]


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))
