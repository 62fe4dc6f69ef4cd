"""Trackers of named generators, as Megatron and Transformer Engine keep them.

A module may be given a function that returns a tracker, which has a state for each
purpose: it puts one into the default generator, draws, and saves it again (`fork`).

[Note: One tracker for recorded and deferred modules]
Modules that defer themselves (see `external.py`) draw from the tracker when they are
initialized, in the midst of a replay; others of the same constructor did so while it
was recorded, so that the tracker is left with tokens (see `kept_states.py`). So a mark
notes for which places of the recording the tokens stand that the tracker held then. The
replay lends the tracker its states of these places, and takes over how far the module
drew, for whoever goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.small_values import small_value

__all__ = ["SavedAt", "Tracked", "copy_of", "put_into", "tracker_of"]

_PLACES = ("get_rng_state_tracker", "_rng_state_tracker_function")
SavedAt = tuple[torch.device, int]
"""Whose default generator's state it was, and the number of nodes before it."""


@small_value
class Tracked:
    """What the states of a tracker stood for at one moment of a recording.

    Attributes:
        tracker: The tracker.
        places: For each name whose state held a token, what that stands for.
    """

    tracker: Any
    places: Mapping[str, SavedAt]


def tracker_of(module: nn.Module) -> Any:
    """Return the tracker that a module draws its weights from, or None."""
    for function in _functions_of(module):
        tracker: Any = function() if callable(function) else None
        if hasattr(tracker, "get_states") and hasattr(tracker, "set_states"):
            return tracker
    return None


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield what may return a tracker, without asking a slow `__getattr__`."""
    held, own = vars(module), type(module)
    for place in _PLACES:
        if place in held or hasattr(own, place):
            yield getattr(module, place, None)
    # A layer norm and a linear layer in one keep it with their parameters' records.
    for record in held.get("param_init_meta", {}).values():
        yield getattr(record, "get_rng_state_tracker", None)


def copy_of(state: Any) -> Any:
    """Return a copy of a state; where CUDA graphs capture, it is in a generator."""
    if isinstance(state, torch.Generator):
        return state.get_state()
    return state.clone() if isinstance(state, Tensor) else state


def put_into(tracker: Any, states: Mapping[str, Any]) -> None:
    """Give a tracker states by name; others keep theirs."""
    now = dict(tracker.get_states())
    for name, state in states.items():
        if isinstance(now.get(name), torch.Generator):
            now[name].set_state(state)
        else:
            now[name] = copy_of(state)
    tracker.set_states(now)
