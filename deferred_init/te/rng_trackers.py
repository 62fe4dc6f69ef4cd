"""Generators that tensor-parallel Transformer Engine models draw weights from.

A module or op may be given a function that returns a tracker with a named generator
for each purpose. It draws its weights from one of them and leaves it where it
stopped; if the materialization fails, it goes back to where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["tracker_restorer"]

_PLACES = ("get_rng_state_tracker", "_rng_state_tracker_function")


def tracker_restorer(module: nn.Module) -> Callable[[], None] | None:
    """Return what puts a module's tracker back to where it is now; None without.

    The tracker is one of Transformer Engine's or Megatron's, with `get_states` and
    `set_states`.
    """
    for place in _PLACES:
        function = getattr(module, place, None)
        if not callable(function):
            continue
        tracker: Any = function()
        if hasattr(tracker, "get_states") and hasattr(tracker, "set_states"):
            saved = {name: _copy(s) for name, s in tracker.get_states().items()}
            return lambda: _restore(tracker, saved)
    return None


def _copy(state: Any) -> Any:
    if isinstance(state, torch.Generator):  # one that CUDA graphs can capture
        return state.get_state()
    return state.clone() if isinstance(state, Tensor) else state


def _restore(tracker: Any, saved: dict[str, Any]) -> None:
    now = tracker.get_states()
    for name, state in saved.items():
        if isinstance(now.get(name), torch.Generator):
            now[name].set_state(state)
            saved[name] = now[name]
    tracker.set_states(saved)
