"""The runs that a user asks for: one, or those of a recipe. Refused as a whole, before the first of them starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.bench.peers import explain_absence, find_peer
from draftwood.bench.recipes import Recipe, load_recipe
from draftwood.bench.records import MANIFEST, BenchSettings
from draftwood.bench.run.runner import RunSpec, prepare
from draftwood.errors import OptionError
from draftwood.progress import Progress


class BenchPlan(NamedTuple):
    requests: list[RunSpec]
    recipe: Recipe | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is something on disk to go on with."""
        return any((request.folder / MANIFEST).exists() for request in self.requests)


def make_plan(
    typed: Mapping[str, Any], out: Path, command: str, recipe: str | None = None, params: Sequence[str] = ()
) -> BenchPlan:
    """What is ``typed``, by the names of Settings, goes before what the recipe says; ``params`` are KEY=VALUE."""
    if recipe is None:
        if params:
            raise OptionError("A parameter is for a recipe", got=params[0], next_step="Add --recipe NAME.")
        return BenchPlan([RunSpec(settings=BenchSettings.from_dict(dict(typed)), folder=out, command=command)])
    found = load_recipe(recipe, dict(map(_pair, params)))
    found.check(typed)
    requests = [
        RunSpec(
            settings=found.settings_for(part, typed),
            folder=out / part.name if len(found.runs) > 1 else out,
            command=command,
            recipe=found.name,
            paper=found.figures_for(part, typed),
        )
        for part in found.runs
    ]
    return BenchPlan(requests, found)


def check_plan(plan: BenchPlan, progress: Progress | None = None) -> None:
    """What a run would refuse when it starts: the last of several may start hours after the first."""
    for request in plan.requests:
        prepare(request, progress)


def list_absent_peers(plan: BenchPlan) -> list[str]:
    """Why peers that were asked for will not run, as far as that can be told without the model."""
    names = dict.fromkeys(name for request in plan.requests for name in request.settings.peers)
    return [why for name in names if (why := explain_absence(find_peer(name))) is not None]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise OptionError("A parameter is a name and a value", got=repr(text), allowed="KEY=VALUE")
    return key.strip(), value
