"""Lets full garbage collections wait while a model is planned, made or audited.

[Note: Full collections wait]
Problem: a model's plan is tens of thousands of small objects, all of which stay alive.
Python takes that for a reason to look for garbage among all objects of the process,
those of torch and of every other model too: 0.3 s for an 8 B model whose kernels take
0.02 s, and nothing is found.

Naive attempt: `gc.disable()`. But cycles that init code makes may hold tensors, and
those should not pile up on the device.

Design: only the third threshold is raised. Young objects are looked at as usual, which
is what frees short-lived cycles; old ones are looked at when the work is done.

Shortcoming: Python 3.14 has no such threshold, and collects in small increments anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["full_collections_wait"]

_NEVER = 1 << 30


@contextmanager
def full_collections_wait() -> Iterator[None]:
    """Let the body run without a full garbage collection; young ones go on."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
