"""What Transformer Engine knows of how each parameter of a module is made.

[Note: Parameters without a record]
`register_parameter` of TE's modules keeps a record: init function, named generator,
place of the quantizer. A parameter that a user's subclass adds has a record of nothing
but defaults, and `reset_parameters` draws it from a normal distribution, whatever the
subclass had put there. Releases up to 2.9 also make such a record whenever a parameter
is registered again. So a record of defaults says nothing: the parameter is left to
other initializers, and one that a subclass added is hidden while TE's method runs.
For models built inside `on_meta` the records of the time of construction are known,
and count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from deferred_init.record.paused import without_default_device

__all__ = ["has_record", "init_context", "is_of_te", "kept_init_records", "record_of"]
__all__ += ["only_known_init_functions", "remember_init_records"]

_NAMES = re.compile(r"(layer_norm_|fc1_|fc2_)?(weight|bias)\d*")
_DEFAULT = "init_method_normal.<locals>."
# Of `torch.nn.init`, those that allocate nothing on the default device.
_IN_PLACE = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "constant_", "ones_", "zeros_"}
    | {"xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"}
)
_records: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def remember_init_records(module: nn.Module) -> None:
    """Keep the records that a constructor of TE has made."""
    records = vars(module).get("param_init_meta")
    if records:
        _records.setdefault(module, {})
        for name, record in records.items():
            if not _is_default(record):
                _records[module].setdefault(name, record)


def record_of(module: Any, name: str) -> Any:
    """Return the record of a parameter, or None if there is none."""
    return _records.get(module, {}).get(name) or module.param_init_meta.get(name)


def has_record(module: Any, name: str) -> bool:
    """Whether TE knows how to make a parameter."""
    record = record_of(module, name)
    return record is not None and not _is_default(record)


@contextmanager
def kept_init_records(module: Any) -> Iterator[None]:
    """Let TE's own method run with the right records, for its own parameters."""
    saved = {**module.param_init_meta, **_records.get(module, {})}
    module.param_init_meta.update(saved)
    order = list(module._parameters)
    hidden = {
        name: module._parameters.pop(name)
        for name in order
        if not (has_record(module, name) or is_of_te(module, name))
        and module._parameters[name] is not None
    }
    try:
        yield
    finally:
        module.param_init_meta.update(saved)
        if hidden:
            now = {**module._parameters, **hidden}
            module._parameters.clear()
            module._parameters.update({name: now.pop(name) for name in order})
            module._parameters.update(now)


def init_context(module: Any) -> AbstractContextManager[object]:
    """Leave out the default device where all init functions are torch's or TE's."""
    tracked = any(
        record.get_rng_state_tracker is not None
        for record in module.param_init_meta.values()
    )
    if tracked or not only_known_init_functions(module):
        return nullcontext()
    return without_default_device()


def only_known_init_functions(module: Any) -> bool:
    """Whether all init functions are torch's or TE's: they fill, and keep nothing."""
    for record in module.param_init_meta.values():
        source = getattr(record.init_fn, "__module__", None) or ""
        of_torch = source == "torch.nn.init" and record.init_fn.__name__ in _IN_PLACE
        if not (of_torch or source.startswith("transformer_engine.")):
            return False
    return True


def is_of_te(module: Any, name: str) -> bool:
    """Whether TE's code itself asks for a parameter of that name."""
    listed = (
        *getattr(module, "weight_names", ()),
        *getattr(module, "bias_names", ()),
    )
    return name in listed or _NAMES.fullmatch(name) is not None


def _is_default(record: Any) -> bool:
    name = getattr(record.init_fn, "__qualname__", "")
    return (
        record.fp8_meta_index is None
        and record.get_rng_state_tracker is None
        and (record.init_fn is None or name.startswith(_DEFAULT))
    )
