"""Constructs a twin without memory, and makes only those of its tensors one wants.

For a model of which a part is loaded already, or whose tensors are seeded by name: a
recording (`deferred_init.record`) draws the random numbers of what is not wanted, or
skips them, without giving it memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from deferred_init import record
from deferred_init.handlers.protocol import Workspace
from deferred_init.named_seeds import draws_for
from deferred_init.slots import Slot

__all__ = ["replay_twin"]

Pairs = Sequence[tuple[Slot, Tensor]]


def replay_twin(
    build: Callable[[], nn.Module],
    wanted: Callable[[nn.Module], Pairs],
    give: Callable[[Slot, Tensor], None],
    workspace: Workspace,
) -> nn.Module:
    """Record a construction and give the wanted slots their values.

    Args:
        build: Constructs the twin.
        wanted: Pairs slots with tensors of the recorded twin.
        give: Receives the tensors one by one, each when it is ready.
        workspace: Says what was asked for, and takes note of how to undo.

    Returns:
        The twin, whose tensors have no memory.
    """
    request = workspace.request
    twin: nn.Module = record.deferred_init(build)
    pairs = wanted(twin)
    slots: dict[record.Value, list[Slot]] = {}
    for slot, tensor in pairs:
        if isinstance(tensor, record.DeferredTensor):
            slots.setdefault(record.value_of(tensor), []).append(slot)
        else:
            give(slot, tensor.detach().to(request.device))
    for recording, values in _by_recording(slots).items():
        draws = draws_for(recording, {v: slots[v][0] for v in values}, request)
        if draws is None:
            workspace.on_undo(recording.start_from_here(request.device))
        replay = record.Replay(
            recording, request.device, wanted=values, before_random=draws
        )

        def take(value: record.Value, tensor: Tensor) -> None:
            for slot in slots[value]:
                give(slot, tensor.detach())

        replay.run(on_ready=take)
        replay.finish(keep_generators=True if draws is None else None)
    return twin


def _by_recording(
    slots: dict[record.Value, list[Slot]],
) -> dict[record.Recording, list[record.Value]]:
    found: dict[record.Recording, list[record.Value]] = {}
    for value in slots:
        found.setdefault(value.recording, []).append(value)
    return found
