"""Which parameter stands where in an optimizer, by name, across a sharding.

`fully_shard` puts a new Parameter in the place of each old one. Names stay, but for
the prefixes of wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deferred_init.errors import PlanError, listing

__all__ = ["OptimizerNames", "plain"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper, or itself."""
    inner = getattr(optimizer, "optimizer", optimizer)
    result: Optimizer = inner
    return result


class OptimizerNames:
    """The names of the parameters that optimizers hold, taken before sharding.

    Args:
        models: They own the parameters.
        optimizers: They hold them.

    Raises:
        PlanError: An optimizer holds strangers, or has state that would be lost.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        names = {id(param): name for name, param in _named(models)}
        problems: list[str] = []
        self._groups: list[tuple[Optimizer, list[list[str]]]] = []
        for optimizer in optimizers:
            groups = [
                [names.get(id(p), "") for p in g["params"]]
                for g in optimizer.param_groups
            ]
            strangers = sum(not name for group in groups for name in group)
            if strangers:
                problems.append(
                    f"{type(optimizer).__name__} holds {strangers} parameters that "
                    "the model does not have: build it from `model.parameters()`"
                )
            if optimizer.state:
                held = [names.get(id(param), "?") for param in optimizer.state]
                problems.append(
                    f"{type(optimizer).__name__} has state for {listing(held)}, made "
                    "before the model was sharded: build the optimizer without state"
                )
            self._groups.append((optimizer, groups))
        if problems:
            raise PlanError("; ".join(problems), problems)

    def rebind(self, models: Sequence[nn.Module]) -> None:
        """Point the optimizers to the parameters that have the names now."""
        found = dict(_named(models))
        for optimizer, groups in self._groups:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [found[name] for name in names]


def _named(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{index}.{_canonical(name)}", param)
        for index, model in enumerate(models)
        for name, param in model.named_parameters(remove_duplicate=False)
    ]


def _canonical(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
