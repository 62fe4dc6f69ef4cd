"""`DeferredTensor`: a meta tensor that knows how its values will be made.

[Note: A subclass over meta, not a wrapper]
The tensor is itself a meta tensor with a real meta storage, so that shapes, strides
and aliasing are torch's own. The subclass adds two things: operations on it are
recorded (`__torch_dispatch__`), and Python code that asks for its device inside a
constructor hears the device that the constructor believes to be on. Outside it says
meta, so that everything that knows meta keeps working. No slots and no weak
references, because either would stop `torch.utils.swap_tensors`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.record.fills import fill_method
from deferred_init.record.graph import Recording
from deferred_init.record.indices import with_values
from deferred_init.record.nodes import Storage, Value
from deferred_init.record.paused import no_dispatch
from deferred_init.record.problems import RecordError, user_line

__all__ = ["DeferredTensor", "deferred_class", "final_class", "late", "make_parameter"]
__all__ += ["new_value", "note_holder", "user_attributes", "value_of"]
__all__ += ["without_internals", "wrap"]

_INTERNAL = frozenset({"_value", "_is_param", "_final_class"})
# These look at `is_meta` to skip work that a deferred tensor wants recorded.
_RECORDED_CALLERS = frozenset({"torch.nn.init"})
_base = torch._C.TensorBase
_make = torch.Tensor._make_subclass


def wrap(value: Value, requires_grad: bool = False) -> DeferredTensor:
    """Make a new deferred tensor object for a value."""
    tensor: DeferredTensor = _make(DeferredTensor, value.meta, requires_grad)
    tensor.__dict__["_value"] = value
    return tensor


def value_of(tensor: Tensor) -> Value:
    """Return what a deferred tensor refers to."""
    value: Value = tensor.__dict__["_value"]
    return value


class _Late:
    """What the layers above this file provide; they set it when they are imported."""

    dispatch: Callable[..., Any]
    as_value: Callable[[Recording, Tensor], Value]
    to: Callable[..., Tensor]
    deepcopy: Callable[..., Tensor]
    shallow_copy: Callable[..., Tensor]
    early_value: Callable[[Value], Tensor]
    early_device: Callable[[Recording], torch.device]
    defer_in_place: Callable[[Tensor, Value], None]


late = _Late()


class DeferredTensor(torch.Tensor):
    """A tensor whose operations are recorded; see the note at the top of the file."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __records_operations__ = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of the class that it stands for.

        `accelerate.init_empty_weights` calls `type(parameter)(data, **attributes)`.
        """
        final = _stands_for(cls, "_is_param" in kwargs)
        return final(*args, **without_internals(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return late.dispatch(func, args, kwargs or {})

    uniform_ = fill_method("uniform_", draws=True)
    normal_ = fill_method("normal_", draws=True)
    fill_ = fill_method("fill_", draws=False)
    zero_ = fill_method("zero_", draws=False)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the constructor believes in, while it runs; then meta."""
        value = value_of(self)
        if not value.recording.active:
            return _META
        return value.recording.device if value.device is None else value.device

    @property
    def lacks_memory(self) -> bool:
        """Whether it is deferred: not while its constructor runs."""
        return not value_of(self).recording.active

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether it looks like a meta tensor: not while its constructor runs."""
        if not self.lacks_memory:
            return False
        caller = sys._getframe(1)
        named = caller.f_globals.get("__name__") in _RECORDED_CALLERS
        return not (named or caller.f_code is nn.Module._load_from_state_dict.__code__)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether it claims to be on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Whether it claims to be on the CPU."""
        return self.device.type == "cpu"

    def get_device(self) -> int:
        """Return the index of the claimed device, -1 for the CPU."""
        device = self.device
        return -1 if device.type in ("cpu", "meta") else device.index or 0

    @property
    def data(self) -> Tensor:
        """Another tensor object for the same value; assigning one shares its value."""
        return wrap(value_of(self))

    @data.setter
    def data(self, source: Tensor) -> None:
        other = late.as_value(value_of(self).recording, source)
        _base.data.__set__(self, wrap(other))  # type: ignore[attr-defined]
        self.__dict__["_value"] = other

    def detach(self) -> Tensor:
        """Return another tensor object for the same value."""
        note_holder(self)
        return wrap(value_of(self))

    def as_subclass(self, cls: Any) -> Any:
        """Return a deferred tensor of the caller's class for the same value."""
        return make_parameter(cls, self, self.requires_grad)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record a conversion; a CUDA device need not exist yet."""
        return late.to(self, args, kwargs)

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Record a move to a CUDA device; it need not exist yet."""
        if isinstance(device, int):
            return self.to(torch.device("cuda", device))
        return self.to(torch.device("cuda" if device is None else device))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record a move to the CPU."""
        return self.to(torch.device("cpu"))

    def share_memory_(self) -> Tensor:
        """Refuse: there is no memory that processes could share."""
        raise RecordError(
            f"`share_memory_` at {user_line()} is asked of a tensor without memory: "
            "materialize the model first, then call `model.share_memory()`"
        )

    def __getitem__(self, index: Any) -> Tensor:
        result: Tensor = _base.__getitem__(self, with_values(index))
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch would put a number into a plain meta tensor, which forgets it.
        if isinstance(value, (bool, int, float, complex)):
            with torch._C.DisableTorchFunction(), no_dispatch():
                value = torch.tensor(value, dtype=self.dtype)
        if not isinstance(value, DeferredTensor):
            value = wrap(late.as_value(value_of(self).recording, value))
        _base.__setitem__(self, with_values(index), value)

    def tolist(self) -> Any:
        """Compute the values now and return them as Python numbers."""
        return _early(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the values now and return them as a read-only array."""
        array = _early(self).numpy(*args, **kwargs)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def __format__(self, spec: str) -> str:
        # As torch does it: a number is written as one, all else as an object.
        if not self.dim():
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __carried_attributes__(self) -> dict[str, Any]:
        """Return the attributes that stay when the object becomes real."""
        return user_attributes(self)

    def __copy__(self) -> Tensor:
        return late.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return late.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a deferred tensor has no values to save: materialize the model before "
            "saving, pickling or sending it to another process"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "DeferredParameter" if "_is_param" in self.__dict__ else "DeferredTensor"
        tail = ", requires_grad=True" if self.requires_grad else ""
        where = value_of(self).device or value_of(self).recording.device
        return (
            f"{kind}(size={tuple(self.shape)}, dtype={self.dtype}, "
            f"recorded for {where}{tail})"
        )


