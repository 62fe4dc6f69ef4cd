"""The dispatch mode under which a constructor runs while it is recorded.

[Note: Two modes]
The dispatch mode is the net: it sees every operation, also those of factories that
make a tensor from nothing and of code in C++. The function mode is there for what the
dispatch mode cannot do: it rewrites device arguments before torch's argument parser
initializes CUDA, keeps `torch.tensor(...)` and numpy's arrays apart from values that
are computed, and records the common factories without dispatching them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.dispatch import DispatchMode
from deferred_init.record import ops
from deferred_init.record.capture import constant
from deferred_init.record.external import CASTS, note_cast, note_left_out
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import Place
from deferred_init.record.paused import in_fake_mode, no_dispatch
from deferred_init.record.schema import op_info
from deferred_init.record.tensor import DeferredTensor, late, value_of

__all__ = ["RecordOperations", "tensors_in"]

_META = torch.device("meta")


class RecordOperations(DispatchMode):
    """Records every operation that makes or touches a deferred tensor."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.place: Place | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record an operation, or run it."""
        # Operators called by name go through function modes too: not from here.
        with torch._C.DisableTorchFunction():
            return self._handle(func, types, args, kwargs or {})

    def _handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record one operation, or run it if it only concerns real tensors."""
        left = self.recording.external_storages
        if not left and any(issubclass(kind, DeferredTensor) for kind in types):
            return ops.record(self.recording, func, args, kwargs, self.place)
        found = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if left:
            note_left_out(self.recording, func, found)
        if any(isinstance(tensor, DeferredTensor) for tensor in found):
            return ops.record(self.recording, func, args, kwargs, self.place)
        if in_fake_mode():
            return func(*args, **kwargs)
        if not found:
            return self._factory(func, args, kwargs)
        return self._on_real(func, args, kwargs, found)

    def _factory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an operation that makes a tensor from nothing."""
        place = self.place
        device = kwargs.get("device")
        if not op_info(func).has_device:
            return func(*args, **kwargs)
        if place is None and device == _META:
            # Asked for by torch itself, for the device of a deferred tensor: a caller
            # who asks for meta is served by the function mode.
            place = Place(None)
        if place is None:
            place = Place(None if device is None else self.normal(device))
        return ops.record(self.recording, func, args, kwargs, place)

    def _on_real(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: list[Tensor]
    ) -> Any:
        """Run an operation on real tensors for real, unless it leaves them."""
        if func is torch.ops.aten.lift_fresh.default:
            storage = found[0].untyped_storage()
            if not storage.resizable():  # numpy's memory: stays real, and shared
                self.recording.borrowed[storage._cdata] = storage
                return found[0]
            return constant(self.recording, found[0], self.default_place())
        if self.place is not None and op_info(func).has_device:
            return ops.record(self.recording, func, args, kwargs, self.place)
        if any(tensor.device == _META for tensor in found):
            result = func(*args, **kwargs)
            if func in CASTS:
                note_cast(self.recording, found, result)
            return result
        device = kwargs.get("device")
        if device is not None and device.type not in ("cpu", "meta"):
            place = Place(self.normal(device))
            return ops.record(self.recording, func, args, kwargs, place)
        if op_info(func).draws:
            return self._draw_real(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Draw for a real tensor at its place in the recorded order."""
        info = op_info(func)
        targets = list(info.written(args, kwargs))
        copies = {
            id(t): constant(self.recording, t, torch.device("cpu")) for t in targets
        }
        swapped = tuple(copies.get(id(arg), arg) for arg in args)
        result = ops.record(self.recording, func, swapped, kwargs)
        for target in targets:
            with no_dispatch():
                target.copy_(late.early_value(value_of(copies[id(target)])))
        return targets[0] if targets else result

    def normal(self, device: torch.device) -> torch.device | None:
        """Return `None` for the recording's own device, else the device."""
        own = self.recording.device
        if device.type == own.type and device.index in (None, own.index):
            return None
        return device

    def default_place(self) -> torch.device | None:
        """Return the place that a factory without a device argument uses."""
        return None if self.place is None else self.place.device


def tensors_in(items: Any) -> list[Tensor]:
    """Return the tensors in a nest of arguments."""
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_in(item))
    return found
