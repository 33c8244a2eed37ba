"""The runs of a command: one, or those of a recipe. All are validated before the first one starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.bench.peers import explain_absence, find_peer
from draftwood.bench.recipes import Recipe, load_recipe
from draftwood.bench.records import MANIFEST
from draftwood.bench.run.runner import RunSpec, prepare
from draftwood.bench.settings import BenchSettings
from draftwood.errors import OptionError
from draftwood.progress import Progress


class BenchPlan(NamedTuple):
    runs: list[RunSpec]
    recipe: Recipe | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a run on disk can be resumed."""
        return any((run.folder / MANIFEST).exists() for run in self.runs)


def make_plan(
    typed: Mapping[str, Any], out: Path, command: str, recipe: str | None = None, params: Sequence[str] = ()
) -> BenchPlan:
    """Plan the runs. ``typed`` settings override those of the recipe; ``params`` are ``KEY=VALUE``."""
    if recipe is None:
        if params:
            raise OptionError("--param needs a recipe", got=params[0], next_step="Add --recipe NAME.")
        return BenchPlan([RunSpec(settings=BenchSettings.from_dict(dict(typed)), folder=out, command=command)])
    found = load_recipe(recipe, dict(map(_parse_param, params)))
    found.check(typed)
    runs = [
        RunSpec(
            settings=found.settings_for(part, typed),
            folder=out / part.name if len(found.runs) > 1 else out,
            command=command,
            recipe=found.name,
            paper=found.figures_for(part, typed),
        )
        for part in found.runs
    ]
    return BenchPlan(runs, found)


def check_plan(plan: BenchPlan, progress: Progress | None = None) -> None:
    """Validate every run now: the last one may start hours after the first."""
    for run in plan.runs:
        prepare(run, progress)


def list_absent_peers(plan: BenchPlan) -> list[str]:
    """List why requested peers cannot run, as far as that is known without the model."""
    names = dict.fromkeys(name for run in plan.runs for name in run.settings.peers)
    return [why for name in names if (why := explain_absence(find_peer(name))) is not None]


def _parse_param(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError("A parameter must be a name and a value", got=repr(text), allowed="KEY=VALUE")
    return key.strip(), value
