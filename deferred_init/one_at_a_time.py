"""Lets one thread at a time use the default generators, which all threads share.

Planning tries init functions and puts the generators back; a recording does the same;
a materialization draws from them and relies on what comes next. Two of these at once,
in two threads, would get each other's numbers, without any error.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from deferred_init.errors import MaterializeError

__all__ = ["generators_alone", "one_at_a_time"]

P = ParamSpec("P")
T = TypeVar("T")

_WAIT_S = 300.0
_lock = threading.RLock()


@contextmanager
def generators_alone(who: str, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Have the default generators alone among all that this package does.

    Args:
        who: What wants them, for the error.
        wait_s: How long another thread may take.

    Raises:
        MaterializeError: If another thread goes on using them; nothing was done.
    """
    if not _lock.acquire(timeout=wait_s):
        raise MaterializeError(
            f"`{who}` waited {wait_s:g} s for another thread that plans, materializes "
            "or records. All of them use torch's default generators, so they run one "
            "at a time, and constructors, init functions and hooks must not wait for "
            "another thread that does so. Nothing was done"
        )
    try:
        yield
    finally:
        _lock.release()


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function wait until no other thread is in such a function."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with generators_alone(function.__name__):
            return function(*args, **kwargs)

    return alone


def _new_lock() -> None:
    """In a forked child the thread that held the lock does not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
