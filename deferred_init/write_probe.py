"""Finds out what a module's own init method would write, by running it on a stand-in.

[Note: A stand-in without memory]
The method runs on copies of the modules of the subtree, whose tensors are meta
tensors of the same geometry. Everything else is shared. So the model stays exactly
as it was, also where the method replaces parameters or raises. What leaves the
subtree cannot be copied: writing to a real tensor there is refused.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.distributed.fsdp2 import unsharded_type
from deferred_init.dry_run import WriteWatch
from deferred_init.hollow import hollow
from deferred_init.operators import is_silent_write
from deferred_init.rng import GeneratorSnapshot
from deferred_init.slots import ModuleSite, Slot, SlotKind
from deferred_init.small_values import small_value

__all__ = ["Names", "ProbeError", "Writes", "count_of", "likeness", "probe_writes"]
__all__ += ["stand_in"]

_MAX_DEPTH = 8
Names = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[int, ...]]
_INTERNALS = frozenset(vars(nn.Module()))
_REGISTERED = (SlotKind.PARAMETER, SlotKind.BUFFER)
_PLAIN = frozenset({int, float, str, bool, type(None)})


class ProbeError(Exception):
    """The method cannot be run without memory; says why, in short."""


@small_value
class Writes:
    """What a method would write.

    Attributes:
        filled: Deferred slots that it overwrites completely.
        touched: Deferred slots that it writes in part, or changes.
        real: Slots with memory that it would write to.
        counts: How often it would write to each of the deferred ones.
    """

    filled: tuple[Slot, ...]
    touched: tuple[Slot, ...]
    real: tuple[Slot, ...]
    counts: tuple[int, ...]

    @property
    def names(self) -> Names:
        """The names of the slots, which keep no module alive."""
        kinds = (self.filled, self.touched, self.real)
        first, second, third = (tuple(s.name for s in slots) for slots in kinds)
        return first, second, third, self.counts

    @property
    def num_writes(self) -> dict[int, int]:
        """How often it would write to each deferred tensor, by `id`."""
        deferred = (*self.filled, *self.touched)
        numbered = zip(deferred, self.counts, strict=True)
        return {slot.tensor_id: count for slot, count in numbered}

    @staticmethod
    def on(site: ModuleSite, names: Names) -> Writes:
        """Return what the names stand for in a module that is alike."""
        by_name = {slot.name: slot for slot in site.slots}
        *kinds, counts = names
        filled, touched, real = [tuple([by_name[n] for n in kind]) for kind in kinds]
        return Writes(filled=filled, touched=touched, real=real, counts=counts)


def likeness(site: ModuleSite) -> Hashable | None:
    """Return a key that is equal for modules on which a method does the same.

    None where that cannot be told: for modules with children, or with attributes
    other than numbers, strings and tensors of their own.
    """
    if site.children or len({s.tensor_id for s in site.slots}) != len(site.slots):
        return None
    module = site.module
    held = vars(module).items()
    values = tuple([(k, type(v), v) for k, v in held if k not in _INTERNALS])
    if not _PLAIN.issuperset([kind for _, kind, _ in values]):
        return None
    slots: list[Any] = []
    for slot in site.slots:
        if slot.kind not in _REGISTERED:
            return None
        one = slot.tensor
        slots += (slot.name, type(one), one.size(), one.stride(), one.dtype)
        slots += (slot.deferred, one.requires_grad, one.storage_offset())
    # Names that are registered and hold nothing are in no slot.
    names = (*module._parameters, None, *module._buffers, module.training)
    unsaved = frozenset(module._non_persistent_buffers_set)
    return (type(module), tuple(slots), values, names, unsaved)


def probe_writes(site: ModuleSite, call: Callable[[nn.Module], object]) -> Writes:
    """Run `call` on a stand-in of a module and its descendants.

    Args:
        site: The module; all slots of it and below are looked at.
        call: Receives the stand-in.

    Raises:
        ProbeError: If the call raises, with a short text.
    """
    try:
        return _probe(site, call, torch.device("meta"))
    except ProbeError:
        # Its temporaries may need values, such as a schedule read with `.item()`.
        return _probe(site, call, torch.device("cpu"))


def _probe(
    site: ModuleSite, call: Callable[[nn.Module], object], device: torch.device
) -> Writes:
    slots = list(_unique(site))
    memo: dict[int, Any] = {}
    twin = stand_in(site, memo)
    before = {s.tensor_id: storage_key(memo[s.tensor_id]) for s in slots}
    version = {s.tensor_id: count_of(memo[s.tensor_id]) for s in slots}
    generators = GeneratorSnapshot(torch.device("cpu"))
    try:
        with warnings.catch_warnings(), device, _Probe() as watch:
            warnings.simplefilter("ignore")  # seen again when it runs
            call(twin)
    except Exception as error:  # any code may run in there
        text = " ".join(str(error).split())
        raise ProbeError(f"{type(error).__name__}: {text}") from error
    finally:
        generators.restore()
    filled, touched, real = [], [], []
    for slot in slots:
        now = _now(slot, memo)
        key = None if now is None else storage_key(now)
        replaced = now is None or key != before[slot.tensor_id]
        if not replaced and key not in watch.written:
            continue
        if not slot.deferred:
            real.append(slot)
        elif now is not None and (
            watch.is_filled(now) or (replaced and not watch.is_raw(now))
        ):
            filled.append(slot)
        else:
            touched.append(slot)
    keys = [slot.tensor_id for slot in (*filled, *touched)]
    return Writes(
        filled=tuple(filled),
        touched=tuple(touched),
        real=tuple(real),
        counts=tuple(count_of(memo[key]) - version[key] for key in keys),
    )


def count_of(tensor: Tensor) -> int:
    """Return how often torch has counted a write to a tensor, or to a view of it."""
    return 0 if tensor.is_inference() else tensor._version


def stand_in(site: ModuleSite, memo: dict[int, Any]) -> nn.Module:
    """Copy the modules of a subtree with tensors that have no memory.

    Args:
        site: The subtree.
        memo: Filled with the copy of each module and tensor, by `id`.
    """
    sites = list(site.post_order())
    for one in sites:
        kind = unsharded_type(one.module)
        twin = kind.__new__(kind)
        memo[id(one.module)] = twin
        for slot in one.slots:
            if slot.tensor_id not in memo:
                memo[slot.tensor_id] = hollow(slot.tensor)
    for one in sites:
        twin = memo[id(one.module)]
        for name, value in vars(one.module).items():
            vars(twin)[name] = _copy(value, memo, 0)
    top = memo[id(site.module)]
    assert isinstance(top, nn.Module)
    return top


class _Probe(WriteWatch):
    """A watch that refuses to write into memory that it did not see being made."""

    def __init__(self) -> None:
        super().__init__()
        self._own: set[int | None] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            info = argument.alias_info
            writes = info is not None and info.is_write
            if (
                (writes or is_silent_write(func, argument.name))
                and isinstance(value, Tensor)
                and value.device.type != "meta"
                and storage_key(value) not in self._own
            ):
                raise RuntimeError("it writes to a tensor outside of the module")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, Tensor) and value.device.type != "meta":
                inputs = {storage_key(a) for a in args if isinstance(a, Tensor)}
                if storage_key(value) not in inputs:
                    self._own.add(storage_key(value))
                    self._kept.append(value)
        return result


def _copy(value: Any, memo: dict[int, Any], depth: int) -> Any:
    """Copy a value as far as it leads to modules and tensors of the subtree."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, functools.partial):
        parts: Any = [_copy(p, memo, depth + 1) for p in (value.func, *value.args)]
        named = {k: _copy(v, memo, depth + 1) for k, v in value.keywords.items()}
        again: Any = functools.partial(parts[0], *parts[1:], **named)
        return again
    if type(value) in (list, set, tuple):
        container: Any = type(value)
        return container(_copy(item, memo, depth + 1) for item in value)
    if isinstance(value, dict):
        made = value.copy()
        made.update((k, _copy(v, memo, depth + 1)) for k, v in value.items())
        return made
    return value


def _now(slot: Slot, memo: dict[int, Any]) -> Tensor | None:
    """Return the tensor that stands in the slot's place in the stand-in."""
    if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
        owner = memo[id(slot.owner)]
        table = owner._parameters if slot.kind is SlotKind.PARAMETER else owner._buffers
        found = table.get(slot.name)
    elif slot.container is vars(slot.owner):
        found = vars(memo[id(slot.owner)]).get(slot.key)
    else:
        found = memo[slot.tensor_id]
    return found if isinstance(found, Tensor) else None


def _unique(site: ModuleSite) -> list[Slot]:
    unique: dict[int, Slot] = {}
    for one in site.post_order():
        for slot in one.slots:
            unique.setdefault(slot.tensor_id, slot)
    return list(unique.values())
