"""Recipes: tables and figures of papers as benchmark runs."""

from draftwood.bench.recipes.recipe import Recipe, list_recipes, load_recipe
