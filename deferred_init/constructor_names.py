"""What the constructors of a class call, read from their code objects.

A module tree does not tell which init methods a constructor called, but the names in
its code do.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch import nn

__all__ = ["by_type", "calls_of", "calls_twice", "constructors", "init_methods"]
__all__ += ["draws_of", "writes_of"]

_METHODS = ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights")
# Their code belongs to frameworks that have initializers of their own.
_FOREIGN = ("torch.", "transformers.modeling_utils", "transformer_engine.")
P = ParamSpec("P")
T = TypeVar("T")
_DRAWING_NAMES = frozenset(
    {"bernoulli", "fork_rng", "manual_seed", "multinomial", "rand", "rand_like"}
    | {"randint", "randint_like", "randn", "randn_like", "randperm", "set_rng_state"}
)
_WRITING_NAMES = frozenset({"apply", "copy_", "data", "fill_"})


def by_type(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the result for each type; bounded, since it keeps types alive."""
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    result: Callable[P, T] = cached
    return result


@by_type
def init_methods(module_type: type) -> tuple[tuple[str, ...], bool]:
    """Return the names of a class's init methods to run, and whether that is certain.

    The methods that a constructor of the class calls, in the order of the calls;
    if it calls none, the first that there is, which is then not certain.
    """
    found = tuple(name for name in _METHODS if _is_own_method(module_type, name))
    called = tuple(name for name in calls_of(module_type) if name in found)
    return (called, True) if called else (found[:1], False)


@by_type
def calls_of(module_type: type) -> tuple[str, ...]:
    """Return the names that the constructors use, also in methods that they call."""
    seen: dict[str, None] = {}
    done: set[types.CodeType] = set()
    # A base's constructor runs before what a subclass does after `super()`.
    for base in reversed(module_type.__mro__):
        constructor = vars(base).get("__init__")
        if base is not nn.Module and isinstance(constructor, types.FunctionType):
            _collect(constructor.__code__, module_type, seen, done)
    return tuple(seen)


@by_type
def calls_twice(module_type: type, name: str) -> bool:
    """Whether a framework's constructor calls a method, and a user's calls it again."""
    first = next(
        (base for base in module_type.__mro__ if _is_in(base, _FOREIGN)),
        nn.Module,
    )
    return name in calls_of(first) and name in _own_names(module_type)


@by_type
def writes_of(module_type: type) -> tuple[str, ...]:
    """Return the names in user constructors that hint at values written there."""
    seen = _own_names(module_type)
    return tuple(
        name
        for name in seen
        if name in _WRITING_NAMES
        or (
            name.endswith("_")
            and not name.startswith("_")
            and (hasattr(nn.init, name) or hasattr(nn.Parameter, name))
            and name not in ("requires_grad_", "share_memory_", "detach_")
        )
    )


@by_type
def draws_of(module_type: type) -> tuple[str, ...]:
    """Return the names in user constructors that draw, seed or fork generators."""
    return tuple(n for n in _own_names(module_type) if n in _DRAWING_NAMES)


def constructors(module_type: type) -> tuple[types.CodeType, ...]:
    """Return the code of user constructors, from the first base to the class."""
    found = []
    for base in reversed(module_type.__mro__):
        constructor = vars(base).get("__init__")
        own = not _is_in(base, _FOREIGN)
        if own and isinstance(constructor, types.FunctionType):
            found.append(constructor.__code__)
    return tuple(found)


def _own_names(module_type: type) -> tuple[str, ...]:
    """Return the names in the code of user constructors, without what they call."""
    seen: dict[str, None] = {}
    for constructor in constructors(module_type):
        for code in _nested(constructor):
            seen.update(dict.fromkeys(code.co_names))
    return tuple(seen)


def _collect(
    code: types.CodeType,
    module_type: type,
    seen: dict[str, None],
    done: set[types.CodeType],
) -> None:
    for one in _nested(code):
        if one in done:
            continue
        done.add(one)
        for name in one.co_names:
            seen.setdefault(name)
            method = inspect.getattr_static(module_type, name, None)
            method = getattr(method, "__func__", method)
            if (
                isinstance(method, types.FunctionType)
                and name not in _METHODS
                and not _is_in(method, "torch.nn.modules.module")
            ):
                _collect(method.__code__, module_type, seen, done)


def _is_in(one: type | types.FunctionType, modules: str | tuple[str, ...]) -> bool:
    """Whether a class or a function is of some modules; generated code is of none."""
    module: str | None = one.__module__
    return module is not None and module.startswith(modules)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _is_own_method(module_type: type, name: str) -> bool:
    """Whether a method exists, is not a framework's, and needs no argument."""
    function = inspect.getattr_static(module_type, name, None)
    if not isinstance(function, types.FunctionType):
        return False
    if _is_in(function, _FOREIGN):
        return False
    required = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return len(required) == 1  # `self`
