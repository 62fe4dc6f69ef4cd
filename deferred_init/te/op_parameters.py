"""Which parameters and buffers of an op its own methods make.

[Note: What a subclass adds to an op]
The methods of Transformer Engine's ops make `weight` and `bias`, or numbered ones.
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
_NAMES = re.compile(r"(weight|bias)\d*")
_ALL = frozenset(
    {"parameters", "named_parameters", "_parameters", "buffers", "named_buffers"}
    | {"_buffers", "getattr", "vars", "__dict__", "state_dict"}
)


def makes(kind: type, name: str) -> bool:
    """Whether the methods of a class of ops make a parameter or buffer of that name."""
    if _NAMES.fullmatch(name) is not None or not hasattr(kind, "reset_parameters"):
        return True  # what a hook alone leaves without memory is noticed
    named = _named_by_user(kind)
    return named is None or name in named or not _ALL.isdisjoint(named)


@by_type
def _named_by_user(kind: type) -> frozenset[str] | None:
    """Names and strings in the user's methods that make; None if there is no code."""
    found: set[str] = set()
    done: set[types.CodeType] = set()
    for base in kind.__mro__:
        if base.__module__.startswith(("transformer_engine.", "torch.")):
            continue
        for maker in MAKERS:
            function = vars(base).get(maker)
            if function is not None and not isinstance(function, types.FunctionType):
                return None
            if function is not None:
                _collect(function, kind, found, done)
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
