"""Compares a subtree of a model with a second construction of the same model.

The second construction, the *twin*, is either on meta, to find out whether it comes
out the same, or on the device, to take its tensors over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.distributed.fsdp2 import unsharded_class, unsharded_type
from deferred_init.handlers.protocol import Workspace
from deferred_init.reparametrized import is_parametrized, original_type
from deferred_init.slots import ModuleSite, Slot, SlotKind

__all__ = ["difference", "matching_modules", "matching_slots", "tie_again"]

_REGISTERED = (SlotKind.PARAMETER, SlotKind.BUFFER)


def difference(
    site: ModuleSite, twin: ModuleSite, *, dtypes: bool = True
) -> str | None:
    """Say in what a twin differs from the model in structure, or None.

    Compared are the modules (names, order, types), the parameters and buffers
    (names, order, class, sizes, strides, dtype, persistence) and that those which share
    storage share it in the twin; not values, devices or `requires_grad`. A tie that
    only the twin has is no difference: `model.to("meta")` loses ties.

    Args:
        site: The subtree.
        twin: The site of the second construction of its root.
        dtypes: Whether dtypes have to agree as well.
    """
    ours, theirs = list(site.post_order()), list(twin.post_order())
    if len(ours) != len(theirs):
        return "the number of modules"
    pairs: list[tuple[Slot, Slot]] = []
    for one, other in zip(ours, theirs, strict=True):
        if _strip(site.fqn, one.fqn) != other.fqn or not _are_alike(one, other):
            return f"module `{one.fqn}`"
        mine, its = _registered(one), _registered(other)
        if len(mine) != len(its):
            return f"the number of parameters and buffers of `{one.fqn}`"
        pairs += zip(mine, its, strict=True)
    for left, right in pairs:
        if (
            left.name != right.name
            or left.kind is not right.kind
            or left.persistent != right.persistent
        ):
            return f"`{left.fqn}`"
        if _geometry(left.tensor, dtypes) != _geometry(right.tensor, dtypes):
            return f"the geometry of `{left.fqn}`"
    groups = _sharing(left for left, _ in pairs)
    wider = _sharing(right for _, right in pairs)
    for index, (left, _) in enumerate(pairs):
        if wider[index] != wider[groups[index]]:
            return f"with what `{left.fqn}` shares memory"
    return None


def matching_slots(
    site: ModuleSite, slots: Iterable[Slot], twin: ModuleSite
) -> list[tuple[Slot, Tensor]]:
    """Pair slots of the subtree with the tensors in the same places of a twin.

    Slots that the twin does not have, such as attributes that a user added, are left
    out.
    """
    prefix = site.fqn
    theirs = {
        (slot.fqn, slot.kind): slot.tensor
        for other in twin.post_order()
        for slot in other.slots
    }
    pairs = []
    for slot in slots:
        tensor = theirs.get((_strip(prefix, slot.fqn), slot.kind))
        if tensor is not None and (
            slot.kind in _REGISTERED
            or _geometry(slot.tensor, False) == _geometry(tensor, False)
        ):
            pairs.append((slot, tensor))
    return pairs


def matching_modules(
    site: ModuleSite, twin: ModuleSite
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Pair the modules of the subtree with those of a twin of equal structure."""
    for one, other in zip(site.post_order(), twin.post_order(), strict=True):
        yield one.module, other.module


def tie_again(slot: Slot, keeper: Slot, workspace: Workspace) -> None:
    """Put the tensor object of one slot into another, with the attributes of both."""
    kept = keeper.read()
    added = {k: v for k, v in vars(slot.read()).items() if k not in vars(kept)}
    vars(kept).update(added)
    workspace.on_undo(lambda: [vars(kept).pop(key, None) for key in added])
    workspace.rebind([slot], kept)
    workspace.note(f"tied `{slot.fqn}` to `{keeper.fqn}` again")


def _are_alike(one: ModuleSite, other: ModuleSite) -> bool:
    """Whether two modules have the same class, and are parametrized both or neither."""
    return type(one.module) is type(other.module) or (
        _module_type(one.module) == _module_type(other.module)
    )


def _module_type(module: nn.Module) -> tuple[type, bool]:
    """The class; of a parametrized or sharded module the one before that."""
    if is_parametrized(module):
        return original_type(module), True
    return unsharded_type(module), False


def _registered(site: ModuleSite) -> list[Slot]:
    return [slot for slot in site.slots if slot.kind in _REGISTERED]


def _geometry(tensor: Tensor, dtypes: bool) -> tuple[object, ...]:
    kind = tensor.dtype if dtypes else tensor.dtype.is_floating_point
    return unsharded_class(tensor), tensor.size(), tensor.stride(), kind


def _sharing(slots: Iterable[Slot]) -> list[int]:
    """For each slot, the index of the first one over the same storage."""
    first: dict[int, int] = {}
    found = []
    for index, slot in enumerate(slots):
        key = storage_key(slot.tensor) if slot.tensor.numel() else None
        found.append(index if key is None else first.setdefault(key, index))
    return found


def _strip(prefix: str, fqn: str) -> str:
    return fqn[len(prefix) :].lstrip(".") if prefix else fqn
