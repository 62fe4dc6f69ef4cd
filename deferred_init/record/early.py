"""Compute a value while the program that makes it is still being recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from deferred_init.record.graph import Recording
from deferred_init.record.needs import needs_of
from deferred_init.record.nodes import Value
from deferred_init.record.paused import plain_torch
from deferred_init.record.problems import RecordError, user_line
from deferred_init.record.replay import Replay
from deferred_init.record.tensor import late

__all__ = ["early_device", "early_value"]


def early_device(recording: Recording) -> torch.device:
    """Return the recording's device, or the CPU where that device is not present."""
    device = recording.device
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


def early_value(value: Value) -> Tensor:
    """Compute one value now, in new memory; the generators are left as they were.

    Raises:
        RecordError: If it needs random numbers of a device that is not present.
    """
    recording = value.recording
    device = early_device(recording)
    with recording.lock:
        draws = _draws(value)
        recording.looked_at_random |= draws and recording.active
        if device != recording.device and draws:
            raise RecordError(
                f"the constructor looks at a random value at {user_line()}, which "
                f"only {recording.device} can compute, and it is not present: record "
                "with device='cpu', or on a machine that has it"
            )
        result = Replay(recording, device).value(value)
        with plain_torch():
            return result.clone() if not result._is_view() else result


def _draws(value: Value) -> bool:
    """Whether a value depends on random numbers of the recording's device."""
    needs = needs_of(value.recording, [value], len(value.recording.nodes))
    streams = [node.stream for node in needs.nodes if node.stream is not None]
    return any(s.device is None and s.generator is None for s in streams)


late.early_value = early_value
late.early_device = early_device
