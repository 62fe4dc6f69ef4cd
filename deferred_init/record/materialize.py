"""Turn deferred tensors into real ones, each the same Python object as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.one_at_a_time import one_at_a_time
from deferred_init.record.grads import recompute
from deferred_init.record.graph import Recording
from deferred_init.record.handed import hand_out, handed_out
from deferred_init.record.nodes import Value
from deferred_init.record.replay import Replay
from deferred_init.record.tensor import (
    DeferredTensor,
    final_class,
    user_attributes,
    value_of,
)

__all__ = [
    "become",
    "deferred_tensors",
    "dressed",
    "materialize_module",
    "materialize_tensor",
    "realize",
]


@one_at_a_time
def materialize_tensor(
    tensor: Tensor, *, device: torch.device | str | None = None
) -> Tensor:
    """Make one deferred tensor real: the same object, with eager's bits.

    The generators are left as they were, except that the last tensor of a recording
    whose result is that tensor leaves them where eager construction would have.

    Args:
        tensor: Any tensor; a real one is returned as it is.
        device: Stands for the device that was recorded; by default that one.

    Returns:
        The same object.

    Raises:
        ReplayError: If a recorded operation cannot be replayed.
    """
    if isinstance(tensor, DeferredTensor):
        recording = value_of(tensor).recording
        named = {"the tensor": tensor}
        _materialize(recording, named, device, whole=recording.is_result(tensor))
    return tensor


@one_at_a_time
def materialize_module(
    module: nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[nn.Module], bool] | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Make the deferred tensors of a module real: the same objects, eager's bits.

    Parameters, buffers and plain tensor attributes (also in lists, tuples and
    dictionaries, and what a tensor carries as an attribute) become real; ties and
    views are kept, other references to the same objects see the change. Real tensors
    are not touched.

    Args:
        module: The module.
        buffers_only: Leave parameters deferred.
        check_fn: Called with every submodule; where it returns false, the tensors
            that this submodule owns stay deferred.
        device: Stands for the device that was recorded; by default that one.

    Raises:
        ReplayError: If a recorded operation cannot be replayed; nothing was changed.
    """
    named = dict(deferred_tensors(module, buffers_only, check_fn))
    groups: dict[Recording, dict[str, DeferredTensor]] = {}
    for name, tensor in named.items():
        groups.setdefault(value_of(tensor).recording, {})[name] = tensor
    for recording, members in groups.items():
        recording.made.update((n, value_of(t)) for n, t in members.items())
        everything = not buffers_only and check_fn is None
        whole = everything and recording.is_result(module)
        _materialize(recording, members, device, whole=whole)


