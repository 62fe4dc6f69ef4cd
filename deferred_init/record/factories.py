"""The function mode under which a constructor runs while it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from deferred_init.record.ambient import autocast_on
from deferred_init.record.append import Draw, append
from deferred_init.record.capture import constant
from deferred_init.record.mode import RecordOperations, tensors_in
from deferred_init.record.moves import move
from deferred_init.record.nodes import Place
from deferred_init.record.paused import in_fake_mode, no_dispatch, plain_torch
from deferred_init.record.tensor import DeferredTensor, late, new_value, value_of, wrap
from deferred_init.record.whole import WHOLE, record_whole

__all__ = ["RecordFactories"]

_META = torch.device("meta")


class RecordFactories(TorchFunctionMode):
    """Handles factories and device arguments before torch parses them."""

    def __init__(self, operations: RecordOperations) -> None:
        super().__init__()
        self.operations = operations
        self.recording = operations.recording

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if in_fake_mode():
            return func(*args, **(kwargs or {}))
        recording = self.recording
        recording.autocast = autocast_on()
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if kwargs and kwargs.get("device") is not None:
            return self.placed(func, args, kwargs)
        if func in WHOLE:
            return record_whole(recording, func, args, kwargs or {})
        if func in _CONSTRUCTORS:
            return self.call(func, args, kwargs or {}, Place(None))
        if type(func) is _SETTER and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(func, args)
        return func(*args, **(kwargs or {}))

    def place(self, device: Any) -> Place | None:
        """Read a device argument; `None` means that the caller asks for meta."""
        if device is None:
            return Place(None)
        if isinstance(device, torch.device):
            found = device
            pinned = False
        else:
            found = (
                torch.device("cuda", device)
                if type(device) is int
                else (torch.device(device))
            )
            pinned = self.recording.device.type == "cpu" == found.type
        if found == _META:
            return None
        return Place(found if pinned else self.operations.normal(found))

    def placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that has a device argument."""
        place = self.place(kwargs["device"])
        if place is None:
            if any(isinstance(arg, DeferredTensor) for arg in args):
                return func(*(_meta_of(arg) for arg in args), **kwargs)
            with no_dispatch():
                return func(*args, **kwargs)
        return self.call(func, args, kwargs, place)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], place: Place) -> Any:
        """Call a factory on meta; the dispatch mode records it for its place."""
        before = self.operations.place
        self.operations.place = place
        try:
            return func(*args, **{**kwargs, "device": _META})
        finally:
            self.operations.place = before


def _meta_of(arg: Any) -> Any:
    """Return the plain meta tensor of a deferred one."""
    return value_of(arg).meta if isinstance(arg, DeferredTensor) else arg


_PLAIN_OPTIONS = frozenset({"device", "dtype", "requires_grad", "generator"})
_DRAWING = frozenset({torch.rand, torch.randn})


