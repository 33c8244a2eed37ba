"""``draftwood bench recipes``: lists tables and figures of papers, and prints notes when one runs."""

import argparse
from dataclasses import asdict
from typing import Any

from draftwood.bench.recipes import Recipe, list_recipes, load_recipe
from draftwood.cli.bench.tables import print_note, prose_table
from draftwood.cli.console import Screen, pluralize, show


def run(args: argparse.Namespace) -> int:
    paint = Screen(args.color).out
    if args.recipe:
        recipe = load_recipe(args.recipe)
        content = {**asdict(recipe), "params": recipe.params, "missing": recipe.list_missing()}
        return show(args, content, prose_table(paint, _describe(recipe)))
    recipes = [load_recipe(name) for name in list_recipes()]
    brief = ("name", "paper", "item", "title", "kind", "needs")
    rows = [(one.name, f"{one.paper}, {one.item}", _format_title(one)) for one in recipes]
    return show(
        args, {"recipes": [{key: getattr(one, key) for key in brief} for one in recipes]}, prose_table(paint, rows)
    )


def introduce(screen: Screen, recipe: Recipe | None) -> None:
    """Print what the recipe shows, the recommended machine, and skipped methods."""
    if recipe is not None:
        print_note(screen, f"{recipe.name}: {recipe.paper}, {recipe.item}: {recipe.title}")
        for text in filter(None, (recipe.what, recipe.hardware, *recipe.list_skipped())):
            print_note(screen, text, "  ")


def conclude(screen: Screen, recipe: Recipe | None) -> None:
    """Print the further steps to obtain the paper's figure."""
    if recipe is not None and recipe.then:
        print_note(screen, "To obtain the paper's figure:")
        print_note(screen, recipe.then, "  ")


def _format_title(recipe: Recipe) -> str:
    needs = [*recipe.needs, *(["another command"] if recipe.command else [])]
    return recipe.title + (f" (needs {', '.join(needs)})" if needs else "")


def _describe(recipe: Recipe) -> list[tuple[str, str]]:
    figures = sum(len(run.figures) for run in recipe.runs)
    params = "".join(f" --param {name}=PATH" for name in recipe.params)
    rows = [
        (recipe.name, f"{recipe.paper}, {recipe.item}: {recipe.title}"),
        ("what", recipe.what),
        ("machine", recipe.hardware),
        ("needs", ", ".join(recipe.needs)),
        ("optional", ", ".join(recipe.optional)),
        *((f"run {run.name}", _format_settings(run.settings)) for run in recipe.runs),
        ("figures", f"{pluralize(figures, 'figure')} of the paper for comparison" if figures else ""),
        ("claims", f"{', '.join(map(str, recipe.claims))} in docs/reproduction.md" if recipe.claims else ""),
        ("then", recipe.then),
        ("missing", "; ".join(recipe.list_missing())),
        ("command", recipe.command or f"draftwood bench --recipe {recipe.name} --data hub{params}"),
    ]
    return [(name, " ".join(text.split())) for name, text in rows if text]


def _format_settings(settings: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in settings.items()
    )
