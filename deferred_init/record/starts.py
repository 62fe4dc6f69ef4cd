"""Where recordings began, so that two that begin with the same numbers are told.

Recording draws nothing. So a second model that is recorded before the first one is
materialized begins where the first one began, which eager construction would not do.
A generator that was seeded again in between looks the same; so this is a hint for the
report, and no refusal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.graph import Recording

__all__ = ["began_there", "forget_start", "remember_start"]

_start: Tensor | None = None
"""Where a recording that drew numbers began, if nothing has been replayed since."""


def began_there(recording: Recording) -> bool:
    """Whether an earlier recording that drew began with the same state, on the CPU."""
    return _start is not None and torch.equal(_start, recording.cpu_start)


def remember_start(recording: Recording) -> None:
    """Remember where a recording began that has ended, if it drew numbers."""
    global _start
    if any(node.stream is not None for node in recording.nodes):
        _start = recording.cpu_start


def forget_start() -> None:
    """Forget it: a replay moves the generators on."""
    global _start
    _start = None
