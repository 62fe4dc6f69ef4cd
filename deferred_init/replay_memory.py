"""What a replay holds besides the tensors that it is for."""

from __future__ import annotations

from collections.abc import Sequence

from deferred_init.handlers.protocol import Step
from deferred_init.record import Recording, Storage, Value, value_in_place
from deferred_init.record.needs import all_needs

__all__ = ["replay_scratch"]


def replay_scratch(steps: Sequence[Step]) -> dict[int, int]:
    """Count the bytes of intermediate results, at most, by index of the step.

    `torch.randn(size) * std` makes two tensors of which one stays. The nodes of a
    recording are walked as a replay will run them, and what each of them leaves is
    counted until it is let go.

    Args:
        steps: All steps, in order; others than those of recordings need nothing here.
    """
    wanted: dict[Recording, dict[Value, None]] = {}
    ends: dict[Recording, list[tuple[int, int]]] = {}
    for step in steps:
        for slot in step.claim.slots:
            value = value_in_place(slot.owner, slot.name, slot.tensor)
            if value is not None and step.order is not None:
                wanted.setdefault(value.recording, {})[value] = None
                ends.setdefault(value.recording, []).append((step.order[1], step.index))
    found: dict[int, int] = {}
    for recording, values in wanted.items():
        held, made = _held_by_node(recording, list(values))
        start = 0
        for end, index in sorted(set(ends[recording])):
            # What the step will make is counted with the step, also before it is there.
            most = max(
                (held[at] - (made[end] - made[at]) for at in range(start, end + 1)),
                default=0,
            )
            found[index] = max(found.get(index, 0), most)
            start = end + 1
    return found


def _held_by_node(
    recording: Recording, wanted: Sequence[Value]
) -> tuple[list[int], list[int]]:
    """Return two sums of bytes for each node.

    Returns:
        What is held while it runs and nobody wants; what is made by then of the wanted.
    """
    needs = all_needs(recording, wanted, len(recording.nodes))
    stays = {value.storage for value in wanted}
    windows: dict[Storage, int] = {}
    sizes: dict[Storage, int] = {}
    seen: set[Storage] = set()
    held, made = [0] * len(recording.nodes), [0] * len(recording.nodes)
    between = kept = 0
    position = 0
    for node in needs.nodes:
        made[position : node.index] = [kept] * (node.index - position)
        position = node.index
        for out in node.outs:
            if out is None:
                continue
            size = out.meta.untyped_storage().nbytes()
            if out.storage in stays:
                kept += 0 if out.storage in seen else size
                seen.add(out.storage)
                continue
            windows[out.storage] = windows.get(out.storage, 0) + 1
            if out.storage not in sizes:
                sizes[out.storage] = size
                between += size
        held[node.index] = between
        for value in needs.last.get(node.index, ()):
            if value.storage not in windows:
                continue
            windows[value.storage] -= 1
            if not windows[value.storage]:
                between -= sizes.pop(value.storage)
                del windows[value.storage]
    made[position:] = [kept] * (len(made) - position)
    return held, made
