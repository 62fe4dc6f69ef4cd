"""What the audit sees: every place that holds a tensor, found by a walk of its own.

[Note: Looking as a stranger]
The audit must not repeat a mistake of the inventory, so it shares no code with it.
It reads only instance dicts, slots and the items of built-in containers, by the
built-in types' own methods: properties, `__getattr__` and overridden iteration of the
user's classes never run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from deferred_init.audit.barren import Barren
from deferred_init.audit.hooks import is_leaf
from deferred_init.audit.kinds import (
    BUILT_IN,
    MODULE_HOOKS,
    Kind,
    atoms,
    kind_of,
    parts_of,
    slot_parts,
)

__all__ = ["ModulePlace", "ObjectGraph", "Place", "look"]

_MODULE_INTERNALS = (frozenset(vars(nn.Module())) - {"training"}) | {*MODULE_HOOKS}
_HOOKS_IN_ORDER = sorted(MODULE_HOOKS, key=[*vars(nn.Module())].index)
_WRAPPER_STATE = "__composable_api_state_key"  # FSDP2's, of which it takes care
_MAX_DEPTH = 32
_BATCH = 64
_REGISTERED = (("parameter", "_parameters"), ("buffer", "_buffers"))
_ATOM, _TENSOR, _MODULE, _CACHE = Kind.ATOM, Kind.TENSOR, Kind.MODULE, Kind.CACHE


class Place(NamedTuple):
    """One place that holds a tensor.

    Attributes:
        fqn: Its name, from a model, `optimizers[i]` or `holders[i]`.
        kind: `parameter`, `buffer`, `attribute`, `gradient`, `inner`.
        tensor: What it holds.
        tensor_id: Its `id`, see [Note: Asking for an id] in `inventory.py`.
        owner: The module that it belongs to, or None.
        name: The name within the owner.
        scope: `model`, `optimizer` or `holder`.
    """

    fqn: str
    kind: str
    tensor: Tensor
    tensor_id: int
    owner: nn.Module | None
    name: str
    scope: str

    @property
    def registered(self) -> bool:
        """Whether torch knows it: a parameter or a buffer of a module."""
        return self.kind in ("parameter", "buffer")


class ModulePlace(NamedTuple):
    """One module, under the first name that leads to it."""

    fqn: str
    module: nn.Module
    scope: str


class ObjectGraph:
    """Everything that was found.

    Attributes:
        places: All places, duplicates kept.
        modules: All modules, each once; registered ones come before hidden ones.
        model_ids: For each tensor of the models, by `id`, its first place.
        by_fqn: By name; of several places of one name the first.
        caches: Objects that cache what others hold, each with its name.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.modules: list[ModulePlace] = []
        self.model_ids: dict[int, Place] = {}
        self.by_fqn: dict[str, Place] = {}
        self.caches: list[tuple[str, object]] = []

    def in_scope(self, scope: str) -> Iterable[Place]:
        """Yield the places of models, optimizers or holders."""
        return (place for place in self.places if place.scope == scope)


def look(
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer] = (),
    holders: Iterable[object] = (),
) -> ObjectGraph:
    """Walk through models, optimizers and holders; change nothing."""
    walk = _Walk()
    models = tuple(models)
    for index, model in enumerate(models):
        walk.tree(model, "" if len(models) == 1 else f"model[{index}]", "model")
    walk.attributes()
    graph = walk.graph
    for place in graph.places:
        graph.model_ids.setdefault(place.tensor_id, place)
    for index, optimizer in enumerate(optimizers):
        for name, value in vars(optimizer).items():
            if name not in ("param_groups", "state", "defaults"):
                walk.anything(value, f"optimizers[{index}].{name}", "optimizer")
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    label = f"optimizers[{index}].param_groups[{number}][{name!r}]"
                    walk.anything(value, label, "optimizer")
        walk.attributes()
    for index, holder in enumerate(holders):
        walk.anything(holder, f"holders[{index}]", "holder")
        walk.attributes()
    for place in graph.places:
        graph.by_fqn.setdefault(place.fqn, place)
    return graph


