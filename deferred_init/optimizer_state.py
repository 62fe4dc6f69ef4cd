"""What optimizers make in their constructors, from parameters without memory.

[Note: Optimizers that are built early]
Most make their state in the first step, from parameters that have memory by then. Of
torch's, Adagrad makes it in its constructor: `sum`, filled with its group's
`initial_accumulator_value`, and `step`, 0. Transformer Engine's FusedAdam moves its
learning rate to where its parameters are, which loses the value; the optimizer's
default has it still. Its FusedSGD puts a flag of overflow there, which is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deferred_init.aliases import is_deferred

__all__ = ["Undo", "fill_optimizer_state", "optimizer_problems", "restorer"]

Undo = Callable[[Callable[[], None]], None]
_FLAGS = ("_dummy_overflow_buf",)


def optimizer_problems(optimizer: Optimizer, label: str) -> list[str]:
    """Name what an optimizer keeps without memory, and whose value nothing tells."""
    found: list[str] = []
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [
        f"{number}.{key}"
        for number, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor)
        and is_deferred(value)
        and not _is_constructor_state(optimizer, key)
    ]
    if stale:
        found.append(
            f"{label} has {len(stale)} deferred state tensors ({stale[:10]}), left "
            "by a step on a model without memory. Clear them with "
            "`optimizer.state.clear()`"
        )
    found += _lost_options(optimizer, label)
    return found + _lost_attributes(optimizer, label)


def fill_optimizer_state(optimizers: Sequence[Optimizer], on_undo: Undo) -> list[str]:
    """Make what optimizers created in their constructors, and nothing else.

    Args:
        optimizers: Built before their parameters had memory; changed in place.
        on_undo: Receives one action for every change.

    Returns:
        A description of everything that was made.
    """
    made: dict[str, None] = {}
    for optimizer in optimizers:
        for fill in (_fill_flags, _fill_options, _fill_state):
            made.update(dict.fromkeys(fill(optimizer, on_undo)))
    return list(made)


def _fill_flags(optimizer: Optimizer, on_undo: Undo) -> Iterator[str]:
    held = vars(optimizer)
    for name in _deferred_flags(optimizer):
        flag = held[name]
        on_undo(restorer(held, name, flag))
        device = optimizer.param_groups[0]["params"][0].device
        held[name] = torch.zeros(flag.shape, dtype=flag.dtype, device=device)
        yield f"{type(optimizer).__name__}.{name}"


def _fill_options(optimizer: Optimizer, on_undo: Undo) -> Iterator[str]:
    for group, name in _deferred_options(optimizer):
        on_undo(restorer(group, name, group[name]))
        value = torch.as_tensor(optimizer.defaults[name], dtype=group[name].dtype)
        group[name] = value.to(group["params"][0].device, copy=True)
        yield f"{type(optimizer).__name__}'s {name!r}, of its defaults"


def _fill_state(optimizer: Optimizer, on_undo: Undo) -> Iterator[str]:
    pairs = (
        (group, param) for group in optimizer.param_groups for param in group["params"]
    )
    for group, param in pairs:
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and is_deferred(value):
                on_undo(restorer(state, key, value))
                state[key] = _constructor_state(group, param, key, value)
                yield f"{type(optimizer).__name__}.state[...][{key!r}]"


def _deferred_options(optimizer: Optimizer) -> list[tuple[dict[str, Any], str]]:
    """Return options of groups, such as `lr`, that are tensors without memory."""
    return [
        (group, name)
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, Tensor) and is_deferred(value)
    ]


def _lost_options(optimizer: Optimizer, label: str) -> list[str]:
    """Name options without memory whose value nothing tells any more."""
    several = len(optimizer.param_groups) > 1
    lost = [
        name
        for _, name in _deferred_options(optimizer)
        if several or not _has_value(optimizer.defaults.get(name))
    ]
    if not lost:
        return []
    return [
        f"{label} has {len(lost)} options without memory ({lost[:10]}), moved to where "
        "the parameters are by its constructor, and each group may have had a value of "
        "its own. Set them again, as in `group['lr'] = torch.tensor(1e-3)`"
    ]


def _has_value(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not is_deferred(value)
    return isinstance(value, (int, float))


def _is_constructor_state(optimizer: Optimizer, key: str) -> bool:
    return isinstance(optimizer, torch.optim.Adagrad) and key in ("sum", "step")


def _constructor_state(
    group: dict[str, Any], param: Tensor, key: str, deferred: Tensor
) -> Tensor:
    if key == "step":
        device = param.device if group.get("fused") else torch.device("cpu")
        return torch.zeros((), dtype=deferred.dtype, device=device)
    start = float(group["initial_accumulator_value"])
    value = complex(start, start) if param.is_complex() else start
    return torch.full_like(param, value, memory_format=torch.preserve_format)


def _deferred_attributes(optimizer: Optimizer) -> list[str]:
    return [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, Tensor) and is_deferred(value)
    ]


def _deferred_flags(optimizer: Optimizer) -> list[str]:
    return [name for name in _deferred_attributes(optimizer) if name in _FLAGS]


def _lost_attributes(optimizer: Optimizer, label: str) -> list[str]:
    lost = [name for name in _deferred_attributes(optimizer) if name not in _FLAGS]
    if not lost:
        return []
    return [
        f"{label} has {len(lost)} attributes without memory ({lost[:10]}), made by its "
        "constructor where the parameters are. Build the optimizer after `materialize`"
    ]


def restorer(table: Any, key: Any, value: Any) -> Callable[[], None]:
    """Return an action that puts a value back into a table."""
    return lambda: table.__setitem__(key, value)
