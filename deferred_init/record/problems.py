"""The errors of recording and replaying, and where in user code they arose."""

from __future__ import annotations

import sys

from deferred_init.errors import DeferredInitError

__all__ = ["RecordError", "ReplayError", "user_line"]


class RecordError(DeferredInitError):
    """Something in a constructor cannot be recorded."""


class ReplayError(DeferredInitError):
    """A recorded operation cannot be replayed as it was recorded."""


_NOT_THE_USERS = ("torch", "deferred_init")


def user_line() -> str:
    """Return `file:line` of the nearest frame outside this package and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown line"
