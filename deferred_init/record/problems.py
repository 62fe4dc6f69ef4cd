"""The errors of recording and replaying, and where in user code they arose."""

from __future__ import annotations

import os
import re
import sys
import traceback

import torch

from deferred_init import errors
from deferred_init.errors import DeferredInitError

__all__ = ["RecordError", "ReplayError", "explained", "user_line"]

_OTHER_CLASS = re.compile(
    r"Creating a new Tensor subclass (\S+) but the raw Tensor object is already "
    r"associated to a python object of type Deferred"
)


class RecordError(DeferredInitError):
    """Something in a constructor cannot be recorded."""


class ReplayError(DeferredInitError):
    """A recorded operation cannot be replayed as it was recorded."""


_NOT_THE_USERS = ("torch", "deferred_init", "copy")
_FOLDERS = (os.path.dirname(torch.__file__), os.path.dirname(errors.__file__))


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


def explained(error: RuntimeError) -> RecordError | None:
    """Say of an error of torch's what it means in a constructor, if that is known."""
    if "its data is not allocated yet" not in str(error):
        return _no_such_subclass(error)
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _is_inside(frame.filename)]
    last = (users or frames)[-1]
    return RecordError(
        f"`{last.line}` at {last.filename}:{last.lineno} reads the memory of a "
        "recorded tensor, which has none: make its result before `deferred_init(...)` "
        "and hand it to the constructor, or build that part after `materialize`"
    )


def _is_inside(filename: str) -> bool:
    """Whether a file belongs to torch or to this package."""
    return any(filename.startswith(folder) for folder in _FOLDERS)


def _no_such_subclass(error: RuntimeError) -> RecordError | None:
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
