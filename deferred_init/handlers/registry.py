"""Which handler serves which type.

Keyed by type and resolved along the MRO, most specific first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from torch import Tensor, nn

from deferred_init.aliases import has_own_dispatch
from deferred_init.handlers.protocol import (
    Allocator,
    Claim,
    Initializer,
    Order,
    Refresher,
    Request,
    Step,
    TreeInitializer,
    Workspace,
    knows_trees,
)
from deferred_init.slots import ModuleSite, Slot

__all__ = [
    "add_allocator",
    "add_initializer",
    "add_order_hint",
    "add_refresher",
    "allocator_for",
    "construction_order",
    "has_user_rule",
    "initializers_for",
    "last_initializers",
    "refreshers",
    "register_initializer",
    "tree_initializers_for",
    "unregister_initializer",
]

_initializers: dict[type, Initializer] = {}
_user_rules: dict[type, Initializer] = {}
_first: list[Initializer] = []
_last: list[Initializer] = []
_allocators: dict[type, Allocator] = {}
_refreshers: list[Refresher] = []
_order_hints: list[OrderHint] = []
# What was found for a type; bounded, since it keeps types alive.
_asked: dict[type, tuple[Initializer, ...]] = {}
_asked_for_trees: dict[type, tuple[TreeInitializer, ...]] = {}
_allocator_of: dict[type, Allocator | None] = {}
_MAX_TYPES = 1024

OrderHint = Callable[[nn.Module], "Order | None"]
FillFunction = Callable[[Any], None]


class _Rule:
    """A user's function `fn(module)` that fills all tensors of a module in place."""

    composite = False

    def __init__(self, module_type: type, fill: FillFunction) -> None:
        self.name = "registered rule"
        self._type = module_type
        self._fill = fill

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        if not pending:
            return None
        fill_name = getattr(self._fill, "__qualname__", repr(self._fill))
        return Claim(slots=pending, source=f"{fill_name} for {self._type.__name__}")

    def run(self, step: Step, workspace: Workspace) -> None:
        with workspace.filling(step):
            self._fill(step.site.module)


