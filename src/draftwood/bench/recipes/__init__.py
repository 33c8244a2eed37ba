"""Recipes: tables and figures of the papers as benchmark runs."""

from draftwood.bench.recipes.recipes import Recipe, load_recipe, recipe_names

__all__ = ["Recipe", "load_recipe", "recipe_names"]
