"""Faults on purpose at every boundary between two pieces of work of `materialize`.

A boundary lies before and after every look, plan, step, exchange, cast, refresher,
hand-over, rebinding and audit. `check_every_boundary` raises every kind of error at
every one of them, and compares everything that must be as before.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import deferred_init as di
from deferred_init import api, execute, pipeline, workspace
from deferred_init.fast.policy import Fast
from deferred_init.record.execution import Executor
from deferred_init.rng import ByName, Eager
from tests.reliability.portrait import Portrait, assert_equal, generators, portrait
from tests.reliability.tally import tally


def own_threads() -> list[str]:
    """Names of the threads of this package that are alive."""
    return [t.name for t in threading.enumerate() if "deferred_init" in t.name]


class Injected(RuntimeError):
    """Raised on purpose."""


ERRORS: Mapping[str, type[BaseException]] = {
    "exception": Injected,
    "out of memory": torch.OutOfMemoryError,
    "interrupt": KeyboardInterrupt,
}
MAX_GROWTH_BYTES = 1_000_000
# Short runs raise each kind of error at another part of the boundaries.
EVERY = 1 if os.environ.get("RELIABILITY_EXAMPLES") else 3
_CALLS = (
    (api, "look"),
    (api, "make_agreed_plan"),
    (api, "take_snapshot"),
    (api, "run_audit"),
    (pipeline, "hand_over"),
    (pipeline, "fill_optimizer_state"),
    (pipeline, "rebind_holders"),
    (execute, "_last_writers"),
    (workspace, "exchange"),
    (workspace.ExecutionWorkspace, "allocate"),
    (workspace.ExecutionWorkspace, "finish"),
    (Executor, "call"),
)


class Boundaries(AbstractContextManager["Boundaries"]):
    """Counts the boundaries that are crossed, and does something at one of them.

    Args:
        at: The number of the boundary, from 1; 0 only counts.
        act: What to do there.

    Attributes:
        crossed: The boundaries so far, by name.
    """

    def __init__(self, at: int = 0, act: Callable[[], None] | None = None) -> None:
        self.crossed: list[str] = []
        self._at = at
        self._act = act
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Boundaries:
        for owner, name in _CALLS:
            self._patches.setattr(owner, name, self._around(getattr(owner, name), name))
        for policy in (Eager, ByName, Fast):
            self._patches.setattr(policy, "step", self._around_step(policy.step))
        found = pipeline.refreshers  # more are registered when handlers are loaded
        self._patches.setattr(
            pipeline, "refreshers", lambda: [_Watched(each, self) for each in found()]
        )
        return self

    def __exit__(self, *details: object) -> None:
        self._patches.undo()

    def cross(self, name: str) -> None:
        self.crossed.append(name)
        if len(self.crossed) == self._at and self._act is not None:
            self._act()

    def _around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.cross(f"before {name}")
            result = function(*args, **kwargs)
            self.cross(f"after {name}")
            return result

        return wrapper

    def _around_step(self, step: Any) -> Any:
        @contextmanager
        def wrapper(policy: Any, which: Any) -> Iterator[None]:
            self.cross("before a step")
            with step(policy, which):
                yield
            self.cross("after a step")

        return wrapper


class _Watched:
    """A refresher, between two boundaries."""

    def __init__(self, refresher: Any, boundaries: Boundaries) -> None:
        self._refresher = refresher
        self._boundaries = boundaries

    def refresh(self, *args: Any) -> None:
        name = type(self._refresher).__name__
        self._boundaries.cross(f"before {name}")
        self._refresher.refresh(*args)
        self._boundaries.cross(f"after {name}")


def _tensors_in(held: Any) -> Iterable[Tensor]:
    return Portrait(held).tensors.values()


@dataclass(kw_only=True)
class Job:
    """Something deferred, and the call that materializes it.

    Attributes:
        run: Materializes; called again after a fault.
        held: Returns everything that has to be as before: models, and what
            `held_by` says of optimizers and holders.
        more: Further facts.
        look: Describes what is held.
        states: Describes the generators.
        memory: Bytes in use, where an allocator counts them.
        tensors: Returns the tensors of what is held, in order.
    """

    run: Callable[[], Any]
    held: Callable[[], Any]
    more: Callable[[], Any] = lambda: None
    look: Callable[[Any], dict[str, Any]] = portrait
    states: Callable[[], Any] = generators
    memory: Callable[[], int] = lambda: 0
    tensors: Callable[[Any], Iterable[Tensor]] = _tensors_in

    def facts(self) -> dict[str, Any]:
        """Return what is the same for every job that was made alike."""
        facts = self.look(self.held())
        return {**facts, "(more)": self.more(), "(generators)": self.states()}

    def objects(self) -> list[int]:
        """Return which objects stand where, in this job."""
        return [id(tensor) for tensor in self.tensors(self.held())]


def held_by(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the groups and the state of optimizers, in a form for `portrait`."""
    return [
        ([dict(group) for group in each.param_groups], list(each.state.items()))
        for each in optimizers
    ]


@contextmanager
def quick_collections() -> Iterator[None]:
    """Keep what exists out of garbage collections, so that many take no time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def interrupting() -> None:
    """Do what Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def check_every_boundary(
    make: Callable[[], Job],
    errors: Mapping[str, type[BaseException]] = ERRORS,
    every: int = EVERY,
) -> list[str]:
    """Raise each error at each boundary; return the boundaries.

    Args:
        make: Makes the same job each time, generators included.
        errors: What to raise.
        every: Take every n-th boundary only, another part for each error.
    """
    reference = make()
    with Boundaries() as counted:
        reference.run()
    done = reference.facts()
    assert any(name == "after a step" for name in counted.crossed)
    for shift, error in enumerate(errors.values()):
        for at in range(1 + shift % every, len(counted.crossed) + 1, every):
            check_one(make(), at, error, done)
    return counted.crossed


def check_one(
    job: Job, at: int, error: type[BaseException], done: dict[str, Any]
) -> None:
    before, objects, num_bytes = job.facts(), job.objects(), job.memory()
    with (
        Boundaries(at, raising(error("on purpose"))) as boundaries,
        pytest.raises((di.MaterializeError, error)) as caught,
    ):
        job.run()
    place = f"{error.__name__} at {at}, {boundaries.crossed[at - 1]}"
    assert "must not be used" not in str(caught.value), place
    grown_bytes = job.memory() - num_bytes
    assert abs(grown_bytes) < MAX_GROWTH_BYTES, f"{place}: {grown_bytes:,} bytes"
    assert_equal(job.facts(), before)
    assert job.objects() == objects, place
    del caught
    job.run()
    assert_equal(job.facts(), done)
    tally["faults at boundaries"] += 1
