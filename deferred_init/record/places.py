"""Which value stands in which place of what a constructor returned.

[Note: Finding the recording of a sharded parameter]
`fully_shard` and `parallelize_module` put a DTensor in the place of each parameter. Its
local tensor comes from recorded operations on the deferred parameter, so it leads to
the recording; but it is not what one device would hold, and `distribute_tensor` even
leaves it empty, since on meta it does not communicate. The value that counts is that
of the parameter: the operations that made the local tensor are followed back to the
nearest parameter of the DTensor's shape. What stands in the same place (same module
object, same name) may be another one: parameters are tied, exchanged, replaced, given
to other modules or copied with them between the constructor and `fully_shard`. The
place counts where the operations lead nowhere.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Value
from deferred_init.record.tensor import DeferredTensor, value_of, without_internals

__all__ = [
    "attributes_in_place",
    "move_places",
    "remember_places",
    "value_in_place",
]


def remember_places(recording: Recording, result: Any) -> None:
    """Note the value behind each parameter and buffer of the modules in a result.

    Args:
        recording: What was recorded.
        result: A module, or containers and dataclasses of modules.
    """
    pending, opened = [result], set()
    while pending:
        item = pending.pop()
        if isinstance(item, nn.Module):
            for module in item.modules():
                _remember_tensors(recording, module)
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif dataclasses.is_dataclass(item) and id(item) not in opened:
            opened.add(id(item))
            pending.extend(
                getattr(item, each.name, None) for each in dataclasses.fields(item)
            )


def _remember_tensors(recording: Recording, module: nn.Module) -> None:
    """Note the values behind the tensors of one module, and what these carry."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if isinstance(tensor, DeferredTensor):
            recording.places.setdefault(module, {})[name] = value_of(tensor)
            recording.attributes.setdefault(module, {})[name] = tensor.__dict__
            recording.held.setdefault(value_of(tensor), tensor.__dict__)


def move_places(old: nn.Module, new: nn.Module) -> None:
    """Note that a module holds what another one held, under the same names.

    Whoever gives the Parameters of a recorded module to another one has to say so: when
    the new one is sharded, its values are looked for by module and name.

    Args:
        old: The module that the constructor made.
        new: It holds the same deferred Parameters.
    """
    for tensor in (*new._parameters.values(), *new._buffers.values()):
        if isinstance(tensor, DeferredTensor):
            recording = value_of(tensor).recording
            if old in recording.places:
                recording.places[new] = recording.places[old]
                recording.attributes[new] = recording.attributes[old]


def value_in_place(owner: nn.Module, name: str, tensor: Tensor) -> Value | None:
    """Return the recorded full value behind a tensor that a module holds.

    Args:
        owner: The module.
        name: The name of its parameter or buffer.
        tensor: What it holds there now: deferred itself, or a DTensor of which the
            local tensor is.
    """
    if isinstance(tensor, DeferredTensor):
        return value_of(tensor)
    local = getattr(tensor, "_local_tensor", None)
    if not isinstance(local, DeferredTensor):
        return None
    value = value_of(local)
    origins = value.recording.origins
    if value not in origins:
        origins[value] = _origin(value, tensor.shape)
    return origins[value] or value.recording.places.get(owner, {}).get(name)


def _origin(local: Value, shape: torch.Size) -> Value | None:
    """Follow a local tensor back to the nearest parameter of a shape."""
    recording = local.recording
    pending, seen = deque([local]), {local}
    while pending:
        value = pending.popleft()
        if value in recording.held and value.shape == shape:
            return value
        for index in (value.node, *value.storage.writers):
            for read in recording.nodes[index].reads:
                if read not in seen:
                    seen.add(read)
                    pending.append(read)
    return None


def attributes_in_place(owner: nn.Module, name: str, value: Value) -> dict[str, Any]:
    """Return what the user put on the tensor that the constructor left in a place.

    Also what was put on it later, as long as no wrapper had replaced the tensor.

    Args:
        owner: The module.
        name: The name of its parameter or buffer.
        value: What was recorded for it.
    """
    recording = value.recording
    if recording.places.get(owner, {}).get(name) is value:
        carried = recording.attributes.get(owner, {}).get(name, {})
    else:
        carried = recording.held.get(value, {})
    return {
        name: found
        for name, found in without_internals(carried).items()
        if not name.startswith("_fsdp")  # what `fully_shard` notes for itself
    }
