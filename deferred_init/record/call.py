"""The arguments of one operation, as the node and as the meta device see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.record.capture import capture
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import External, ForeignValue, Storage, Value
from deferred_init.record.problems import RecordError, user_line
from deferred_init.record.tensor import DeferredTensor, note_holder, value_of

__all__ = ["Call"]

_META = torch.device("meta")


class Call:
    """One operation with its arguments seen three ways.

    Attributes:
        args: As they go into the node.
        meta: As they go to the meta device.
        owners: Deferred argument by the identity of its meta tensor.
        storages: Known storages by the address of their meta storage.
    """

    __slots__ = (
        "args",
        "inherits",
        "kwargs",
        "meta",
        "meta_kwargs",
        "owners",
        "recording",
        "shapes_only",
        "storages",
        "tensors",
    )

    def __init__(
        self,
        recording: Recording,
        args: Any,
        kwargs: dict[str, Any],
        *,
        shapes_only: bool,
    ) -> None:
        self.recording = recording
        self.shapes_only = shapes_only
        self.owners: dict[int, DeferredTensor] = {}
        self.storages: dict[int, Storage] = {}
        self.inherits: Value | None = None
        self.tensors = 0
        generators = [arg for arg in args if isinstance(arg, torch.Generator)]
        if generators:  # the last argument of `torch.poisson`, elsewhere a keyword
            args, kwargs = args[:-1], {**kwargs, "generator": generators[0]}
        pairs = [self._see(arg) for arg in args]
        self.args = tuple(pair[0] for pair in pairs)
        self.meta = tuple(pair[1] for pair in pairs)
        self.kwargs: dict[str, Any] = {}
        self.meta_kwargs: dict[str, Any] = {}
        for key, arg in kwargs.items():
            self.kwargs[key], self.meta_kwargs[key] = self._see(arg)

    def _see(self, arg: Any) -> tuple[Any, Any]:
        if isinstance(arg, DeferredTensor):
            self.tensors += 1
            note_holder(arg)
            value = value_of(arg)
            meta = value.meta
            if self.inherits is None or (arg.dim() and not self.inherits.meta.dim()):
                self.inherits = value
            self.owners[id(meta)] = arg
            self.storages[meta.untyped_storage()._cdata] = value.storage
            if value.recording is not self.recording:
                return ForeignValue(value), meta
            return value, meta
        if isinstance(arg, Tensor):
            self.tensors += 1
            if arg.device == _META:
                if self.shapes_only:
                    return External(arg, guarded=False), arg
                raise RecordError(
                    "a recorded operation reads a plain meta tensor, which has no "
                    f"values, at {user_line()}"
                )
            return capture(self.recording, arg), arg.to(_META)
        if isinstance(arg, (list, tuple)):
            pairs = [self._see(item) for item in arg]
            kind = type(arg) if type(arg) in (list, tuple) else tuple
            return kind(p[0] for p in pairs), kind(p[1] for p in pairs)
        if isinstance(arg, torch.UntypedStorage) and arg.device == _META:
            raise RecordError(
                f"a tensor is made over a bare storage at {user_line()}, of which a "
                "recording does not know whose it is: pass the tensor itself, as in "
                "`new.set_(tensor)`, or take a view of it"
            )
        return arg, arg
