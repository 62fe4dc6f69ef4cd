"""What a recording takes from another one, which need not have been replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.events import Resume
from deferred_init.record.nodes import ForeignValue

__all__ = ["state_elsewhere", "value_elsewhere"]


def value_elsewhere(device: torch.device, foreign: ForeignValue) -> Tensor:
    """Compute a value of another recording, as it was when this one read it."""
    from deferred_init.record.replay import Replay  # which calls this

    other = Replay(foreign.value.recording, device)
    return other.value(foreign.value, foreign.upto)


def state_elsewhere(event: Resume) -> Tensor:
    """Return the state with which a constructor went on from an earlier one."""
    from deferred_init.record.replay import Replay  # which calls this

    origin, device = event.recording, event.device
    for kept in origin.kept:
        if kept.settled is not None and kept.is_at(event.position, device):
            return kept.settled
    own = origin.device.type == device.type
    stream = origin.default_stream if own else origin.stream_on(device)
    return Replay(origin, device).state_before(event.position, stream)
