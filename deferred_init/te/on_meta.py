"""`on_meta`: build anything without memory, however it spells its device.

[Note: How Transformer Engine escapes from meta]
Its constructors compare `device == "meta"`, which a `torch.device` never equals, and
then initialize on the GPU at once; they default to `device="cuda"`, which wins over
`with torch.device("meta")`; they refuse to split a parameter on `"meta"`; rotary
embeddings and `softmax_offset` always allocate on the GPU; and on a machine without
one nothing can be built at all. Inside `on_meta` the constructors of TE's classes run
with `device=torch.device("meta")`, in a mode that sends allocations for an accelerator
to meta, with a `reset_parameters` that waits, and with answers to "is there a GPU?"
(and see `constructor_calls.py`). All of it is undone on leaving.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from deferred_init.te.constructed import remember_rotary_dim
from deferred_init.te.constructor_calls import replacements
from deferred_init.te.init_records import remember_init_records

__all__ = ["on_meta", "te_on_meta"]

OnModule = Callable[[nn.Module], None]
Around = Callable[[], AbstractContextManager[Any]]

_ROOTS = (
    ("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule"),
    ("transformer_engine.pytorch.ops.op", "FusibleOperation"),
    ("transformer_engine.pytorch.attention.rope", "RotaryPositionEmbedding"),
    ("transformer_engine.pytorch.attention", "MultiheadAttention"),
    ("transformer_engine.pytorch", "TransformerLayer"),
)
_META = torch.device("meta")
# Reads the arguments of `module.to`; a number means the accelerator that is here.
_PARSE_TO = getattr(torch._C._nn, "_parse_to", None)
_ACCELERATORS = frozenset({"cuda", "xpu", "mps", "hpu", "npu"})


@contextmanager
def on_meta(on_module: OnModule | None = None) -> Iterator[None]:
    """Build models without memory: Transformer Engine, torch and Hugging Face alike.

    Whatever the code inside says (`device="meta"`, `device=torch.device("meta")`,
    `device="cuda"`, no device at all, an outer `with torch.device(...)`), parameters
    and buffers come out on the meta device. Only an explicit CPU device is obeyed:
    constructors compute small tables with it. Modules of torch and others can then
    be materialized as far as their classes are known; to record how arbitrary code
    fills them use `deferred_init.deferred_init`.

    Args:
        on_module: Called with every Transformer Engine module or op that owns
            deferred parameters or buffers, when its constructor has finished: the
            place in the order of construction where eager would have drawn its
            random numbers. A recorder puts its mark there.

    Example:
        >>> import torch, deferred_init as di
        >>> with di.on_meta():
        ...     model = torch.nn.Linear(2, 2)
        >>> model.weight.is_meta
        True
    """
    with (
        _patched(on_module, nullcontext) as building,
        torch.device("meta"),
        _AcceleratorToMeta(),
    ):
        building.num_modes = torch._C._len_torch_function_stack()
        yield


@contextmanager
def te_on_meta(
    on_module: OnModule | None = None, around: Around = nullcontext
) -> Iterator[None]:
    """Build only Transformer Engine's modules and ops on meta.

    Args:
        on_module: As in `on_meta`.
        around: Entered around each outermost construction; a recorder passes what
            switches its own modes off.
    """
    with _patched(on_module, around):
        yield


@contextmanager
def _patched(on_module: OnModule | None, around: Around) -> Iterator[_Building]:
    with ExitStack() as stack:
        building = _Building(on_module, around)
        for cls in _classes():
            _patch(stack, cls, building)
        has_gpu = torch.cuda.is_available()
        if building.found:
            for module, name, function in replacements(has_gpu=has_gpu):
                _swap(stack, module, name, function)
        if building.found and not has_gpu:
            _swap(stack, torch.cuda, "is_available", lambda: True)
            _swap(stack, torch.cuda, "current_device", lambda: 0)
        yield building


class _AcceleratorToMeta(TorchFunctionMode):
    """Sends whatever is to be allocated on, or moved to, an accelerator to meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and _is_accelerator(device):
            kwargs = {**kwargs, "device": _META}
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and isinstance(args[1], (str, torch.device, int))
            and _is_accelerator(args[1])
        ):
            args = (args[0], _META, *args[2:])
        elif func is _PARSE_TO and args and isinstance(args[0], int):
            args = (_META, *args[1:])
        return func(*args, **kwargs)


