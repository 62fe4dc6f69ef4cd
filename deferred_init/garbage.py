"""Lets garbage collections wait while a model is planned, made or audited.

[Note: Collections wait]
Problem: a model's plan is tens of thousands of small objects, all of which stay alive.
Python takes that for a reason to look for garbage among all objects of the process,
those of torch and of every other model too: 0.3 s for an 8 B model whose kernels take
0.02 s, and nothing is found. Collections of young objects alone take some per cent,
more where libraries have callbacks in `gc.callbacks`.

Naive attempt: `gc.disable()`. But cycles that init code makes may hold tensors, and
those should not pile up on the device.

Design: only thresholds are raised. Full collections wait until the work is done; young
objects are looked at as usual while init code runs, which is what frees short-lived
cycles, and seldom otherwise.

Shortcoming: Python 3.14 has no third threshold, and collects in small increments.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["full_collections_wait", "young_collections_go_on"]

_NEVER = 1 << 30
_SELDOM = 50_000
"""New objects between collections of young ones, where no tensors are made."""
_OFTEN = 700
"""The same where init code runs; Python's own, long used number."""


@contextmanager
def full_collections_wait() -> Iterator[None]:
    """Let the body run without a full garbage collection, and with few young ones."""
    before = young, middle, _ = gc.get_threshold()
    gc.set_threshold(young and max(young, _SELDOM), middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def young_collections_go_on() -> Iterator[None]:
    """Let cycles that the body makes be collected soon, with the tensors in them."""
    before = young, middle, old = gc.get_threshold()
    gc.set_threshold(young and min(young, _OFTEN), middle, old)
    try:
        yield
    finally:
        gc.set_threshold(*before)
