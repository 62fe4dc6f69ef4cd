"""Whether what a checkpoint does not fill depends on random numbers."""

from __future__ import annotations

from collections.abc import Iterable

from deferred_init.record import Recording, Value, value_in_place
from deferred_init.record.needs import needs_of
from deferred_init.slots import Slot, SlotKind

__all__ = ["rest_is_random"]


def rest_is_random(rest: Iterable[Slot]) -> bool:
    """Tell whether tensors that will be initialized need eager's random numbers.

    Parameters do, whoever makes them. Other tensors (rotary frequencies, running
    statistics, tables) do if a recording says that random numbers go into them.

    Args:
        rest: Deferred slots that nothing is loaded into.
    """
    recorded: dict[Recording, set[Value]] = {}
    for slot in rest:
        if slot.kind is SlotKind.PARAMETER:
            return True
        value = value_in_place(slot.owner, slot.name, slot.tensor)
        if value is not None:
            recorded.setdefault(value.recording, set()).add(value)
    return any(
        node.stream is not None
        for recording, values in recorded.items()
        for node in needs_of(recording, values, len(recording.nodes)).nodes
    )