def _factory(
    mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record a common factory as one node, without dispatching it."""
    place = mode.place(kwargs.get("device"))
    plain = kwargs.keys() <= _PLAIN_OPTIONS and not _in_transform()
    if place is None or not plain or not _sized(func, args):
        if kwargs.get("device") is None:
            return mode.call(func, args, kwargs, Place(None))
        return mode.placed(func, args, kwargs)
    recording = mode.recording
    generator = kwargs.get("generator")
    draw = Draw(generator) if func in _DRAWING else None
    dtype = kwargs.get("dtype")
    with recording.lock:
        with no_dispatch():
            if func is torch.full:
                meta = torch.full(*args, dtype=dtype, device=_META)
            else:
                meta = torch.empty(*args, dtype=dtype, device=_META)
        options = {"dtype": meta.dtype, "device": place}
        node = append(recording, func, args, options, draw=draw, device=place.device)
        value = new_value(recording, node.index, meta, place.device)
        node.outs = (value,)
    return wrap(value, kwargs.get("requires_grad", False))


def _in_transform() -> bool:
    """Whether `torch.func` has a say: `vmap` draws once for each of a batch."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _sized(func: Any, args: Any) -> bool:
    """Whether the positional arguments are a plain size (and a plain fill value)."""
    if func is torch.full:
        if len(args) != 2 or isinstance(args[1], Tensor):
            return False
        args = args[:1]
    return bool(args) and all(
        type(a) is int
        or (isinstance(a, (tuple, list)) and all(type(i) is int for i in a))
        for a in args
    )


def _from_data(
    mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record `torch.tensor` and its kin: values that the program states."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    place = mode.place(kwargs.get("device"))
    if place is None:
        with no_dispatch():
            return func(*args, **kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
    if isinstance(data, DeferredTensor):
        if func is torch.tensor:
            result: Tensor = data.detach().clone()
        else:
            result = data
        options: dict[str, Any] = {}
        if kwargs.get("dtype") is not None:
            options["dtype"] = kwargs["dtype"]
        if kwargs.get("device") is not None:
            options["device"] = place.device or mode.recording.device
        result = result.to(**options) if options else result
        return result.requires_grad_(kwargs.get("requires_grad", False))
    if func is not torch.tensor and not isinstance(
        data, (list, tuple, int, float, bool)
    ):
        return _shared(mode, func, args, kwargs)
    if isinstance(data, (list, tuple)) and any(
        isinstance(t, DeferredTensor) for t in tensors_in(data)
    ):
        data = _early_nest(data)
    with plain_torch():
        real = func(data, *args[1:], **rest, device="cpu")
    result = constant(mode.recording, real, place.device)
    if kwargs.get("requires_grad"):
        result.requires_grad_()
    return result


def _new_tensor(
    mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Record `Tensor.new_tensor`: `torch.tensor` with the kind and place of another."""
    owner, *data = args
    options = {key: value for key, value in kwargs.items() if value is not None}
    if not data:
        data = [options.pop("data")]
    options = {"dtype": owner.dtype, "device": owner.device, **options}
    return _from_data(mode, torch.tensor, tuple(data), options)


def _sparse(mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a sparse tensor of numbers for real: it has no storage to record on."""
    rest = dict(kwargs)
    if rest.get("device") is not None and mode.place(rest["device"]) is not None:
        rest["device"] = late.early_device(mode.recording)
    args = [_early_nest(arg) for arg in args]
    rest = {key: _early_nest(arg) for key, arg in rest.items()}
    with plain_torch():
        return func(*args, **rest)


def _early_nest(data: Any) -> Any:
    """Compute the deferred tensors in a nest of numbers."""
    if isinstance(data, DeferredTensor):
        return late.early_value(value_of(data))
    if isinstance(data, (list, tuple)):
        return type(data)(_early_nest(item) for item in data)
    return data


def _shared(mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a real tensor over memory that numpy or a file owns."""
    device = kwargs.get("device")
    place = mode.place(device)
    rest = {key: value for key, value in kwargs.items() if key != "device"}
    with plain_torch():
        real: Tensor = func(*args, **rest)
    storage = real.untyped_storage()
    if not storage.resizable():
        mode.recording.borrowed[storage._cdata] = storage
    if device is None and func is torch.from_numpy:
        return real
    if place is not None and (place.device or mode.recording.device).type != "cpu":
        return constant(mode.recording, real, place.device)
    return real


def _new(mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record `Tensor.new` of numbers, which torch would put on meta and forget."""
    numbers = len(args) == 2 and type(args[1]) in (list, tuple) and not kwargs
    if numbers and isinstance(args[0], DeferredTensor):
        return _new_tensor(mode, func, args, {})
    return func(*args, **kwargs)


def _move(mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Move a tensor to a device, or to that of another tensor."""
    return move(mode.recording, mode.operations.normal, func, args, kwargs)


def _parse(_mode: RecordFactories, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Read the arguments of `Module.to` as they are: nothing is made here.

    With meta in the place of its device the module would be moved to meta, and so
    lose what was recorded.
    """
    return func(*args, **kwargs)


def _set_data(func: Any, args: Any) -> Any:
    """Set `.data` of a real tensor to a deferred one: it becomes deferred."""
    target, source = args
    if isinstance(source, DeferredTensor) and not isinstance(target, DeferredTensor):
        late.defer_in_place(target, value_of(source))
        return None
    return func(target, source)


_SETTER = type(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn),
        _factory,
    ),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_data),
    torch.Tensor.new_tensor: _new_tensor,
    **dict.fromkeys(
        (
            torch.sparse_coo_tensor,
            torch.sparse_compressed_tensor,
            *(torch.sparse_csr_tensor, torch.sparse_csc_tensor),
            *(torch.sparse_bsr_tensor, torch.sparse_bsc_tensor),
        ),
        _sparse,
    ),
    **dict.fromkeys((torch.from_numpy, torch.frombuffer), _shared),
    torch.Tensor.new: _new,
    **dict.fromkeys((torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as), _move),
    torch._C._nn._parse_to: _parse,
}
_CONSTRUCTORS = frozenset(_device_constructors()) - _HANDLERS.keys()
