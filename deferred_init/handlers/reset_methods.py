"""Initializer for modules with an init method of their own: `reset_parameters` & co.

What a method fills is found by running it without memory, see `write_probe.py`. What
it does not fill stays unclaimed, and ends in the one `PlanError` that lists what
nobody knows how to make.

[Note: When a method is run]
A module that owns deferred tensors runs the methods that its constructor calls, or,
if it calls none, the first it has. One that owns none runs them only if its
constructor does: others are for callers to call, and would draw random numbers that
eager construction did not draw. Where an initializer of the module's type runs
`reset_parameters`, as those of Transformer Engine do, it is not run again.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

from torch import nn

from deferred_init.constructor_code import calls_with_arguments
from deferred_init.constructor_names import (
    by_type,
    calls_of,
    calls_twice,
    draws_of,
    init_methods,
    writes_of,
)
from deferred_init.handlers.protocol import (
    Claim,
    Initializer,
    Request,
    Step,
    Workspace,
)
from deferred_init.handlers.registry import add_initializer, initializers_for
from deferred_init.reparametrized import is_reparametrized
from deferred_init.slots import ModuleSite, Slot, set_aside
from deferred_init.write_probe import Names, ProbeError, Writes, likeness, probe_writes

__all__ = ["ResetMethods"]

_PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_HOOK = "_init_weights"
_RESET = "reset_parameters"
_METHODS = (_RESET, "_reset_parameters", "init_weights")


@dataclass(frozen=True, slots=True)
class _Below:
    """What init methods of a module reach in the modules below it.

    Attributes:
        real: What is real already.
        written: What they fill or change.
    """

    real: tuple[Slot, ...]
    written: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module, writes: Writes) -> _Below:
        """Select what is not the module's own."""
        written = writes.filled + writes.touched
        return cls(
            real=tuple(slot for slot in writes.real if slot.owner is not module),
            written=tuple(slot for slot in written if slot.owner is not module),
        )

    def not_for(self, claim: Claim) -> list[Slot]:
        """Return what must be out of reach while the methods run for a claim."""
        return [*self.real, *claim.leaves(self.written)]


class _Known(dict[Hashable, Names]):
    """What the methods write in modules that are alike, by their likeness."""


class ResetMethods:
    """Runs the init methods that a module's class defines."""

    name = "init method"
    composite = True

    def __init__(self) -> None:
        self._below: WeakKeyDictionary[nn.Module, _Below] = WeakKeyDictionary()

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim what the methods would fill, and rewrite what they would change."""
        module = site.module
        if type(module).__module__.startswith("torch.nn.") or is_reparametrized(module):
            return None
        calls, certain = _calls(module)
        wanted = [*pending, *_in_containers(site)]
        if not calls or (not certain and not wanted):
            return _only_hints(module, left=_left_to_callers(type(module)))
        source = f"{type(module).__name__}.{', '.join(calls)}"
        try:
            writes = _probe(site, calls, request.once(_probe, _Known))
        except ProbeError as error:
            return Claim(slots=tuple(wanted), problems=(_unknown(site, source, error),))
        if not writes.filled and not writes.touched:
            return _only_hints(module)
        if site.children:
            self._below[module] = _Below.of(module, writes)
        return Claim(
            slots=writes.filled,
            rewrites=writes.touched,
            source=source,
            assumptions=tuple(_assumptions(module, calls, certain)),
            num_writes=writes.num_writes,
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run the methods in place, with tensors that are real out of their reach."""
        module = step.site.module
        if not step.claim.slots and not step.claim.rewrites:
            return
        calls, _ = _calls(module)
        below = self._below[module] if step.site.children else None
        aside = below.not_for(step.claim) if below else ()
        with set_aside(aside) if aside else nullcontext(), workspace.filling(step):
            _run_all(module, calls)


def _probe(site: ModuleSite, calls: tuple[str, ...], known: _Known) -> Writes:
    """Try the methods; once for all modules of a call that are made alike.

    Not once for good: between two calls the methods may be replaced, and so may what
    they look at outside of the module.
    """
    key = likeness(site)
    if key is None:
        return probe_writes(site, lambda twin: _run_all(twin, calls))
    if key not in known:
        writes = probe_writes(site, lambda twin: _run_all(twin, calls))
        known[key] = writes.names
    return Writes.on(site, known[key])


