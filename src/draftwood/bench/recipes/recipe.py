"""Recipes: one TOML file for each table or figure of a paper, runnable on any model.

A recipe has shared settings, one or more runs with their own settings, and the paper's figures for the report. What the
user has to provide, such as a trained head, is a placeholder in a method, ``{head}``, filled by ``--param head=PATH``.
Methods under ``optional`` are skipped if something they need is missing. A recipe of kind ``analysis`` is not a
benchmark run: it names the command that produces the figure.

Unknown keys, and figures of methods that no run has, are errors.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from draftwood.bench.figures import ALL_TASKS
from draftwood.bench.recipes.recipe_file import RecipeFile
from draftwood.bench.records import list_labels, parse_method, parse_methods
from draftwood.bench.settings import DEFAULT_METHODS, BenchSettings
from draftwood.config import DEFAULT_MEMORY
from draftwood.drafters import drafter_names
from draftwood.errors import DraftwoodError, OptionError, did_you_mean

FOLDER = Path(__file__).parent
BENCH, ANALYSIS = "bench", "analysis"
BY_TRAJECTORIES = "by_trajectories"
METRICS = ("tau", "speedup", "tokens_per_second", BY_TRAJECTORIES)  # as in summary.Cell
USER_SETTINGS = ("model", "dtype", "quantize", "exact", "device", "target", "data")  # a recipe cannot set these
NEEDS = {
    "head": "a trained draft head: a folder, or the name of a bundled head",
    "draft-model": "a small model with the same tokenizer",
    "datastore": "a file written by `draftwood datastore build`",
    "training": "heads trained for this comparison",
}
_SETTINGS = tuple(f.name for f in fields(BenchSettings) if f.name not in USER_SETTINGS)
_LIST_SETTINGS = tuple(f.name for f in fields(BenchSettings) if isinstance(f.default, tuple))
_LIST_TYPES = {"claims": int, "needs": str, "optional": str}
_HEADS = "heads:"
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigure:
    """A published number."""

    method: str  # label in the run
    task: str  # ALL_TASKS: the mean
    metric: str
    value: float
    model: str  # as named in the paper
    run: str | None = None  # None: every run with this task and method
    trajectories: int | None = None  # with BY_TRAJECTORIES: number of samples


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRun:
    """One run of a recipe, in its own subfolder."""

    name: str
    settings: dict[str, Any]  # shared settings included
    figures: list[dict[str, Any]]  # for the manifest: method, task, metric, value, model


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    title: str
    paper: str
    item: str
    what: str
    claims: tuple[int, ...] = ()  # numbers in docs/reproduction.md
    kind: str = BENCH
    hardware: str = ""  # recommended machine
    command: str = ""  # for an analysis
    then: str = ""  # further steps to obtain the paper's figure
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # methods that are skipped if something they need is missing
    runs: list[RecipeRun] = field(default_factory=list)

    @property
    def params(self) -> list[str]:
        """Names of the placeholders that ``--param`` has to fill."""
        methods = [*self.optional, *(text for run in self.runs for text in _methods(run))]
        return _unique(name for text in methods for name in _PLACEHOLDER.findall(text))

    def settings_for(self, run: RecipeRun, typed: Mapping[str, Any] | None = None) -> BenchSettings:
        """Return the settings of a run. ``typed`` settings override those of the recipe."""
        own = {"drafters": (*_methods(run), *(text for text in self.optional if not _list_obstacles(text)))}
        return BenchSettings.from_dict({**run.settings, **own, **(typed or {})})

    def figures_for(self, run: RecipeRun, typed: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Select the paper's figures for the tasks that run. A mean applies only if all its tasks run."""
        tasks = set((typed or {}).get("tasks", run.settings.get("tasks", ())))
        is_whole = tasks == set(run.settings.get("tasks", ()))
        return [f for f in run.figures if f["task"] in tasks or (f["task"] == ALL_TASKS and is_whole)]

    def list_missing(self, typed: Mapping[str, Any] | None = None) -> list[str]:
        """List the reasons why the recipe cannot run; empty if it can."""
        if self.kind == ANALYSIS:
            return [f"it is not a benchmark run: the figure comes from {self.command}"]
        methods = (typed or {}).get("drafters") or [text for run in self.runs for text in _methods(run)]
        return _unique(reason for text in methods for reason in _list_obstacles(text))

    def list_skipped(self) -> list[str]:
        """List the optional methods that are skipped, with the reason."""
        return [
            f"{text} is skipped: {'; '.join(_list_obstacles(text))}" for text in self.optional if _list_obstacles(text)
        ]

    def check(self, typed: Mapping[str, Any] | None = None) -> None:
        """Raise if the recipe cannot run."""
        missing = self.list_missing(typed)
        if missing:
            raise OptionError(f"The recipe {self.name} ({self.paper}, {self.item}) cannot run", got="; ".join(missing))


