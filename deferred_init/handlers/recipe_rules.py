"""Initializer for the name patterns of a recipe.

What it makes is defined by eager code: construct the model, then fill every parameter
that a rule matches, in the order of `named_parameters()`; that is `apply_init_rules`.
Parameters that no module knows how to fill are made by their rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deferred_init.handlers.protocol import LAST, Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.init_rules import InitRule
from deferred_init.init_sizes import InitSizes
from deferred_init.recipe import Recipe
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.target_dtype import final_dtype

__all__ = ["RecipeRules", "apply_init_rules"]

# The names of roots: one model has none, several are numbered.
_ROOT = re.compile(r"(model\[\d+\])?")


class RecipeRules:
    """Fills parameters by the rules of the request's recipe, after all others."""

    name = "recipe rules"
    only_uses_torch = True
    composite = True

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim every deferred parameter of a root that a rule matches."""
        recipe: Recipe | None = request.recipe
        if recipe is None or not recipe.init_rules or not _ROOT.fullmatch(site.fqn):
            return None
        deferred = {
            slot.tensor_id: slot
            for below in site.post_order()
            for slot in below.slots
            if slot.kind is SlotKind.PARAMETER and slot.deferred
        }
        matches = [
            match
            for match in _matches(site.module, recipe)
            if id(match.parameter) in deferred
        ]
        if not matches:
            return None
        slots = [deferred[id(match.parameter)] for match in matches]
        return Claim(
            slots=tuple(slots),
            source=f"recipe {recipe.name}",
            problems=_missing_sizes(
                site.module, recipe, (match.rule for match in matches)
            ),
            scratch_bytes=sum(_cast_bytes(slot, request) for slot in slots),
            order=LAST,  # after recorded construction too
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Fill what was claimed, in the order of `named_parameters()`."""
        recipe: Recipe = workspace.request.recipe
        claim, model = step.claim, step.site.module
        with workspace.whole(step):
            mine = {id(slot.read()) for slot in (*claim.slots, *claim.rewrites)}
            _fill(_sizes(model, recipe), _matches(model, recipe), mine)


def apply_init_rules(model: nn.Module, recipe: Recipe) -> None:
    """Fill the parameters of a real model by a recipe's rules.

    This is the eager code that `materialize` with the same recipe agrees with, bit for
    bit. The row of an embedding that is its padding is set to zero.

    Args:
        model: A model with memory; changed in place.
        recipe: Its `init_rules` and `init_sizes` count.

    Raises:
        ValueError: A rule needs a size that neither the recipe nor `model.config` has.
    """
    everything = {id(parameter) for parameter in model.parameters()}
    _fill(_sizes(model, recipe), _matches(model, recipe), everything)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    fqn: str
    owner: nn.Module
    parameter: nn.Parameter
    rule: InitRule


def _matches(model: nn.Module, recipe: Recipe) -> Iterator[_Match]:
    """Yield the parameters that a rule matches, once each, in eager order."""
    for fqn, parameter in model.named_parameters():
        rule = recipe.rule_for(fqn, parameter.ndim)
        if rule is not None:
            owner = model.get_submodule(fqn.rpartition(".")[0])
            yield _Match(fqn=fqn, owner=owner, parameter=parameter, rule=rule)


def _fill(sizes: InitSizes, matches: Iterable[_Match], wanted: set[int]) -> None:
    for match in matches:
        if id(match.parameter) not in wanted:
            continue
        match.rule.initializer(sizes)(match.parameter)
        padding: int | None = getattr(match.owner, "padding_idx", None)
        if padding is not None and match.fqn.endswith("weight"):
            with torch.no_grad():
                match.parameter[padding].zero_()


def _sizes(model: nn.Module, recipe: Recipe) -> InitSizes:
    return recipe.init_sizes.over(InitSizes.of(model))


def _missing_sizes(
    model: nn.Module, recipe: Recipe, rules: Iterable[InitRule]
) -> tuple[str, ...]:
    sizes = _sizes(model, recipe)
    problems = []
    for rule in dict.fromkeys(rules):
        try:
            rule.initializer(sizes)
        except ValueError as error:
            problems.append(f"recipe `{recipe.name}`: {error}")
    return tuple(problems)


def _cast_bytes(slot: Slot, request: Request) -> int:
    """Bytes that a tensor holds in excess until the rules have written it."""
    tensor = slot.tensor
    final = final_dtype(slot, request)
    return tensor.numel() * max(0, tensor.element_size() - final.itemsize)


add_initializer(RecipeRules(), last=True)
