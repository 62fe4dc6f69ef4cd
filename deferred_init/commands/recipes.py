"""`deferred-init recipes`: what comes with the package, and what it means."""

from __future__ import annotations

import argparse
from typing import Any, Final

from deferred_init.commands.arguments import RECIPE

__all__ = ["DESCRIPTION", "EXAMPLE", "add_options", "run"]

DESCRIPTION: Final = "list the recipes that come with the package, or explain one"
EXAMPLE: Final = "deferred-init recipes fp8_current+gpt2"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the recipe to explain."""
    parser.add_argument("recipe", nargs="?", help=RECIPE)


def run(arguments: argparse.Namespace) -> tuple[bool, Any, str]:
    """List all recipes, or explain one.

    Raises:
        PlanError: There is no such recipe, or its file is wrong.
    """
    from deferred_init.recipe import Recipe, preset_names
    from deferred_init.recipe_text import explanation, recipe_dict

    names = preset_names() if arguments.recipe is None else (arguments.recipe,)
    recipes = [Recipe.load(name) for name in names]
    if arguments.recipe is None:
        lines = [f"{recipe.name:<12} {recipe.description}" for recipe in recipes]
        end = "Join several with +; `deferred-init recipes NAME` explains one."
        said = "\n".join([*lines, "", end])
    else:
        said = explanation(recipes[0])
    return True, [recipe_dict(recipe) for recipe in recipes], said
