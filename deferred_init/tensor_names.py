"""Names of tensors for the policies whose values depend on names.

A name has to be the same whatever else the model holds. So it is the one under which a
tensor is registered, also where the inventory met it first in a plain attribute, as in
the graphs that the stages of `torch.distributed.pipelining.pipeline` keep.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from deferred_init.handlers.claims import Request
from deferred_init.slots import ModuleSite, Slot, SlotKind

__all__ = ["TensorNames", "canonical_name", "names_for"]

_REGISTERED = frozenset({SlotKind.PARAMETER, SlotKind.BUFFER})
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)


class TensorNames:
    """Canonical names of the tensors and modules of some models.

    Args:
        roots: The sites of the models.
    """

    def __init__(self, roots: Sequence[ModuleSite]) -> None:
        self._sites = [site for root in roots for site in root.post_order()]
        self._modules: dict[int, str] = {}
        for site in self._sites:
            if site.registered:
                self._modules[id(site.module)] = site.fqn
        if len(self._modules) < len(self._sites):
            for root in roots:
                for name, module in root.module.named_modules():
                    self._modules.setdefault(id(module), name)
        self._places: dict[int, Slot] | None = None

    def of(self, slot: Slot) -> str:
        """Return the name of the tensor of a slot, a registered one if it has any."""
        if not self._is_registered(slot):
            if self._places is None:
                self._places = {}
                for place in (slot for site in self._sites for slot in site.slots):
                    if self._is_registered(place):
                        self._places.setdefault(place.tensor_id, place)
            slot = self._places.get(slot.tensor_id, slot)
        owner = self.of_module(slot.owner, slot.owner_fqn)
        return canonical_name(f"{owner}.{slot.name}" if owner else slot.name)

    def of_module(self, module: nn.Module, fqn: str) -> str:
        """Return the name of a module: the registered one, or else that it is known by.

        Args:
            module: The module.
            fqn: How the inventory calls it.
        """
        return canonical_name(self._modules.get(id(module), fqn))

    def _is_registered(self, slot: Slot) -> bool:
        return slot.kind in _REGISTERED and id(slot.owner) in self._modules


def names_for(request: Request) -> TensorNames:
    """Return the names in the models of a call, which are looked up once."""
    return request.once(TensorNames, lambda: TensorNames(request.roots))


def canonical_name(fqn: str) -> str:
    """Return a name without the parts that wrappers and model lists add.

    >>> canonical_name("model[1].layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    parts = fqn.split(".")
    if _WRAPPERS.isdisjoint(parts) and not fqn.startswith("model["):
        return fqn
    if parts and parts[0].startswith("model[") and parts[0].endswith("]"):
        parts = parts[1:]
    return ".".join(part for part in parts if part not in _WRAPPERS)