def _is_accelerator(device: Any) -> bool:
    if isinstance(device, int):
        return True
    known = device if type(device) is torch.device else torch.device(device)
    return known.type in _ACCELERATORS


class _Building:
    """What is under construction in this context."""

    def __init__(self, on_module: OnModule | None, around: Around) -> None:
        self.found = False
        self.num_modes = -1
        """Function modes in force inside `on_meta`: the same again do nothing more."""
        self.active: list[nn.Module] = []
        self._on_module = on_module
        self._around = around

    @contextmanager
    def construct(self, module: nn.Module) -> Iterator[None]:
        """Run the constructor of a module; nested calls are of its base classes."""
        nested = any(module is other for other in self.active)
        outermost = not self.active
        self.active.append(module)
        try:
            if outermost and torch._C._len_torch_function_stack() != self.num_modes:
                with self._around(), torch.device("meta"), _AcceleratorToMeta():
                    yield
            else:
                yield
        finally:
            self.active.pop()
        if not nested and self._on_module is not None and _owns_deferred(module):
            self._on_module(module)


def _owns_deferred(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    is_fused = hasattr(module, "basic_ops")  # it only registers its ops' parameters
    return not is_fused and any(t is not None and t.is_meta for t in held)


def _classes() -> list[type]:
    """Return all loaded classes of TE, and subclasses of them."""
    found: dict[type, None] = {}
    pending: list[Any] = [
        getattr(sys.modules.get(module), name, None) for module, name in _ROOTS
    ]
    while pending:
        cls = pending.pop()
        if cls is not None and cls not in found:
            found[cls] = None
            pending.extend(cls.__subclasses__())
    return list(found)


def _patch(stack: ExitStack, cls: Any, building: _Building) -> None:
    own = vars(cls)
    building.found = True
    if "__init__" in own:
        _swap(stack, cls, "__init__", _deferring_init(own["__init__"], building))
    # Ops ask for the device themselves; modules call it whatever the device is.
    if "reset_parameters" in own:
        _swap(
            stack, cls, "reset_parameters", _waiting(own["reset_parameters"], building)
        )


def _deferring_init(init: Any, building: _Building) -> Any:
    parameters = _parameters(init)
    takes_device, place = "device" in parameters, parameters.get("device")
    is_rotary = "rotary_percent" in parameters

    @functools.wraps(init)
    def deferred(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if takes_device:
            at = len(args) if place is None else place - 1
            asked = args[at] if at < len(args) else kwargs.get("device")
            if asked is not None and torch.device(asked).type == "cpu":
                init(self, *args, **kwargs)
                return
            # Not the string: TE refuses to split parameters for that one.
            if at < len(args):
                args = (*args[:at], _META, *args[at + 1 :])
            else:
                kwargs["device"] = _META
        with building.construct(self):
            init(self, *args, **kwargs)
        remember_init_records(self)
        if is_rotary:
            bound = inspect.signature(init).bind(self, *args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            remember_rotary_dim(self, values["dim"], values["rotary_percent"])

    return deferred


@functools.lru_cache(maxsize=1024)
def _parameters(init: Any) -> dict[str, int | None]:
    """The places of a constructor's arguments; None for one by keyword alone."""
    found: dict[str, int | None] = {}
    for place, one in enumerate(inspect.signature(init).parameters.values()):
        found[one.name] = None if one.kind is one.KEYWORD_ONLY else place
    return found


def _waiting(reset: Any, building: _Building) -> Any:
    @functools.wraps(reset)
    def wait(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(self is module for module in building.active):
            return None
        return reset(self, *args, **kwargs)

    return wait


def _swap(stack: ExitStack, holder: Any, name: str, value: Any) -> None:
    """Set an attribute for the time of the context."""
    stack.callback(setattr, holder, name, vars(holder)[name])
    setattr(holder, name, value)
