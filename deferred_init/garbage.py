"""Lets garbage collections wait while a model is planned, made or audited.

[Note: Collections wait]
Problem: a model's plan is tens of thousands of small objects, all of which stay alive.
Python takes that for a reason to look for garbage among all objects of the process,
those of torch and of every other model too: 0.3 s for an 8 B model whose kernels take
0.02 s, and nothing is found. Collections of young objects alone take some per cent,
more where libraries have callbacks in `gc.callbacks`.

Naive attempt: `gc.disable()`. But cycles that init code makes may hold tensors, and
those should not pile up on the device.

Design: only thresholds are raised. Full collections wait until the work is done. Young
objects are looked at as often as the user wants while init code runs, which is what
frees short-lived cycles, and seldom while a model is only looked at.

Shortcoming: Python 3.14 has no third threshold, and collects in small increments.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["full_collections_wait", "young_collections_wait"]

_NEVER = 1 << 30
_SELDOM = 50_000
"""New objects between collections of young ones, where no tensors are made."""


@contextmanager
def full_collections_wait() -> Iterator[None]:
    """Let the body run without a full garbage collection; young ones go on."""
    young, middle, _ = gc.get_threshold()
    with _thresholds(young, middle, _NEVER):
        yield


@contextmanager
def young_collections_wait() -> Iterator[None]:
    """Let the body, which makes no tensors, run with few collections of young ones."""
    young, middle, old = gc.get_threshold()
    with _thresholds(young and max(young, _SELDOM), middle, old):  # 0 is none at all
        yield


@contextmanager
def _thresholds(young: int, middle: int, old: int) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(young, middle, old)
    try:
        yield
    finally:
        gc.set_threshold(*before)
