"""Slots: places that hold a tensor, and the inventory of all of them.

A *slot* is a place (an owner and a key), not a tensor: a tied weight has one
tensor and two slots, and the inventory keeps both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from deferred_init.aliases import StorageGroup, is_deferred
from deferred_init.small_values import small_value

__all__ = ["Inventory", "ModuleSite", "Slot", "SlotKind", "set_aside"]


class SlotKind(enum.Enum):
    """How a slot is held; decides who must be able to fill it and how it is saved."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    """A plain attribute of a module, or an item of a container in one."""
    TENSOR_ATTRIBUTE = "attribute of a tensor"
    """A tensor that another tensor carries, such as `weight.main_grad`."""


@small_value
class Slot:
    """One place that holds a tensor.

    Attributes:
        owner: The module that the place belongs to.
        owner_fqn: The owner's qualified name, `""` for a root.
        name: The place within the owner: `weight`, or `tables['a'][0]`.
        kind: How it is held.
        persistent: Whether `state_dict()` saves it.
        container: The object that is indexed or whose attribute is read.
        key: Index, mapping key or attribute name in `container`.
        tensor: The tensor found there when the inventory was taken.
        tensor_id: Its `id`, see [Note: Asking for an id] in `inventory.py`.
    """

    owner: nn.Module
    owner_fqn: str
    name: str
    kind: SlotKind
    persistent: bool
    container: Any
    key: Any
    tensor: Tensor
    tensor_id: int

    @property
    def fqn(self) -> str:
        """Fully qualified name of the slot, as errors and reports print it."""
        return f"{self.owner_fqn}.{self.name}" if self.owner_fqn else self.name

    @property
    def deferred(self) -> bool:
        """Whether the tensor has no memory."""
        return is_deferred(self.tensor)

    def read(self) -> Any:
        """Return what the place holds now."""
        if type(self.container) is dict or isinstance(
            self.container, (Mapping, Sequence)
        ):
            return self.container[self.key]
        return vars(self.container)[self.key]

    def write(self, tensor: Tensor) -> None:
        """Put another tensor into the place.

        Raises:
            TypeError: If the place is an item of a tuple or another immutable
                container.
        """
        if type(self.container) is dict or isinstance(
            self.container, (MutableMapping, list)
        ):
            self.container[self.key] = tensor
        elif isinstance(self.container, (Mapping, Sequence)):
            raise TypeError(
                f"`{self.fqn}` is an item of an immutable container and cannot be "
                "replaced; hold it in a list or a dict"
            )
        else:
            vars(self.container)[self.key] = tensor

    def describe(self) -> str:
        """Name, kind and owner's class: `rope.inv_freq` (buffer of `Rotary`)."""
        return f"`{self.fqn}` ({self.kind.value} of `{type(self.owner).__name__}`)"


@small_value
class ModuleSite:
    """One module of the tree, once, with the slots that it owns itself.

    Attributes:
        module: The module.
        fqn: Its first qualified name.
        registered: False for a module found only in a plain list, dict or object.
        slots: Its own slots, in order: parameters, buffers, attributes.
        children: The sites directly below, in order of registration.
    """

    module: nn.Module
    fqn: str
    registered: bool
    slots: tuple[Slot, ...]
    children: tuple[ModuleSite, ...]

    @property
    def title(self) -> str:
        """Its qualified name; of a root, which has none, its class."""
        return self.fqn or type(self.module).__name__

    def describe(self) -> str:
        """Name and class: `blocks.0.norm` (LayerNorm)."""
        return f"`{self.title}` ({type(self.module).__name__})"

    def post_order(self) -> Iterator[ModuleSite]:
        """Yield the sites below, children first, then this one.

        Iterative, so that a chain of thousands of modules does not hit the
        recursion limit.
        """
        stack: list[tuple[ModuleSite, bool]] = [(self, False)]
        while stack:
            site, expanded = stack.pop()
            if expanded or not site.children:
                yield site
                continue
            stack.append((site, True))
            stack.extend((child, False) for child in reversed(site.children))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inventory:
    """Everything that holds a tensor in one or several models.

    Attributes:
        roots: One site per model.
        slots: All slots of all models, duplicates kept.
        groups: For each distinct tensor (by `tensor_id`), its storage group.
    """

    roots: tuple[ModuleSite, ...]
    slots: tuple[Slot, ...]
    groups: Mapping[int, StorageGroup]
    _by_tensor: Mapping[int, tuple[Slot, ...]] = field(repr=False)
    _sites: list[ModuleSite] = field(repr=False, default_factory=list)

    def sites(self) -> Sequence[ModuleSite]:
        """Return every module once, children before parents, roots in order."""
        if not self._sites:
            self._sites.extend(s for root in self.roots for s in root.post_order())
        return self._sites

    def slots_of(self, tensor: Tensor) -> tuple[Slot, ...]:
        """Return all places that hold this very object."""
        return self._by_tensor.get(id(tensor), ())

    @property
    def deferred(self) -> tuple[Slot, ...]:
        """The first slot of each distinct tensor that has no memory."""
        return tuple(
            slots[0] for slots in self._by_tensor.values() if slots[0].deferred
        )


@contextmanager
def set_aside(slots: Iterable[Slot]) -> Iterator[None]:
    """Put copies in the places of real tensors, and the tensors back at the end."""
    originals = [(slot, slot.read()) for slot in slots]
    for slot, original in originals:
        twin = original.detach().clone()
        if isinstance(original, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=original.requires_grad)
        slot.write(twin)
    try:
        yield
    finally:
        for slot, original in originals:
            slot.write(original)
