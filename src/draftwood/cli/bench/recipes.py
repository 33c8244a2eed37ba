"""``draftwood bench recipes``: tables and figures of papers that can be run, and what is said when one is."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftwood.cli.bench.tables import print_note, prose_table
from draftwood.cli.console import Screen, Subparsers, add_command, counted, show

if TYPE_CHECKING:
    from draftwood.bench.recipes import Recipe


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "recipes",
        run,
        "List the recipes: tables and figures of papers; or show one in full",
        "draftwood bench recipes",
        "draftwood bench recipes goose-table1",
        "draftwood bench --recipe goose-table1 --data hub --limit 3",
    )
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="this one in full; also the path of a .toml file")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    from draftwood.bench.recipes import list_recipes, load_recipe

    paint = Screen(args.color).out
    if args.recipe:
        recipe = load_recipe(args.recipe)
        content = {**asdict(recipe), "params": recipe.params, "missing": recipe.list_missing()}
        return show(args, content, prose_table(paint, _in_full(recipe)))
    recipes = [load_recipe(name) for name in list_recipes()]
    brief = ("name", "paper", "item", "title", "kind", "needs")
    rows = [(one.name, f"{one.paper}, {one.item}", _title(one)) for one in recipes]
    return show(
        args, {"recipes": [{key: getattr(one, key) for key in brief} for one in recipes]}, prose_table(paint, rows)
    )


def introduce(screen: Screen, recipe: Recipe | None) -> None:
    """Before it runs: what it shows, what machine it is for, and which methods stay away."""
    if recipe is not None:
        print_note(screen, f"{recipe.name}: {recipe.paper}, {recipe.item}: {recipe.title}")
        for text in filter(None, (recipe.what, recipe.hardware, *recipe.list_skipped())):
            print_note(screen, text, "  ")


def conclude(screen: Screen, recipe: Recipe | None) -> None:
    """After it ran: what turns the figures into those of the paper."""
    if recipe is not None and recipe.then:
        print_note(screen, "What is left to do for the paper's figure:")
        print_note(screen, recipe.then, "  ")


def _title(recipe: Recipe) -> str:
    needs = [*recipe.needs, *(["another command"] if recipe.command else [])]
    return recipe.title + (f" (needs {', '.join(needs)})" if needs else "")


def _in_full(recipe: Recipe) -> list[tuple[str, str]]:
    figures = sum(len(run.figures) for run in recipe.runs)
    params = "".join(f" --param {name}=PATH" for name in recipe.params)
    rows = [
        (recipe.name, f"{recipe.paper}, {recipe.item}: {recipe.title}"),
        ("what", recipe.what),
        ("machine", recipe.hardware),
        ("needs", ", ".join(recipe.needs)),
        ("where given", ", ".join(recipe.optional)),
        *((f"run {run.name}", _settings(run.settings)) for run in recipe.runs),
        ("figures", f"{counted(figures, 'figure')} of the paper stand beside ours" if figures else ""),
        ("claims", f"{', '.join(map(str, recipe.claims))} of docs/reproduction.md" if recipe.claims else ""),
        ("afterwards", recipe.then),
        ("in the way", "; ".join(recipe.list_missing())),
        ("command", recipe.command or f"draftwood bench --recipe {recipe.name} --data hub{params}"),
    ]
    return [(name, " ".join(text.split())) for name, text in rows if text]


def _settings(settings: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in settings.items()
    )