@overload
def register_initializer(
    module_type: type[nn.Module], initializer: None = None
) -> Callable[[FillFunction], FillFunction]: ...
@overload
def register_initializer(
    module_type: type[nn.Module], initializer: FillFunction | Initializer
) -> FillFunction | Initializer: ...
def register_initializer(
    module_type: type[nn.Module],
    initializer: FillFunction | Initializer | None = None,
) -> Any:
    """Teach `materialize` how to make the tensors of a type of module.

    A registered rule is preferred to everything that the package knows by itself,
    and serves subclasses too, unless they have a rule of their own.

    Args:
        module_type: The class of module.
        initializer: A function `fn(module)` that fills every parameter, buffer
            and tensor attribute which the module owns directly, in place and on
            the device where it finds them; or an object with the `Initializer`
            protocol. Without it, a decorator is returned.

    Returns:
        The initializer, so that the decorator form keeps the function's name.

    Raises:
        TypeError: If `module_type` is not a subclass of `nn.Module`.
        ValueError: If the type has a registered rule already.

    Example:
        >>> import torch, deferred_init as di
        >>> class Rotary(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("inv_freq", torch.arange(4.0))
        >>> @di.register_initializer(Rotary)
        ... def fill_rotary(module):
        ...     torch.arange(4.0, out=module.inv_freq)
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"expected a subclass of nn.Module, got {module_type!r}")
    if initializer is None:
        return lambda fn: register_initializer(module_type, fn)
    if module_type in _user_rules:
        raise ValueError(
            f"{module_type.__qualname__} already has the registered rule "
            f"{_user_rules[module_type].name!r}; register a subclass instead"
        )
    _forget()
    if isinstance(initializer, Initializer):
        _user_rules[module_type] = initializer
    elif callable(initializer):
        _user_rules[module_type] = _Rule(module_type, initializer)
    else:
        raise TypeError(f"expected a function or an Initializer, got {initializer!r}")
    return initializer


def unregister_initializer(module_type: type[nn.Module]) -> None:
    """Remove a registered rule; for tests and interactive work."""
    _user_rules.pop(module_type, None)
    _forget()


def add_initializer(
    initializer: Initializer, *types: type, first: bool = False, last: bool = False
) -> None:
    """Register a built-in initializer, by type or before / after all types."""
    _forget()
    if first:
        _first.append(initializer)
    if last:
        _last.append(initializer)
    for module_type in types:
        known = _initializers.setdefault(module_type, initializer)
        if known is not initializer:
            raise ValueError(
                f"{module_type.__qualname__} is claimed by both {known.name!r} "
                f"and {initializer.name!r}"
            )


def add_allocator(allocator: Allocator, *types: type) -> None:
    """Register an allocator for types of tensor."""
    _allocator_of.clear()
    for tensor_type in types:
        known = _allocators.setdefault(tensor_type, allocator)
        if known is not allocator:
            raise ValueError(f"{tensor_type.__qualname__} has two allocators")


def add_refresher(refresher: Refresher) -> None:
    """Register a refresher, called once after all steps."""
    _refreshers.append(refresher)


def initializers_for(module_type: type) -> tuple[Initializer, ...]:
    """Return the initializers to ask, in order of preference."""
    known = _asked.get(module_type)
    if known is None:
        _forget_if_many(_asked)
        known = _asked[module_type] = _find_initializers(module_type)
    return known


def tree_initializers_for(module_type: type) -> tuple[TreeInitializer, ...]:
    """Return those of the initializers that want to be asked about subtrees."""
    known = _asked_for_trees.get(module_type)
    if known is None:
        _forget_if_many(_asked_for_trees)
        asked = initializers_for(module_type)
        known = tuple(one for one in asked if knows_trees(one))
        _asked_for_trees[module_type] = known
    return known


def _find_initializers(module_type: type) -> tuple[Initializer, ...]:
    mro = module_type.__mro__
    found = [_user_rules[base] for base in mro if base in _user_rules]
    found += _first
    found += [_initializers[base] for base in mro if base in _initializers]
    found += _last
    return tuple(dict.fromkeys(found))


def add_order_hint(hint: OrderHint) -> None:
    """Register a function that knows where in a construction a module was made."""
    _order_hints.append(hint)


def construction_order(module: nn.Module) -> Order | None:
    """Return a module's place in the order of a recorded construction, if known."""
    for hint in _order_hints:
        order = hint(module)
        if order is not None:
            return order
    return None


def last_initializers() -> tuple[Initializer, ...]:
    """Return the initializers that are asked after all types."""
    return tuple(_last)


def has_user_rule(module_type: type) -> bool:
    """Whether `register_initializer` was called for a type or a base of it."""
    return any(base in _user_rules for base in module_type.__mro__)


def allocator_for(tensor: Tensor) -> Allocator | None:
    """Return the allocator for a tensor, or None if nobody claims its type."""
    kind = type(tensor)
    if kind not in _allocator_of:
        _forget_if_many(_allocator_of)
        _allocator_of[kind] = _find_allocator(kind)
    return _allocator_of[kind]


def _find_allocator(tensor_type: type[Tensor]) -> Allocator | None:
    for base in tensor_type.__mro__:
        if base is Tensor and has_own_dispatch(tensor_type):
            return None
        if base in _allocators:
            return _allocators[base]
    return None


def _forget() -> None:
    _asked.clear()
    _asked_for_trees.clear()


def _forget_if_many(known: dict[type, Any]) -> None:
    if len(known) >= _MAX_TYPES:
        known.clear()


def refreshers() -> tuple[Refresher, ...]:
    """Return all registered refreshers."""
    return tuple(_refreshers)
