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
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from deferred_init.record.paused import without_default_device

__all__ = ["KeptInitRecords", "has_record", "init_context", "is_of_te", "record_of"]
__all__ += ["only_known_init_functions", "remember_init_records"]

_NAMES = re.compile(r"(layer_norm_|fc1_|fc2_)?(?:weight|bias)(\d*)")
_PARTS = {
    "layer_norm_": {"LayerNormLinear", "LayerNormMLP"},
    "fc1_": {"LayerNormMLP"},
    "fc2_": {"LayerNormMLP"},
}
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
    return _says_how(record_of(module, name))


class KeptInitRecords:
    """Context in which TE's own method has the right records, for its own parameters.

    A class and not a generator: it is entered for every module of a model.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._saved = {**module.param_init_meta, **_records.get(module, {})}
        self._order = list(module._parameters)
        self._hidden: dict[str, nn.Parameter] = {}

    def __enter__(self) -> None:
        """Put the records in place, and hide what a subclass added."""
        module = self._module
        module.param_init_meta.update(self._saved)
        for name in self._order:
            if _says_how(self._saved.get(name)) or is_of_te(module, name):
                continue
            if module._parameters[name] is not None:
                self._hidden[name] = module._parameters.pop(name)

    def __exit__(self, *_error: object) -> None:
        """Bring back what TE's method changed of the records, and what was hidden."""
        params = self._module._parameters
        self._module.param_init_meta.update(self._saved)
        if self._hidden:
            now = {**params, **self._hidden}
            params.clear()
            params.update({name: now.pop(name) for name in self._order})
            params.update(now)


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
    found = _NAMES.fullmatch(name)
    if name in listed or found is None:
        return name in listed
    part, number = found.groups()
    if number:
        return not part and int(number) < getattr(module, "num_gemms", 0)
    kinds = {base.__name__ for base in type(module).__mro__}
    return not part or not kinds.isdisjoint(_PARTS[part])


def _says_how(record: Any) -> bool:
    return record is not None and not _is_default(record)


def _is_default(record: Any) -> bool:
    name = getattr(record.init_fn, "__qualname__", "")
    return (
        record.fp8_meta_index is None
        and record.get_rng_state_tracker is None
        and (record.init_fn is None or name.startswith(_DEFAULT))
    )
