"""What a recording takes from another one, which need not have been replayed.

The class of replays is an argument, since replays ask for this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deferred_init.record.events import Resume
from deferred_init.record.graph import Recording
from deferred_init.record.nodes import ForeignValue

__all__ = ["state_elsewhere", "value_elsewhere"]

NewReplay = Callable[[Recording, torch.device], Any]


def value_elsewhere(
    replay: NewReplay, device: torch.device, foreign: ForeignValue
) -> Tensor:
    """Compute a value of another recording, as it was when this one read it."""
    other = replay(foreign.value.recording, device)
    value: Tensor = other.value(foreign.value, foreign.upto)
    return value


def state_elsewhere(replay: NewReplay, event: Resume) -> Tensor:
    """Return the state with which a constructor went on from an earlier one."""
    origin, device = event.recording, event.device
    for kept in origin.kept:
        if kept.settled is not None and kept.is_at(event.position, device):
            return kept.settled
    own = origin.device.type == device.type
    stream = origin.default_stream if own else origin.stream_on(device)
    state: Tensor = replay(origin, device).state_before(event.position, stream)
    return state
