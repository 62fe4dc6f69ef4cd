"""Modules that stay out of the recording because they can defer themselves.

Transformer Engine's modules and operations know how to be built on meta and to
initialize themselves later, with quantized weights that no recording could make. So
inside a constructor they are built on meta, as plain TE modules, and a mark in the
recording keeps their place in the order of draws.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.constructor_names import INIT_METHODS
from deferred_init.record.graph import Recording
from deferred_init.record.paused import plain_torch
from deferred_init.record.problems import user_line
from deferred_init.record.schema import op_info
from deferred_init.record.tensor import DeferredTensor

__all__ = ["CASTS", "external_classes", "note_cast", "note_left_out"]
__all__ += ["place_of", "stand_aside"]

_places: WeakKeyDictionary[nn.Module, tuple[Any, int]] = WeakKeyDictionary()

CASTS = frozenset({torch.ops.aten._to_copy.default})
_BASES = (
    ("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule"),
    ("transformer_engine.pytorch.ops.op", "FusibleOperation"),
)


def external_classes() -> list[type]:
    """Return the loaded classes that are built on meta inside a constructor.

    These are all subclasses of Transformer Engine's bases that take a `device`.
    """
    found: dict[type, None] = {}
    for module_name, name in _BASES:
        base: Any = getattr(sys.modules.get(module_name), name, None)
        if base is not None:
            for cls in _subclasses(base):
                init = vars(cls).get("__init__")
                if init is not None and "device" in inspect.signature(init).parameters:
                    found[cls] = None
    return list(found)


def _subclasses(base: Any) -> Iterator[type]:
    """Yield a class and everything derived from it."""
    yield base
    for cls in base.__subclasses__():
        yield from _subclasses(cls)


def stand_aside(init: Callable[..., None], active: Any) -> Callable[..., None]:
    """Return an `__init__` that builds on meta, outside of the recording.

    Args:
        init: The class's own `__init__`.
        active: Holds what this thread records, as `recorder`.
    """
    signature = inspect.signature(init)

    @functools.wraps(init)
    def built_on_meta(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        recorder = active.recorder
        if recorder is None:
            init(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        asked = bound.arguments.get("device")
        if asked is not None and torch.device(asked).type not in ("cuda", "meta"):
            init(self, *args, **kwargs)
            return
        own = asked is None or torch.device(asked).type != "meta"
        # Not the string: Transformer Engine refuses to split parameters for that one.
        bound.arguments["device"] = torch.device("meta")
        active.recorder = None
        vars(self)["reset_parameters"] = _wait
        try:
            with plain_torch(), _default_device(recorder.recording.device):
                init(*bound.args, **bound.kwargs)
        finally:
            active.recorder = recorder
            vars(self).pop("reset_parameters", None)
        if own:
            for module in _children_first(self):
                _mark(recorder.recording, module)

    return built_on_meta


def _wait(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for `reset_parameters` in a constructor: it runs when there is memory.

    Transformer Engine's own asks by the string whether to wait.
    """


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's parts before the module: a part owns what a whole aliases."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _default_device(device: torch.device) -> AbstractContextManager[Any]:
    """Name a default device, so that no code asks an absent GPU for its index."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cuda", device.index or 0)
    return nullcontext()


def _mark(recording: Recording, module: nn.Module) -> None:
    """Mark the place of a module that has meta parameters of its own."""
    fresh = [
        p
        for p in module._parameters.values()
        if p is not None and p.is_meta and not isinstance(p, DeferredTensor)
    ]
    known = recording.external
    fresh = [p for p in fresh if id(p) not in known]
    if fresh:
        known.update((id(p), p) for p in fresh)
        recording.external_storages.update(storage_key(p) for p in fresh)
        watch = recording.watch
        tracked = watch and watch.before_mark(module)
        mark = recording.mark(module)
        mark.tracked = tracked
        _places[module] = (recording, mark.index)
        if watch:
            watch.after_mark()


def note_cast(recording: Recording, found: list[Tensor], result: Tensor) -> None:
    """Note that a tensor is one of a module left to itself, in another dtype."""
    mine = recording.external_storages
    if mine and any(storage_key(tensor) in mine for tensor in found):
        mine.add(storage_key(result))


def note_left_out(recording: Recording, func: Any, found: list[Tensor]) -> None:
    """Note an operation on values that such a module has not made yet.

    Init methods do not count, which run again when it has, nor does a change of dtype.
    """
    mine = recording.external_storages
    if func in CASTS or not any(storage_key(tensor) in mine for tensor in found):
        return
    returned = func._schema.returns
    if not op_info(func).mutated_names and all(one.alias_info for one in returned):
        return  # a view, or no tensor at all
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in INIT_METHODS:
        frame = frame.f_back
    if frame is None:
        name = str(func._schema.name).rpartition("::")[2]
        recording.left_out[f"{name}` at `{user_line()}"] = None


def place_of(module: nn.Module) -> tuple[Any, int] | None:
    """Return the recording in which a module has its mark, and the mark's index."""
    return _places.get(module)