def list_recipes() -> list[str]:
    """List the bundled recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str | Path, params: Mapping[str, str] | None = None) -> Recipe:
    """Load a bundled recipe by name, or any recipe by the path of its .toml file; ``params`` fill placeholders."""
    is_path = isinstance(name, Path) or name.endswith(".toml")
    path = Path(name).expanduser() if is_path else FOLDER / f"{name}.toml"
    if not is_path and name not in list_recipes():
        raise OptionError(
            "Unknown recipe",
            got=repr(name),
            allowed=[*list_recipes(), "the path of a .toml file"],
            next_step=did_you_mean(name, list_recipes()),
        )
    recipe = _Reader(path).read()
    return _fill_params(recipe, params) if params else recipe


class _Reader(RecipeFile):
    """Builds a recipe from the content of a file."""

    def read(self) -> Recipe:
        single = [f.name for f in fields(Recipe) if f.name not in ("name", "runs")]
        self.check_keys(self.content, [*single, "settings", "run", "figure"], "the file")
        values = {name: self._read_value(name) for name in single if name in self.content}
        for name in ("title", "paper", "item", "what"):
            if name not in values:
                self.refuse(f"{name!r} is missing", allowed=single)
        recipe = Recipe(name=self.path.stem, **values, runs=self._read_runs())
        self._check_kind(recipe)
        self._check_needs(recipe)
        return recipe

    def _read_runs(self) -> list[RecipeRun]:
        shared = self.get_table(self.content, "settings")
        self.check_keys(shared, _SETTINGS, "[settings]")
        figures = [self._read_figure(values) for values in self.get_tables("figure")]
        runs: list[RecipeRun] = []
        for values in self.get_tables("run"):
            self.check_keys(values, ("name", "settings"), "[[run]]")
            name, own = values.get("name"), self.get_table(values, "settings")
            self.check_keys(own, _SETTINGS, "[run.settings]")
            if not isinstance(name, str) or not _FOLDER_NAME.fullmatch(name) or name in _names(runs):
                self.refuse("a run needs a unique name", repr(name), "lower-case letters, digits and hyphens")
            runs.append(self._make_run(name, {**shared, **own}, figures))
        stray = [f for f in figures if not any(_as_dict(f) in run.figures for run in runs if f.run in (None, run.name))]
        if stray:
            self.refuse("a figure belongs to no run", stray[0], _names(runs))
        return runs

    def _make_run(self, name: str, settings: dict[str, Any], figures: Sequence[PaperFigure]) -> RecipeRun:
        for key, value in settings.items():
            if key in _LIST_SETTINGS and not isinstance(value, list):
                self.refuse(f"{key!r} must be a list", repr(value), f"[{value!r}]")
        try:
            parsed = BenchSettings.from_dict(settings)
            methods = [*parsed.drafters, *self._read_value("optional")]
            labels = {label for text in methods for label, _ in list_labels(text, parsed.budget)}
        except OptionError as error:
            self.refuse(f"the run {name!r} is invalid: {error.what}", error.got, error.allowed)
        tasks = (ALL_TASKS, *parsed.tasks)
        own = [f for f in figures if f.run in (None, name) and f.method in labels and f.task in tasks]
        return RecipeRun(name=name, settings=settings, figures=[_as_dict(figure) for figure in own])

    def _read_figure(self, values: Mapping[str, Any]) -> PaperFigure:
        known = [f.name for f in fields(PaperFigure)]
        self.check_keys(values, known, "[[figure]]")
        texts = all(isinstance(values.get(name), str) for name in ("method", "task", "model", "metric"))
        if not texts or not isinstance(values.get("run", ""), str) or not isinstance(values.get("value"), (int, float)):
            self.refuse("a figure is incomplete", dict(values), "method, task, metric, value, model")
        figure = PaperFigure(**values)
        if figure.metric not in METRICS:
            self.refuse("unknown metric of a figure", repr(figure.metric), METRICS)
        if (figure.metric == BY_TRAJECTORIES) != (type(figure.trajectories) is int):
            self.refuse("trajectories are required for by_trajectories, and not allowed otherwise", dict(values))
        return figure

    def _check_kind(self, recipe: Recipe) -> None:
        if recipe.kind not in (BENCH, ANALYSIS):
            self.refuse("unknown kind", repr(recipe.kind), (BENCH, ANALYSIS))
        is_analysis = recipe.kind == ANALYSIS
        if is_analysis != bool(recipe.command) or is_analysis == bool(recipe.runs):
            self.refuse("an analysis needs a command and no runs, a benchmark needs runs and no command")

    def _check_needs(self, recipe: Recipe) -> None:
        """Check that ``needs`` matches the placeholders of the methods."""
        placeholders: list[str] = []
        for need in recipe.needs:
            if not need.startswith(_HEADS) and need not in NEEDS:
                self.refuse("unknown entry of needs", repr(need), [*NEEDS, f"{_HEADS}NAME,NAME"])
            if need.startswith(_HEADS):
                placeholders += need[len(_HEADS) :].split(",")
            elif need != "training":
                placeholders.append(need.replace("-", "_"))
        wanted = _unique(n for r in recipe.runs for text in _methods(r) for n in _PLACEHOLDER.findall(text))
        if recipe.kind == BENCH and sorted(placeholders) != sorted(wanted):
            self.refuse(
                "needs and the placeholders of the methods differ", f"needs {placeholders}, placeholders {wanted}"
            )

    def _read_value(self, name: str) -> Any:
        return self.get_list(name, _LIST_TYPES[name]) if name in _LIST_TYPES else self.get_text(name)


def _fill_params(recipe: Recipe, params: Mapping[str, str]) -> Recipe:
    unknown = sorted(set(params) - set(recipe.params))
    if unknown:
        raise OptionError(
            f"The recipe {recipe.name} has no parameter {', '.join(map(repr, unknown))}",
            allowed=recipe.params or "no parameters",
        )
    for name, value in params.items():
        if not value or "," in value:  # a comma would end the option
            raise OptionError(
                f"The parameter {name} has an invalid value", got=repr(value), allowed="a text without commas"
            )
    runs = [
        replace(
            run,
            settings={**run.settings, "drafters": [_fill(text, params) for text in _methods(run)]},
            figures=[{**figure, "method": _fill(figure["method"], params)} for figure in run.figures],
        )
        for run in recipe.runs
    ]
    return replace(recipe, optional=tuple(_fill(text, params) for text in recipe.optional), runs=runs)


def _fill(text: str, params: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: params.get(match[1], match[0]), text)


def _list_obstacles(text: str) -> list[str]:
    """List why a method cannot run: unknown drafter or option, or an unfilled placeholder."""
    empty = _PLACEHOLDER.findall(text)
    reasons = [f"pass --param {name}=PATH, {_describe_placeholder(name)}" for name in empty]
    name, _ = parse_method(text)
    if name not in drafter_names():
        return [f"the drafter {name!r} does not exist in this version", *reasons]
    if not empty:
        try:
            parse_methods([text], DEFAULT_MEMORY, [1])
        except DraftwoodError as error:
            reasons.append(f"{text}: {error.what}" + (f", got {error.got}" if error.got is not None else ""))
    return reasons


def _describe_placeholder(place: str) -> str:
    if place.endswith("tree"):
        return "a static tree written by `draftwood tune`"
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