_META = torch.device("meta")
_classes: dict[type, type[DeferredTensor]] = {}


def deferred_class(final: type) -> type[DeferredTensor]:
    """Return the deferred class that also is an instance of the caller's class."""
    if final is Tensor or final is nn.Parameter:
        return DeferredTensor
    known = _classes.get(final)
    if known is None:
        body = {
            name: DeferredTensor.__dict__[name]
            for name in ("__torch_function__", "__torch_dispatch__", "__reduce_ex__")
        }
        known = _classes[final] = type(
            f"Deferred{final.__name__}", (DeferredTensor, final), body
        )
    return known


def final_class(tensor: Tensor) -> type:
    """Return the class that a deferred tensor has when it is real."""
    return _stands_for(type(tensor), "_is_param" in tensor.__dict__)


def _stands_for(deferred: type, is_param: bool) -> type:
    """Return the class that a class of deferred tensors stands for."""
    final = next(b for b in deferred.__mro__ if not issubclass(b, DeferredTensor))
    return nn.Parameter if final is Tensor and is_param else final


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the Python attributes that a user put on a deferred tensor."""
    found = without_internals(tensor.__dict__)
    marked = "_is_param" in tensor.__dict__ and final_class(tensor) is not nn.Parameter
    return {**found, "_is_param": True} if marked else found  # as torch marks them


def without_internals(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a deferred tensor but those of its class."""
    return {k: v for k, v in attributes.items() if k not in _INTERNAL}


def _early(tensor: Tensor) -> Tensor:
    """Compute a deferred tensor now, on the CPU side, without disturbing the rest."""
    return late.early_value(value_of(tensor))


def new_value(
    recording: Recording,
    index: int,
    meta: Tensor,
    device: torch.device | None,
    storage: Storage | None = None,
) -> Value:
    """Make the value of a new tensor; without `storage` it owns a new one."""
    if storage is None:
        storage = Storage()
        storage.writers.append(index)
    return Value(recording, storage, index, meta, device)


def make_parameter(
    final: type, data: Tensor, requires_grad: bool = True
) -> DeferredTensor:
    """Make a deferred tensor of a parameter class over the values of another one."""
    value = value_of(data)
    result: DeferredTensor = _make(deferred_class(final), value.meta, requires_grad)
    result.__dict__["_value"] = value
    if final is nn.Parameter:
        result.__dict__["_is_param"] = True
    return result


def note_holder(tensor: Tensor) -> None:
    """Note what a Parameter holds after the constructor, see `places.py`."""
    value = value_of(tensor)
    if not value.recording.active and isinstance(tensor, nn.Parameter):
        value.recording.held.setdefault(value, tensor.__dict__)
