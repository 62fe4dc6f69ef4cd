"""What the constructors of a class call, read from their code objects.

A module tree does not tell which init methods a constructor called, but the names in
its code do.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["INIT_METHODS", "by_type", "calls_of", "calls_twice", "constructors"]
__all__ += ["draws_of", "forget_changed", "init_methods", "writes_of"]

INIT_METHODS = (
    "reset_parameters",
    "_reset_parameters",
    "init_weights",
    "_init_weights",
)
# Their code belongs to frameworks that have initializers of their own.
_FOREIGN = ("torch.", "transformers.modeling_utils", "transformer_engine.")
_MAX_DECORATORS = 16
P = ParamSpec("P")
T = TypeVar("T")
_DRAWING_NAMES = frozenset(
    {"bernoulli", "fork_rng", "manual_seed", "multinomial", "rand", "rand_like"}
    | {"randint", "randint_like", "randn", "randn_like", "randperm", "set_rng_state"}
)
_WRITING_NAMES = frozenset({"apply", "copy_", "data", "fill_"})
_caches: list[Any] = []
_code_seen: WeakKeyDictionary[type, tuple[types.CodeType, ...]] = WeakKeyDictionary()


def by_type(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the result for each type; bounded, since it keeps types alive.

    Only what follows from a class's code may be remembered: see `forget_changed`.
    """
    cached: Any = functools.lru_cache(maxsize=4096)(function)
    _caches.append(cached)
    result: Callable[P, T] = cached
    return result


def forget_changed(module_types: Iterable[type]) -> None:
    """Forget what is remembered by type if the code of any class has changed.

    IPython's `autoreload` puts the edited code into the classes that there are, and
    libraries replace constructors and methods.
    """
    changed = False
    for module_type in set(module_types):
        now = tuple(_code_of(module_type))
        changed |= _code_seen.get(module_type, now) != now
        _code_seen[module_type] = now
    if changed:
        for cache in _caches:
            cache.cache_clear()


def _code_of(module_type: type) -> Iterator[types.CodeType]:
    for base in module_type.__mro__:
        held = vars(base)
        if _is_in(base, _FOREIGN):  # of which the constructors alone are looked at
            functions: Iterable[Any] = (held.get("__init__"),)
        else:
            functions = held.values()
        for function in functions:
            if isinstance(function, types.FunctionType):
                yield from _codes(function)


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those that it is a decorator around."""
    wrapped: Any = function
    for _ in range(_MAX_DECORATORS):
        yield wrapped.__code__
        wrapped = getattr(wrapped, "__wrapped__", None)
        if not isinstance(wrapped, types.FunctionType):
            return


@by_type
def init_methods(module_type: type) -> tuple[tuple[str, ...], bool]:
    """Return the names of a class's init methods to run, and whether that is certain.

    The methods that a constructor of the class calls, in the order of the calls;
    if it calls none, the first that there is, which is then not certain.
    """
    found = tuple(name for name in INIT_METHODS if _is_own_method(module_type, name))
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
            _collect(constructor, module_type, seen, done)
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
    found: list[types.CodeType] = []
    for base in reversed(module_type.__mro__):
        constructor = vars(base).get("__init__")
        own = not _is_in(base, _FOREIGN)
        if own and isinstance(constructor, types.FunctionType):
            found.extend(_codes(constructor))
    return tuple(found)


def _own_names(module_type: type) -> tuple[str, ...]:
    """Return the names in the code of user constructors, without what they call."""
    seen: dict[str, None] = {}
    for constructor in constructors(module_type):
        for code in _nested(constructor):
            seen.update(dict.fromkeys(code.co_names))
    return tuple(seen)


def _collect(
    function: types.FunctionType,
    module_type: type,
    seen: dict[str, None],
    done: set[types.CodeType],
) -> None:
    for one in [inner for code in _codes(function) for inner in _nested(code)]:
        if one in done:
            continue
        done.add(one)
        for name in one.co_names:
            seen.setdefault(name)
            method = inspect.getattr_static(module_type, name, None)
            method = getattr(method, "__func__", method)
            if (
                isinstance(method, types.FunctionType)
                and name not in INIT_METHODS
                and not _is_in(method, "torch.nn.modules.module")
            ):
                _collect(method, module_type, seen, done)


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
    try:
        inspect.signature(function).bind("self")  # a decorator may call it `*args`
    except TypeError:
        return False
    return True
