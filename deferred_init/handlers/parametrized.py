"""Initializer for parametrized modules and for the older weight and spectral norm.

[Note: Parametrize again]
Problem: a parametrized module has tensors in place of its weight (`original0`, the
singular vectors `_u` and `_v`, `base`) whose values were computed from the weight,
some with random numbers, when the parametrization was registered.

Naive attempt: run `right_inverse` on a fresh weight. It does not make `_u` and `_v`,
and registration draws and iterates more than `right_inverse` does.

Design: a *plain* stand-in of the original class, with a weight again, is initialized
by the class's own method; then the parametrization is registered on it by torch's own
function, with the arguments that the parametrization keeps. The tensors that come
out are taken over, one by one.

Shortcoming: a parametrization of a user's own that holds tensors is refused, since
how it was constructed cannot be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deferred_init.aliases import dense_bytes
from deferred_init.constructor_names import init_methods
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer, construction_order
from deferred_init.parametrize_again import (
    NotKnown,
    again,
    hook_slots,
    parametrized_tensors,
    plain_stand_in,
    restored,
    take_missing_buffers,
)
from deferred_init.reparametrized import (
    is_parametrized,
    is_reparametrized,
    norm_hooks,
    original_type,
)
from deferred_init.slots import ModuleSite, Slot, SlotKind

__all__ = ["Parametrized"]

_TORCH_METHODS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """How a module is made: the method of the plain class, and who takes what.

    Attributes:
        method: The init method of the original class.
        targets: For each slot, its place below the parametrized module.
    """

    method: str
    targets: tuple[tuple[Slot, str], ...]


class Parametrized:
    """Initializes the original class, then registers the parametrizations again."""

    name = "parametrized"
    composite = True

    def __init__(self) -> None:
        self._recipes: WeakKeyDictionary[nn.Module, _Recipe] = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim the tensors of the module and of its parametrizations."""
        module = site.module
        if not is_reparametrized(module) or construction_order(module) is not None:
            return None  # nothing of it, or a recording knows better
        targets = tuple(_targets(site))
        if not targets or not all(_is_plain(slot.tensor) for slot, _ in targets):
            return None
        kind = original_type(module)
        method = _method(kind)
        slots = tuple(slot for slot, _ in targets)
        if any(not slot.deferred for slot in slots):
            left = [slot.fqn for slot in slots if slot.deferred]
            return _problem(site, slots, f"only a part of it is loaded; not {left}")
        if method is None:
            return _problem(site, slots, f"`{kind.__name__}` has no `reset_parameters`")
        try:
            _dry_run(module, method)
        except NotKnown as error:
            return _problem(site, slots, str(error))
        except Exception as error:  # noqa: BLE001 - any code may run in there
            return _problem(site, slots, f"{type(error).__name__}: {error}")
        self._recipes[module] = _Recipe(method=method, targets=targets)
        names = ", ".join(parametrized_tensors(module))
        return Claim(
            slots=slots,
            source=f"{kind.__name__}.{method}, {names}",
            assumptions=(
                f"the parametrizations of {kind.__name__} modules were registered "
                "right after their construction",
            ),
            scratch_bytes=sum(dense_bytes(s.tensor) for s in slots),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Make a plain module on the device, parametrize it, take its tensors."""
        module = step.site.module
        recipe = self._recipes[module]
        plain = plain_stand_in(module, workspace.request.device)
        getattr(plain, recipe.method)()
        again(module, plain)
        late = []
        for slot, place in recipe.targets:
            if slot.container is vars(module):
                late.append(slot)
            else:
                _take(workspace, slot, _at(plain, place))
        take_missing_buffers(module, plain)
        # What a hook computed refers to the module's own parameters.
        for slot in late:
            workspace.adopt(slot, restored(module, slot.name))


def _take(workspace: Workspace, slot: Slot, made: Tensor) -> None:
    """Take a tensor over; by its values where others share the memory of the slot."""
    if not workspace.shares_memory(slot):
        workspace.adopt(slot, _as_before(slot, made))
        return
    workspace.allocate((slot,))
    with torch.no_grad():
        slot.read().copy_(made)


def _dry_run(module: nn.Module, method: str) -> None:
    """See on meta that all of it works; random numbers are not drawn there."""
    plain = plain_stand_in(module, torch.device("meta"))
    getattr(plain, method)()
    for name in parametrized_tensors(module):
        getattr(plain, name)
    again(module, plain, check_only=True)


def _method(kind: type[nn.Module]) -> str | None:
    """Return the init method of the class: torch's own or a user's."""
    names, _ = init_methods(kind)
    if names:
        return names[0]
    return next((name for name in _TORCH_METHODS if hasattr(kind, name)), None)


def _targets(site: ModuleSite) -> Iterator[tuple[Slot, str]]:
    """Yield the slots that are made, with their places below the module."""
    module = site.module
    computed = hook_slots(module)
    for slot in site.slots:
        attribute = slot.container is vars(module) and slot.name not in computed
        if slot.owner is module and not attribute and not _is_carried(slot):
            yield slot, slot.name
    if not is_parametrized(module):
        return
    prefix = f"{site.fqn}." if site.fqn else ""
    tables = (c for c in site.children if c.module is module.parametrizations)
    sites = (below for table in tables for below in table.post_order())
    for slot in (slot for one in sites for slot in one.slots):
        if not _is_carried(slot):
            yield slot, slot.fqn[len(prefix) :]


def _is_carried(slot: Slot) -> bool:
    """Whether a parameter carries it, which somebody else has put there."""
    return slot.kind is SlotKind.TENSOR_ATTRIBUTE


def _at(module: nn.Module, place: str) -> Tensor:
    found: object = module
    for name in place.split("."):
        found = getattr(found, name)
    assert isinstance(found, Tensor)
    return found


def _as_before(slot: Slot, made: Tensor) -> Tensor:
    """Return a tensor of the geometry that the model was built with.

    Only what meta has no kernel for, `orthogonal` without trivialization, differs.
    """
    geometry = slot.tensor.size(), slot.tensor.stride()
    if (made.size(), made.stride()) == geometry:
        return made
    copied = torch.empty_strided(*geometry, dtype=made.dtype, device=made.device)
    copied.copy_(made.detach())
    return nn.Parameter(copied) if isinstance(made, nn.Parameter) else copied


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _problem(site: ModuleSite, slots: tuple[Slot, ...], why: str) -> Claim:
    kind = original_type(site.module).__name__
    what = "hooks" if norm_hooks(site.module) else "parametrizations"
    return Claim(
        slots=tuple(slot for slot in slots if slot.deferred),
        problems=(
            f"`{site.fqn or kind}` (`{kind}`) has {what} whose tensors cannot be "
            f"made: {why}. Register them after `materialize`, or build the model "
            "inside `deferred_init(...)`",
        ),
    )


add_initializer(Parametrized(), first=True)