class _Walk:
    """The state of one walk."""

    def __init__(self) -> None:
        self.graph = ObjectGraph()
        self._seen: set[int] = set()
        self._seen_tensors: set[int] = set()
        self._keep: list[object] = []
        self._barren = Barren()
        self._next = 0

    def tree(self, module: nn.Module, fqn: str, scope: str) -> None:
        """Enter a module and everything registered below, parents first."""
        stack = [(module, fqn)]
        while stack:
            module, fqn = stack.pop()
            module_id = id(module)
            if module_id in self._seen:
                continue
            self._seen.add(module_id)
            self.graph.modules.append(ModulePlace(fqn, module, scope))
            if module._modules:
                prefix = f"{fqn}." if fqn else ""
                children = [
                    (child, prefix + name)
                    for name, child in module._modules.items()
                    if child is not None
                ]
                stack.extend(reversed(children))

    def attributes(self) -> None:
        """Look into every module not looked into yet, also those found meanwhile."""
        modules = self.graph.modules
        while self._next < len(modules):
            batch = modules[self._next : self._next + _BATCH]
            self._next += len(batch)
            self._modules(batch)

    def anything(self, value: object, label: str, scope: str) -> None:
        """Look at a value of any kind, and at all that it holds."""
        self._values([(value, label, 0)], None, "", scope)

    def _modules(self, batch: Sequence[ModulePlace]) -> None:
        """Look into modules; by name only where there is anything."""
        held = [_held_by(found.module) for found in batch]
        nested = [v for rest in held for v, _, _ in rest if kind_of(v) is not _TENSOR]
        barren = self._barren.lead_nowhere(nested, self._seen)
        for found, rest in zip(batch, held, strict=True):
            fqn, module, scope = found
            prefix = f"{fqn}." if fqn else ""
            for kind, table in _REGISTERED:
                tensors = vars(module).get(table) or getattr(module, table)
                for name, tensor in tensors.items():  # a traced module hides its own
                    if tensor is not None:
                        self._tensor(tensor, kind, module, prefix, name, scope)
            if rest and barren:
                rest = [each for each in rest if kind_of(each[0]) is _TENSOR]
            if rest:
                self._values(rest, module, prefix, scope)

    def _values(
        self,
        rest: list[tuple[object, str, int]],
        owner: nn.Module | None,
        prefix: str,
        scope: str,
    ) -> None:
        """Look at values and, without recursion, at what they hold.

        Args:
            rest: The values, each with its name within the owner and its depth.
            owner: The module that they belong to, or None.
            prefix: What turns the names into qualified ones.
            scope: `model`, `optimizer` or `holder`.
        """
        rest.reverse()
        seen = self._seen
        while rest:
            value, name, depth = rest.pop()
            if id(value) in seen:
                continue
            kind = kind_of(value)
            if kind is _ATOM:
                continue
            if kind is _TENSOR:
                assert isinstance(value, Tensor)
                self._tensor(value, "attribute", owner, prefix, name, scope)
            elif kind is _MODULE:
                assert isinstance(value, nn.Module)
                self.tree(value, prefix + name, scope)
            elif depth < _MAX_DEPTH:
                if kind is _CACHE:
                    self.graph.caches.append((prefix + name, value))
                parts = parts_of(value, kind)
                if parts or kind is _CACHE:
                    seen.add(id(value))
                    self._keep.append(value)
                    depth += 1
                    rest += [
                        (part, name + label, depth) for label, part in reversed(parts)
                    ]

    def _tensor(
        self,
        tensor: Tensor,
        kind: str,
        owner: nn.Module | None,
        prefix: str,
        name: str,
        scope: str,
    ) -> None:
        fqn, tensor_id = prefix + name, id(tensor)
        place = Place(fqn, kind, tensor, tensor_id, owner, name, scope)
        self.graph.places.append(place)
        if tensor_id in self._seen_tensors:
            return
        self._seen_tensors.add(tensor_id)
        carried = tensor.__dict__
        if carried:
            rest: list[tuple[object, str, int]] = [
                (value, f"{name}.{key}", 1)
                for key, value in carried.items()
                if kind_of(value) is not Kind.ATOM
            ]
            if rest:
                self._values(rest, owner, prefix, scope)
        if tensor.requires_grad and is_leaf(tensor) and tensor.grad is not None:
            grad, name_of_grad = tensor.grad, f"{name}.grad"
            self._keep.append(grad)
            fqn = prefix + name_of_grad
            self.graph.places.append(
                Place(fqn, "gradient", grad, id(grad), owner, name_of_grad, scope)
            )


def _held_by(module: nn.Module) -> list[tuple[object, str, int]]:
    """List what a module holds besides what is registered, each with its name."""
    known, attributes = atoms(), vars(module)
    held: list[tuple[object, str, int]] = [
        (hooks, name, 0) for name in _HOOKS_IN_ORDER if (hooks := attributes.get(name))
    ]
    held += [
        (value, name, 0)
        for name, value in attributes.items()
        if name not in _MODULE_INTERNALS  # most are, so that this comes first
        and type(value) not in known
        and (type(value) not in BUILT_IN or value)
        and not name.startswith(_WRAPPER_STATE)
    ]
    slots = slot_parts(module)
    return held + [(value, name[1:], 0) for name, value in slots] if slots else held
