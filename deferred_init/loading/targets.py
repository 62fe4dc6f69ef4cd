"""The tensors of a model that a checkpoint may fill, and the names they go by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deferred_init.handlers.protocol import Request
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.target_dtype import final_dtype
from deferred_init.tensor_names import canonical_name

__all__ = ["Target", "find_targets"]

_LABEL = re.compile(r"model\[\d+\]\.?")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """One tensor object that `state_dict()` would save.

    Attributes:
        slot: Its first slot that is saved.
        names: Everything that it may be stored as: all its slots (ties), all names of
            modules that are registered twice, with and without wrappers' parts.
        shape: Its sizes; of a DTensor those of the whole.
        dtype: What it ends with.
    """

    slot: Slot
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name that errors use."""
        return self.names[0]


def find_targets(inventory: Inventory, request: Request) -> list[Target]:
    """List the tensors that a checkpoint may fill, deferred or not, in order."""
    modules = _module_names(site.module for site in inventory.roots)
    saved: dict[int, list[Slot]] = {}
    for slot in inventory.slots:
        kinds = (SlotKind.PARAMETER, SlotKind.BUFFER)
        if slot.kind in kinds and slot.persistent and id(slot.owner) in modules:
            saved.setdefault(slot.tensor_id, []).append(slot)
    return [
        Target(
            slot=slots[0],
            names=tuple(dict.fromkeys(_names(slots, modules))),
            shape=tuple(slots[0].tensor.shape),
            dtype=final_dtype(slots[0], request),
        )
        for slots in saved.values()
    ]


def _module_names(roots: Iterable[nn.Module]) -> dict[int, list[str]]:
    """Return every name of every registered module, by the module's id."""
    found: dict[int, list[str]] = {}
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            found.setdefault(id(module), []).append(name)
    return found


def _names(slots: list[Slot], modules: dict[int, list[str]]) -> Iterator[str]:
    plain = []
    for slot in slots:
        own = _LABEL.sub("", slot.owner_fqn, count=1)
        for owner in dict.fromkeys([own, *modules[id(slot.owner)]]):
            name = f"{owner}.{slot.name}" if owner else slot.name
            plain.append(name)
            yield name
    for name in plain:
        yield canonical_name(name)
