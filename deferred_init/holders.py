"""Who else holds parameters: optimizers, EMA copies, lists, closures.

Holders that keep Parameter *objects* need nothing, since the objects stay the same.
This module serves the rest: it checks optimizers before the work, and points every
holder that can be found to the new object where a swap was impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deferred_init.aliases import is_deferred
from deferred_init.optimizer_state import Undo, optimizer_problems, restorer
from deferred_init.slots import Inventory

__all__ = ["check_holders", "rebind_holders"]

Replaced = Mapping[int, tuple[Tensor, Tensor]]
_MAX_DEPTH = 8


def check_holders(
    inventory: Inventory, optimizers: Sequence[Optimizer], *, complete: bool = True
) -> list[str]:
    """Find optimizers that cannot become right; one problem text each."""
    problems: list[str] = []
    owned = {slot.tensor_id for slot in inventory.slots}
    for index, optimizer in enumerate(optimizers):
        label = f"optimizers[{index}] ({type(optimizer).__name__})"
        params = list(_params(optimizer))
        if params and not any(id(param) in owned for param in params):
            problems.append(
                f"{label} shares no parameter with the model: expected its "
                f"{len(params)} parameters among the model's, found none. Build it "
                "from `model.parameters()` of this very model"
            )
            continue
        strangers = [
            number
            for number, param in enumerate(params)
            if is_deferred(param) and id(param) not in owned
        ]
        if strangers and complete:
            problems.append(
                f"{label} holds {len(strangers)} deferred parameters that the model "
                f"does not have (numbers {strangers[:10]}); nothing would make them. "
                "Pass their model as well, in a list"
            )
        problems += optimizer_problems(optimizer, label)
    return problems


def rebind_holders(
    replaced: Replaced,
    optimizers: Sequence[Optimizer],
    holders: Iterable[Any],
    on_undo: Undo,
) -> list[str]:
    """Point optimizers and holders from replaced tensors to the new objects.

    Args:
        replaced: `id(old)` to `(old, new)`.
        optimizers: Their groups and their state keys are changed in place.
        holders: Lists, dicts (also their keys), modules, objects with attributes,
            functions with closures; walked to a depth of 8.
        on_undo: Receives one action for every change.

    Returns:
        A description of every place that was changed.

    Raises:
        TypeError: If an immutable container holds a replaced tensor.
    """
    if not replaced:
        return []
    changed: list[str] = []
    for index, optimizer in enumerate(optimizers):
        changed += _rebind_optimizer(replaced, optimizer, index, on_undo)
    walk = _HolderWalk(replaced, on_undo)
    for index, holder in enumerate(holders):
        walk.visit(holder, f"holders[{index}]", 0)
    return changed + walk.changed


def _rebind_optimizer(
    replaced: Replaced, optimizer: Optimizer, index: int, on_undo: Undo
) -> list[str]:
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        for position, param in reversed(list(enumerate(params))):
            if id(param) not in replaced:
                continue
            new = replaced[id(param)][1]
            on_undo(_list_restorer(params))
            # Several may have become one, which must not be stepped twice.
            params[position] = new
            if _is_elsewhere(new, optimizer, params, position):
                del params[position]
            if param in optimizer.state:
                state = optimizer.state[param]
                # First how to undo it: an interrupt may come between two lines.
                on_undo(_state_restorer(optimizer, param, new, state))
                del optimizer.state[param]
                optimizer.state[new] = state
            changed.append(f"optimizers[{index}].param_groups[{number}][{position}]")
    return changed


class _HolderWalk:
    def __init__(self, replaced: Replaced, on_undo: Undo) -> None:
        self.changed: list[str] = []
        self._replaced = replaced
        self._on_undo = on_undo
        self._seen: set[int] = set()

    def visit(self, holder: Any, name: str, depth: int) -> None:
        if depth > _MAX_DEPTH or id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        if isinstance(holder, nn.Module):
            for label, module in holder.named_modules():
                for table in (module._parameters, module._buffers, vars(module)):
                    self._items(table, f"{name}.{label}" if label else name, depth)
        elif isinstance(holder, (MutableMapping, list, tuple)):
            self._items(holder, name, depth)
        elif callable(holder) and getattr(holder, "__closure__", None):
            for cell in holder.__closure__:
                self._cell(cell, f"{name}.__closure__", depth)
        elif isinstance(getattr(holder, "__dict__", None), dict):
            self._items(vars(holder), name, depth)

    def _items(self, table: Any, name: str, depth: int) -> None:
        mapping = isinstance(table, Mapping)
        if mapping:
            self._keys(table, name, depth)
        pairs = list(table.items()) if mapping else list(enumerate(table))
        for key, value in pairs:
            label = f"{name}[{key!r}]"
            if not isinstance(value, Tensor):
                self.visit(value, label, depth + 1)
            elif id(value) in self._replaced:
                if isinstance(table, tuple):
                    raise TypeError(
                        f"`{label}` is an item of a tuple and its tensor had to be "
                        "replaced; hold it in a list"
                    )
                self._on_undo(restorer(table, key, value))
                table[key] = self._replaced[id(value)][1]
                self.changed.append(label)

    def _keys(self, table: Any, name: str, depth: int) -> None:
        keys = [key for key in table if type(key) is not str]
        for key in keys:
            if not isinstance(key, Tensor):
                self.visit(key, f"{name}.keys()", depth + 1)
        if any(id(key) in self._replaced for key in keys):
            entries = list(table.items())
            self._on_undo(lambda: _refill(table, entries))
            _refill(table, [(self._current(key), value) for key, value in entries])
            self.changed.append(f"{name}.keys()")

    def _current(self, key: Any) -> Any:
        old_and_new = self._replaced.get(id(key))
        return key if old_and_new is None else old_and_new[1]

    def _cell(self, cell: Any, name: str, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            return
        if isinstance(value, Tensor) and id(value) in self._replaced:
            old, new = self._replaced[id(value)]
            self._on_undo(lambda: setattr(cell, "cell_contents", old))
            cell.cell_contents = new
            self.changed.append(name)
        elif not isinstance(value, Tensor):
            self.visit(value, name, depth + 1)


def _refill(table: Any, entries: Iterable[tuple[Any, Any]]) -> None:
    """Give a mapping other entries, in their order."""
    table.clear()
    table.update(entries)


def _params(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_elsewhere(
    new: Tensor, optimizer: Optimizer, params: Any, position: int
) -> bool:
    """Whether an optimizer holds a tensor at another place than this one."""
    return any(
        param is new and not (group["params"] is params and index == position)
        for group in optimizer.param_groups
        for index, param in enumerate(group["params"])
    )


def _list_restorer(params: list[Tensor]) -> Callable[[], None]:
    saved = list(params)

    def restore() -> None:
        params[:] = saved

    return restore


def _state_restorer(
    optimizer: Optimizer, old: Tensor, new: Tensor, state: Any
) -> Callable[[], None]:
    def restore() -> None:
        optimizer.state.pop(new, None)
        optimizer.state[old] = state

    return restore
