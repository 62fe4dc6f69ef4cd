"""Recipes in words, for the command line."""

from __future__ import annotations

from typing import Any

from deferred_init.recipe import Recipe

__all__ = ["explanation", "recipe_dict"]


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe is as plain data."""
    spec = recipe.te_recipe
    return {
        "name": recipe.name,
        "description": recipe.description,
        "te_recipe": None if spec is None else spec.name,
        "min_compute_capability": None if spec is None else spec.min_compute_capability,
        "toml": recipe.to_toml(),
    }


def explanation(recipe: Recipe) -> str:
    """Say what a recipe does, what it needs, and how it is written."""
    lines = [recipe.description, ""]
    spec = recipe.te_recipe
    if spec is None:
        lines.append("Computes in high precision; needs no particular hardware.")
    else:
        least = spec.min_compute_capability
        needs = "" if least is None else f", compute capability {least[0]}.{least[1]}+"
        stored = "quantized" if recipe.quantize_weights else "in high precision"
        lines.append(f"Computes with Transformer Engine's {spec.name}{needs}.")
        lines.append(f"Weights are stored {stored}.")
    for rule in recipe.init_rules:
        options = ", ".join(f"{key}={value}" for key, value in rule.options)
        scaled = f", times {rule.scale_by}" if rule.scale_by else ""
        rank = f" of {rule.min_ndim} or more dimensions" if rule.min_ndim else ""
        lines.append(f"{rule.match}{rank}: {rule.distribution}({options}){scaled}")
    return "\n".join([*lines, "", "As TOML:", "", recipe.to_toml().rstrip()])