def _materialize(
    recording: Recording,
    named: dict[str, DeferredTensor],
    device: torch.device | str | None,
    *,
    whole: bool,
) -> None:
    """Compute the tensors of one recording, then change all of them at once."""
    replay_device = recording.device if device is None else torch.device(device)
    values = dict.fromkeys(value_of(tensor) for tensor in named.values())
    real = realize(recording, values, replay_device, whole=whole)
    computed = {id(t): t for t in named.values() if not t.is_leaf}
    leaves: dict[Value, Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in computed:
            value = value_of(tensor)
            become(tensor, real[value])
            if tensor.requires_grad:
                leaves[value] = tensor
    for tensor in computed.values():
        value = value_of(tensor)
        again = recompute(value, leaves, replay_device, real[value])
        become(tensor, real[value] if again is None else again)


def realize(
    recording: Recording,
    values: Iterable[Value],
    device: torch.device,
    *,
    whole: bool,
) -> dict[Value, Tensor]:
    """Compute values; storages that an earlier call handed out are used again.

    Args:
        recording: The recording of all values.
        values: Which ones.
        device: The device of the replay.
        whole: Whether this ends the recording, so that the generators are brought
            where eager construction would have left them.
    """
    wanted = list(values)
    known = {value: handed_out(value, device) for value in wanted}
    missing = [value for value in wanted if known[value] is None]
    replay = Replay(recording, device, wanted=missing)
    if whole:
        try:
            replay.run()
            made = {value: replay.take(value) for value in missing}
        except BaseException:
            replay.finish(keep_generators=False)
            raise
        replay.finish()
    else:
        made = dict(zip(missing, replay.values(missing), strict=True))
    for value, tensor in made.items():
        hand_out(value, tensor, device)
    return {
        value: made[value] if known[value] is None else known[value]  # type: ignore[misc]
        for value in wanted
    }


def become(tensor: Tensor, real: Tensor) -> None:
    """Give a deferred tensor object the contents of a real tensor.

    The object keeps its identity, its attributes, `requires_grad` and hooks, and
    gets the class that eager construction would have given it.

    Weak references to the object stay right, since the object stays; that is why this
    does not refuse them as `torch.utils.swap_tensors` does (an `nn.LSTM` has some).
    """
    new = dressed(tensor, real)
    hooks = tensor._backward_hooks
    if hooks:
        new._backward_hooks = hooks
    new.__dict__.update(user_attributes(tensor))
    old_class, old_dict = tensor.__class__, tensor.__dict__
    new_class, new_dict = new.__class__, new.__dict__
    tensor.__class__, new.__class__ = new_class, old_class
    tensor.__dict__, new.__dict__ = new_dict, old_dict
    torch._C._swap_tensor_impl(tensor, new)


def dressed(tensor: Tensor, real: Tensor) -> Tensor:
    """Return the real tensor in the class, and with the grad flag, it shall have.

    Args:
        tensor: The deferred tensor that tells class and flag.
        real: Its value; a leaf is wrapped anew, so that the result is no view.
    """
    final = final_class(tensor)
    if final is not Tensor:
        return torch.Tensor._make_subclass(final, real, tensor.requires_grad)
    new = _window_on(real) if real.is_leaf else real
    if tensor.requires_grad and real.is_leaf:
        new.requires_grad_()
    return new


def _window_on(real: Tensor) -> Tensor:
    """Return a new tensor object over the same storage, that is no view."""
    if real.is_conj() or real.is_neg() or real.layout != torch.strided:
        return real.detach()
    if real.is_quantized:
        return real.detach()
    fresh = torch.empty(0, dtype=real.dtype, device=real.device)
    with torch.no_grad():
        return fresh.set_(
            real.untyped_storage(), real.storage_offset(), real.size(), real.stride()
        )


def deferred_tensors(
    module: nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> Iterator[tuple[str, DeferredTensor]]:
    """Yield name and object of every deferred tensor of a module, each object once."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        if check_fn is not None and not check_fn(owner):
            continue
        for name, item in _attributes(owner, buffers_only):
            for path, tensor in _inside(name, item, 0):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{prefix}.{path}" if prefix else path), tensor


def _attributes(owner: nn.Module, buffers_only: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds, in the order parameters, buffers, the rest."""
    if not buffers_only:
        yield from owner._parameters.items()
    yield from owner._buffers.items()
    if not buffers_only:
        for name, item in vars(owner).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield name, item


def _inside(name: str, item: Any, depth: int) -> Iterator[tuple[str, DeferredTensor]]:
    """Yield the deferred tensors in an attribute, containers opened."""
    if isinstance(item, DeferredTensor):
        yield name, item
        for key, carried in user_attributes(item).items():
            if isinstance(carried, DeferredTensor):
                yield f"{name}.{key}", carried
    elif depth < 4 and isinstance(item, dict):
        for key, part in item.items():
            yield from _inside(f"{name}[{key!r}]", part, depth + 1)
    elif depth < 4 and isinstance(item, (list, tuple, set)):
        for index, part in enumerate(item):
            yield from _inside(f"{name}[{index}]", part, depth + 1)
