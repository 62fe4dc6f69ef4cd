"""Which parameters and buffers of an op its own methods make.

[Note: What a subclass adds to an op]
The methods of Transformer Engine's ops make what they name: `weight`, `bias` or both.
A user's subclass may register more, and fill it in its constructor; then no method
makes it, and the memory that it would be lent stays as it was found. So it is claimed
only where the user's own methods name it, or go through all parameters.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

from deferred_init.constructor_names import by_type

__all__ = ["MAKERS", "makes"]

MAKERS = ("pre_first_fuser_forward", "reset_parameters")
_NUMBERED = re.compile(r"(weight|bias)\d+")
_OF_TE = frozenset({"weight", "bias"})
_ALL = frozenset(
    {"parameters", "named_parameters", "_parameters", "buffers", "named_buffers"}
    | {"_buffers", "getattr", "vars", "__dict__", "state_dict"}
)


def makes(kind: type, name: str) -> bool:
    """Whether the methods of a class of ops make a parameter or buffer of that name."""
    if not hasattr(kind, "reset_parameters"):
        return True  # what a hook alone leaves without memory is noticed
    named = _named(kind)
    if named is None or name in named:
        return True
    is_grouped = any(base.__name__ == "GroupedLinear" for base in kind.__mro__)
    return is_grouped and (name in _OF_TE or _NUMBERED.fullmatch(name) is not None)


@by_type
def _named(kind: type) -> frozenset[str] | None:
    """Names and strings in the methods that make; None if any name may be meant."""
    found: set[str] = set()
    done: set[types.CodeType] = set()
    for base in kind.__mro__:
        for maker in MAKERS:
            function = vars(base).get(maker)
            if function is None:
                continue
            if not isinstance(function, types.FunctionType):
                return None
            named: set[str] = set()
            _collect(function, kind, named, done)
            if base.__module__.startswith("transformer_engine."):
                named &= _OF_TE
            elif not _ALL.isdisjoint(named):
                return None
            found |= named
    return frozenset(found)


def _collect(
    function: types.FunctionType,
    kind: type,
    found: set[str],
    done: set[types.CodeType],
) -> None:
    """Collect what a function names, and what the methods name that it calls."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    for code in _nested(function.__code__):
        if code in done:
            continue
        done.add(code)
        found.update(code.co_names)
        found.update(each for each in code.co_consts if isinstance(each, str))
        for name in code.co_names:
            method: Any = getattr(kind, name, None)
            of_user = not str(getattr(method, "__module__", "torch.")).startswith(
                ("transformer_engine.", "torch.")
            )
            if of_user and isinstance(method, types.FunctionType):
                _collect(method, kind, found, done)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _nested(each)
