"""Says what a recording left to Transformer Engine and a call does not repeat.

[Note: Modules that a recording left to themselves]
A recording keeps every operation, but of Transformer Engine's modules only the place in
the order. A module that the constructor threw away again, or that is not among the
models of the call, draws nothing there, and what comes after it begins with other
numbers. Nor is repeated what the constructor did with weights of such a module, which
had no memory: a copy, a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Step
from deferred_init.record import Recording, place_of, value_in_place

__all__ = ["left_out_assumptions"]

_DRAWS_NOTHING = frozenset({"LayerNorm", "RMSNorm", "Bias"})


def left_out_assumptions(steps: Sequence[Step], policy: str) -> tuple[str, ...]:
    """Say what was left out, as far as it could change a value that these steps make.

    Args:
        steps: In their order.
        policy: The RNG policy. Only that of eager construction goes by the order.
    """
    last: dict[Recording, int] = {}
    replayed: set[Recording] = set()
    for step in steps:
        left = place_of(step.site.module)
        if left and not _draws(type(step.site.module)):
            continue
        for recording, place in (left,) if left else _recorded(step):
            last[recording] = max(place, last.get(recording, -1))
            if not left:
                replayed.add(recording)
    made = {id(step.site.module) for step in steps}
    found: list[str] = []
    for recording, end in last.items():
        if policy == "eager":
            found += _draws_left_out(recording, made, end)
        if policy == "eager" and recording not in replayed:
            found += _replay_left_out(recording, made)
        found += _operations_left_out(recording)
    return tuple(dict.fromkeys(found))


def _recorded(step: Step) -> Iterator[tuple[Recording, int]]:
    """Yield the recordings of which a step replays something, and how far it goes."""
    if step.order is not None:
        for slot in step.claim.slots:
            value = value_in_place(slot.owner, slot.name, slot.tensor)
            if value is not None:
                yield value.recording, step.order[1]


def _draws_left_out(recording: Recording, made: set[int], end: int) -> Iterator[str]:
    kinds = recording.marked_kinds
    drawn = [mark for mark in recording.marks if _draws(kinds[mark.index])]
    left_out = [mark for mark in drawn if id(mark.payload) not in made]
    if not left_out or left_out[0].index >= end:
        return
    first = left_out[0].index
    later = any(mark.index > first for mark in drawn if mark not in left_out)
    if later or any(n.stream is not None for n in recording.nodes[first : end + 1]):
        count = sum(mark.index < end for mark in left_out)
        names = dict.fromkeys(kinds[mark.index].__name__ for mark in left_out[:count])
        yield (
            f"{listing(list(names))}: of the modules that the constructor left to "
            f"Transformer Engine this call does not make {count}, and leaves out what "
            "they drew before others; for the numbers of eager construction keep them "
            "in the model, and make all of it in one call"
        )


def _replay_left_out(recording: Recording, made: set[int]) -> Iterator[str]:
    kinds = recording.marked_kinds
    marks = [
        mark
        for mark in recording.marks
        if id(mark.payload) in made and _draws(kinds[mark.index])
    ]
    end = marks[-1].index if marks else 0
    if any(node.stream is not None for node in recording.nodes[:end]):
        names = dict.fromkeys(kinds[mark.index].__name__ for mark in marks)
        yield (
            f"{listing(list(names))}: this call makes nothing else that the "
            "constructor drew, and leaves out what it drew before; for the numbers of "
            "eager construction make all of the model in one call"
        )


def _draws(kind: type) -> bool:
    """Whether an initial value of a class may be drawn; a subclass may draw any."""
    if not kind.__module__.startswith("transformer_engine."):
        return True
    return _DRAWS_NOTHING.isdisjoint(base.__name__ for base in kind.__mro__)


def _operations_left_out(recording: Recording) -> Iterator[str]:
    if recording.left_out:
        yield (
            "what the constructor did with weights that it left to Transformer Engine "
            f"({listing(list(recording.left_out))}) changes no value of the model; "
            "where it does, do it after `materialize`"
        )
