"""The errors of recording and replaying, and where in user code they arose."""

from __future__ import annotations

import re
import sys
import traceback

from deferred_init.errors import DeferredInitError

__all__ = ["RecordError", "ReplayError", "no_such_subclass", "user_line"]

_OTHER_CLASS = re.compile(
    r"Creating a new Tensor subclass (\S+) but the raw Tensor object is already "
    r"associated to a python object of type Deferred"
)


class RecordError(DeferredInitError):
    """Something in a constructor cannot be recorded."""


class ReplayError(DeferredInitError):
    """A recorded operation cannot be replayed as it was recorded."""


_NOT_THE_USERS = ("torch", "deferred_init", "copy")


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


def no_such_subclass(error: RuntimeError) -> RecordError | None:
    """Explain why torch makes no tensor of another class of one that is recorded.

    What such a class does when it is moved or computed with, as those of bitsandbytes
    that quantize in `to`, is its own affair, and not known to a recording.

    Returns:
        None if the error is about something else.
    """
    found = _OTHER_CLASS.match(str(error))
    if found is None:
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    return RecordError(
        f"`{found[1]}` at {last.filename}:{last.lineno} is made of a tensor that is "
        "recorded and has no memory yet: materialize the model first, then convert it, "
        "or build it on meta and pass `weights=`"
    )
