"""Takes the inventory: finds every slot of a model, also where torch does not look.

Besides parameters and buffers it looks into plain attributes, lists, dicts, tuples
and plain objects that modules hold, and finds modules that are kept in such
containers and that `named_modules()` therefore never shows.

[Note: Asking for an id]
`id` raises an audit event. Where a program has an audit hook written in Python, such as
that of `filelock`, each call takes ten times as long. So what is looked at again and
again, as tensors in slots are, is asked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from deferred_init.aliases import group_by_storage
from deferred_init.module_attributes import held_by, unregistered
from deferred_init.object_contents import itself, nothing, reader_of
from deferred_init.slots import Inventory, ModuleSite, Slot, SlotKind

__all__ = ["site_of", "take_inventory"]

_MAX_DEPTH = 8


def take_inventory(models: Sequence[nn.Module]) -> Inventory:
    """List every slot of the models; changes nothing and touches no storage.

    Args:
        models: One module or several; one that is reachable twice (two models
            that share a block) is listed once, under its first name.
    """
    labels = [""] if len(models) == 1 else [f"model[{i}]" for i in range(len(models))]
    roots, slots = _visit_all(models, labels)
    by_tensor: dict[int, list[Slot]] = {}
    for slot in slots:
        by_tensor.setdefault(slot.tensor_id, []).append(slot)
    return Inventory(
        roots=roots,
        slots=slots,
        groups=group_by_storage(slot.tensor for slot in slots),
        _by_tensor={key: tuple(held) for key, held in by_tensor.items()},
    )


def site_of(model: nn.Module) -> ModuleSite:
    """Return the site of one model, without asking which tensors share storage."""
    roots, _ = _visit_all((model,), ("",))
    return roots[0]


def _visit_all(
    models: Sequence[nn.Module], labels: Sequence[str]
) -> tuple[tuple[ModuleSite, ...], tuple[Slot, ...]]:
    walk = _Walk(unregistered(models))
    roots = tuple(
        site
        for model, label in zip(models, labels, strict=True)
        if (site := walk.visit(model, label)) is not None
    )
    return roots, tuple(walk.slots)


class _Walk:
    """Depth-first walk that remembers what it has seen."""

    def __init__(self, held: Mapping[int, list[tuple[str, Any]]]) -> None:
        self.slots: list[Slot] = []
        self._held = held
        self._seen_modules: set[int] = set()
        self._seen_objects: dict[int, Any] = {}  # kept, so that ids stay theirs
        self._seen_tensors: set[int] = set()

    def visit(
        self, module: nn.Module, fqn: str, *, registered: bool = True
    ) -> ModuleSite | None:
        """Visit a tree of modules without recursing once per level of nesting."""
        if id(module) in self._seen_modules:
            return None
        self._seen_modules.add(id(module))
        # Frames: (module, fqn, registered, own slots, built children, queue).
        done: ModuleSite | None = None
        stack = [self._enter(module, fqn, registered)]
        while stack:
            frame = stack[-1]
            if done is not None:
                frame.children.append(done)
                done = None
            entered = False
            while frame.queue:
                child, child_fqn, child_registered = frame.queue.pop(0)
                child_id = id(child)
                if child_id not in self._seen_modules:
                    self._seen_modules.add(child_id)
                    stack.append(self._enter(child, child_fqn, child_registered))
                    entered = True
                    break
            if not entered:
                done = frame.finish()
                stack.pop()
        return done

    def _enter(self, module: nn.Module, fqn: str, registered: bool) -> _Frame:
        frame = _Frame(module=module, fqn=fqn, registered=registered)
        start = len(self.slots)
        for name, param in module._parameters.items():
            if param is not None:
                self._add(frame, name, SlotKind.PARAMETER, module._parameters, param)
        transient = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept = name not in transient
                self._add(frame, name, SlotKind.BUFFER, module._buffers, buffer, kept)
        for name, child in module._modules.items():
            if child is not None:
                frame.queue.append((child, _join(fqn, name), registered))
        held = self._held.get(id(module))
        for name, value in held_by(module) if held is None else held:
            self._look(frame, name, vars(module), name, value, 0)
        frame.slots = tuple(self.slots[start:])
        return frame

    def _add(
        self,
        frame: _Frame,
        name: str,
        kind: SlotKind,
        container: Any,
        tensor: Tensor,
        persistent: bool = True,
        key: Any = None,
    ) -> None:
        tensor_id = id(tensor)
        self.slots.append(
            Slot(
                owner=frame.module,
                owner_fqn=frame.fqn,
                name=name,
                kind=kind,
                persistent=persistent,
                container=container,
                key=name if key is None else key,
                tensor=tensor,
                tensor_id=tensor_id,
            )
        )
        if tensor_id in self._seen_tensors:
            return
        self._seen_tensors.add(tensor_id)
        for attr, value in _carried(tensor).items():
            if isinstance(value, Tensor):
                # The object and not its `__dict__`, which a swap replaces.
                self._add(
                    frame,
                    f"{name}.{attr}",
                    SlotKind.TENSOR_ATTRIBUTE,
                    tensor,
                    value,
                    False,
                    attr,
                )

    def _look(
        self,
        frame: _Frame,
        name: str,
        container: Any,
        key: Any,
        value: Any,
        depth: int,
    ) -> None:
        """Look at one value that a module or a container of it holds."""
        items = reader_of(type(value))
        if items is nothing:
            return
        if items is itself:
            if isinstance(value, Tensor):
                self._add(frame, name, SlotKind.ATTRIBUTE, container, value, False, key)
            else:
                frame.queue.append((value, _join(frame.fqn, name), False))
        elif depth < _MAX_DEPTH and id(value) not in self._seen_objects:
            inner, pairs = items(value)
            if not pairs:
                return
            self._seen_objects[id(value)] = value
            for item_key, label, item in pairs:
                self._look(frame, f"{name}{label}", inner, item_key, item, depth + 1)


@dataclass(slots=True, kw_only=True)
class _Frame:
    """A module that is being visited."""

    module: nn.Module
    fqn: str
    registered: bool
    slots: tuple[Slot, ...] = ()
    children: list[ModuleSite] = field(default_factory=list)
    queue: list[tuple[nn.Module, str, bool]] = field(default_factory=list)

    def finish(self) -> ModuleSite:
        return ModuleSite(
            module=self.module,
            fqn=self.fqn,
            registered=self.registered,
            slots=self.slots,
            children=tuple(self.children),
        )


def _carried(tensor: Tensor) -> Mapping[str, Any]:
    """Return what a user put on a tensor, without what a subclass keeps there."""
    own = getattr(type(tensor), "__carried_attributes__", None)
    if own is not None:
        found: Mapping[str, Any] = own(tensor)
        return found
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return {}
    return getattr(tensor, "__dict__", {})


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
