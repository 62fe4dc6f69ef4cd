"""Initializer for models built inside `deferred_init(...)`: replays the recording.

All recorded tensors of one model are steps of one replay, in recorded order. The
steps are per module, for progress and for errors that name a module; a step runs the
replay up to the last operation that touches any of its tensors, and each tensor is
taken over the moment it is ready, so that scratch is freed before the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.handlers.protocol import Claim, Order, Request, Step, Workspace
from deferred_init.handlers.registry import (
    add_allocator,
    add_initializer,
    add_order_hint,
    add_refresher,
)
from deferred_init.handlers.replays import Replays, known_value, recorded_value
from deferred_init.record import DeferredTensor, final_class, last_use, place_of
from deferred_init.record.kept_states import settle_undrawn, unsettle, waiting
from deferred_init.slots import Inventory, ModuleSite, Slot

__all__ = ["RecordedAllocator", "RecordedInitializer", "SavedStates"]


class RecordedInitializer:
    """Makes what a recording knows how to make."""

    name = "recorded"
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim every recorded tensor, at the place of its last use."""
        slots = tuple(slot for slot in pending if recorded_value(slot) is not None)
        if not slots:
            return None
        return Claim(
            slots=slots,
            source="recording",
            order=max(last_use(known_value(slot)) for slot in slots),
            problems=(*_seed_problems(site, slots, request), *_lost_writes(slots)),
            assumptions=_start_assumptions(slots, request),
            settled=True,
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Run one step alone; `session` is what an execution uses."""
        session = self.session([step], workspace)
        session.run(step)
        session.advance(None)

    def session(self, steps: Sequence[Step], workspace: Workspace) -> Replays:
        """Open one replay per recording."""
        return Replays(steps, workspace)


class RecordedAllocator:
    """Sizes and memory of what a recorded tensor will be."""

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        """Return None: whatever was recorded can be replayed, in any layout."""
        return None

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Bytes of its memory: a part of a larger one keeps all, a cast only itself."""
        if dtype == tensor.dtype:
            return int(tensor.untyped_storage().nbytes())
        return tensor.numel() * dtype.itemsize

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return memory in the class that the tensor has when it is real."""
        data = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        final = final_class(tensor)
        if final is Tensor:
            return data.requires_grad_(tensor.requires_grad)
        return Tensor._make_subclass(final, data, tensor.requires_grad)


class SavedStates:
    """Settles states that constructors saved, where nothing is replayed.

    See [Note: Saved states are tokens] in `record/kept_states.py`.
    """

    def refresh(
        self, inventory: Inventory, holders: Sequence[Any], workspace: Workspace
    ) -> None:
        """Bring them where the generators are left: as if nothing had been drawn."""
        for recording in waiting(site.module for site in inventory.sites()):
            workspace.on_undo(partial(unsettle, recording))
            settle_undrawn(recording)


def _seed_problems(
    site: ModuleSite, slots: Sequence[Slot], request: Request
) -> tuple[str, ...]:
    """Refuse a seed that would have led the constructor another way."""
    if request.seed is None or request.rng != "eager":
        return ()
    start = torch.Generator().manual_seed(request.seed).get_state()
    values = [value for slot in slots if (value := recorded_value(slot)) is not None]
    misled = any(
        value.recording.looked_at_random
        and not torch.equal(value.recording.cpu_start, start)
        for value in values
    )
    if not misled:
        return ()
    return (
        f"`{site.title}` was recorded by a constructor "
        "that looked at random values (`.item()`, `if`) or at the seed, which another "
        "seed would have made different: call "
        f"torch.manual_seed({request.seed}) before "
        "`deferred_init(...)` and pass no seed",
    )


def _lost_writes(slots: Sequence[Slot]) -> Iterator[str]:
    """Refuse what was written to shards: they are cut anew from recorded values."""
    for slot in slots:
        if not isinstance(slot.tensor, DeferredTensor) and slot.tensor._version:
            yield (
                f"{slot.describe()} was written after it was sharded, and expected no "
                "write before it has memory: call the function that writes after "
                "`materialize`, or in the one that `deferred_init(...)` records"
            )


def _start_assumptions(slots: Sequence[Slot], request: Request) -> tuple[str, ...]:
    """Say that the numbers may be those of the model that was recorded before."""
    values = [value for slot in slots if (value := recorded_value(slot)) is not None]
    if request.seed is not None or request.rng != "eager":
        return ()
    if not any(value.recording.began_as_another for value in values):
        return ()
    return (
        "another model, which was still to be made, had been recorded from the same "
        "state of the generators: both begin with the same numbers. Unless you seeded "
        "again in between to have it so, make the first before you record the second, "
        "or pass both in one call with `seed=`",
    )


def _place_hint(module: nn.Module) -> Order | None:
    place = place_of(module)
    return None if place is None else (place[0].serial, place[1])


add_initializer(RecordedInitializer(), first=True)
add_allocator(RecordedAllocator(), DeferredTensor)
add_order_hint(_place_hint)
add_refresher(SavedStates())