def _calls(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The methods to run; `self.apply(self._init_weights)` counts as one."""
    kind = type(module)
    return _calls_of(kind, _HOOK in vars(module), _is_run_elsewhere(kind))


@by_type
def _calls_of(
    module_type: type, own_hook: bool, run_elsewhere: bool
) -> tuple[tuple[str, ...], bool]:
    names, certain = init_methods(module_type)
    if run_elsewhere:
        names = tuple(name for name in names if name != _RESET)
    used = calls_of(module_type)
    has_hook = own_hook or hasattr(module_type, _HOOK)
    if not certain and _HOOK in used and "apply" in used and has_hook:
        return (_HOOK,), True
    return names, certain


def _is_run_elsewhere(module_type: type) -> bool:
    """Whether an initializer of the type runs `reset_parameters` itself."""
    return _any_runs_it(initializers_for(module_type))


@lru_cache(maxsize=256)
def _any_runs_it(initializers: tuple[Initializer, ...]) -> bool:
    return any(getattr(one, "runs_reset_parameters", False) for one in initializers)


def _run_all(module: nn.Module, calls: tuple[str, ...]) -> None:
    for name in calls:
        if name == _HOOK and name not in init_methods(type(module))[0]:
            module.apply(getattr(module, name))
        else:
            getattr(module, name)()


def _in_containers(site: ModuleSite) -> Iterator[Slot]:
    """Deferred slots of parameter lists and dicts, which cannot fill themselves."""
    for child in site.children:
        if isinstance(child.module, _PARAMETER_CONTAINERS):
            yield from (slot for slot in child.slots if slot.deferred)
            yield from _in_containers(child)


def _only_hints(module: nn.Module, left: tuple[str, ...] = ()) -> Claim | None:
    """Claim nothing, and say what the constructor or its caller may have written."""
    hints = (*_hints(module, ()), *left)
    return Claim(source="constructor", assumptions=hints) if hints else None


@by_type
def _left_to_callers(module_type: type) -> tuple[str, ...]:
    """Say which init method nobody called, as trainers do after construction."""
    names, certain = init_methods(module_type)
    if not names and not certain and _has_own_hook(module_type):
        names = (_HOOK,)
    if certain or not names:
        return ()
    kind = module_type.__qualname__
    return (
        f"`{names[0]}` of {kind}, which its constructor does not call, is not called "
        "afterwards either; where you call it, give `deferred_init(...)` a function "
        "that constructs the model and calls it",
    )


def _has_own_hook(module_type: type) -> bool:
    """Whether there is an `_init_weights` to apply, which no framework applies."""
    bases = [base.__module__ or "" for base in module_type.__mro__]
    return _HOOK in {name for base in module_type.__mro__ for name in vars(base)} and (
        not any(base.startswith("transformers.") for base in bases)
        and not {_HOOK, *_METHODS} & set(calls_of(module_type))
    )


def _unknown(site: ModuleSite, source: str, error: ProbeError) -> str:
    return (
        f"`{source}` of `{site.title}` cannot be tried "
        f"without memory to see what it fills ({error}): build the model inside "
        "`deferred_init(...)`, or register an initializer for "
        f"`{type(site.module).__name__}`"
    )


def _assumptions(
    module: nn.Module, calls: tuple[str, ...], certain: bool
) -> Iterator[str]:
    kind = type(module).__qualname__
    if not certain:
        yield (
            f"the constructor of {kind} gives the values that `{calls[0]}` gives, "
            "though it does not call it"
        )
    for name in calls:
        if name in vars(module):
            yield (
                f"`{name}` of a {kind} module was replaced before its constructor "
                "called it; where that was done later, build the model inside "
                "`deferred_init(...)`"
            )
        if calls_with_arguments(type(module), name) and _has_options(module, name):
            yield (
                f"the constructor of {kind} calls `{name}` with arguments; here it is "
                "called without, and where they change values, build the model inside "
                "`deferred_init(...)`"
            )
    yield from _hints(module, calls)


def _has_options(module: nn.Module, name: str) -> bool:
    try:
        return bool(inspect.signature(getattr(module, name)).parameters)
    except (TypeError, ValueError):  # no Python function
        return False


def _hints(module: nn.Module, calls: tuple[str, ...]) -> tuple[str, ...]:
    kind = type(module)
    return _hints_of(kind, _HOOK in calls, _is_run_elsewhere(kind))


@by_type
def _hints_of(
    module_type: type, runs_hook: bool, run_elsewhere: bool
) -> tuple[str, ...]:
    return tuple(_tell(module_type, runs_hook, run_elsewhere))


def _tell(module_type: type, runs_hook: bool, run_elsewhere: bool) -> Iterator[str]:
    explained = {"apply"} if runs_hook else set()
    names = [f"`{n}`" for n in writes_of(module_type) if n not in explained]
    kind = module_type.__qualname__
    if run_elsewhere and calls_twice(module_type, _RESET):
        yield (
            f"the constructor of {kind} calls `{_RESET}` again, after that of its base "
            "class; here it is run once"
        )
    if draws := [f"`{name}`" for name in draws_of(module_type)]:
        yield (
            f"what the constructor of {kind} calls ({', '.join(draws)}) leaves the "
            "generators as they are; where it does not, build the model inside "
            "`deferred_init(...)`"
        )
    if names:
        yield (
            f"what the constructor of {kind} writes itself "
            f"({', '.join(names[:5])}) changes no value of the model; where it does, "
            "build the model inside `deferred_init(...)`"
        )


add_initializer(ResetMethods(), nn.Module)
