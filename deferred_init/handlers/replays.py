"""The replays of one execution: one for each recording, in the order of recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deferred_init.handlers.protocol import Order, Step, Workspace
from deferred_init.named_seeds import draws_for
from deferred_init.record import (
    DeferredTensor,
    Mark,
    Recording,
    Replay,
    Value,
    attributes_in_place,
    dressed,
    hand_out,
    handed_out,
    recompute,
    value_in_place,
)
from deferred_init.record.kept_states import unsettle
from deferred_init.record.trackers import copy_of, put_into
from deferred_init.slots import Slot

__all__ = ["Replays", "known_value", "recorded_value"]


class Replays:
    """The replays of one execution; implements the `Session` protocol."""

    def __init__(self, steps: Sequence[Step], workspace: Workspace) -> None:
        self._workspace = workspace
        self._request = workspace.request
        self._slots: dict[Value, list[Slot]] = {}
        by_recording: dict[Recording, list[Slot]] = {}
        for step in steps:
            for slot in step.claim.slots:
                value = known_value(slot)
                self._slots.setdefault(value, []).append(slot)
                by_recording.setdefault(value.recording, []).append(slot)
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._computed: list[tuple[Slot, Value, Tensor]] = []
        self._leaves: dict[Value, Tensor] = {}
        self._device = self._request.device
        if self._request.values_from is not None:
            self._device = torch.device(self._request.values_from)
        self._waiting = sorted(
            ((recording.serial, recording) for recording in by_recording),
            key=lambda item: item[0],
            reverse=True,
        )
        self._members = by_recording
        self._replays: dict[int, Replay] = {}
        self._handed: dict[Value, Tensor] = {}
        self._parts: set[Recording] = set()

    def run(self, step: Step) -> None:
        """Replay as far as this step's tensors need."""
        assert step.order is not None, "claims of recorded tensors have an order"
        serial, index = step.order
        self._reach(serial)
        self._run(self._replays[serial], index + 1)

    def advance(self, order: Order | None) -> None:
        """Replay up to a place in the order, or to the end and settle."""
        if order is None:
            self._finish()
            return
        self._reach(order[0])
        serial, index = order
        if serial in self._replays:
            replay = self._replays[serial]
            self._run(replay, index)
            node = replay.recording.nodes[index]
            if isinstance(node, Mark):
                self._lend(replay, node)

    def _lend(self, replay: Replay, mark: Mark) -> None:
        """Let the module of a mark find the states of its generators as in eager."""
        if mark.tracked is not None:
            tracker = mark.tracked.tracker
            found = {n: copy_of(state) for n, state in tracker.get_states().items()}
            self._workspace.on_undo(partial(put_into, tracker, found))
        replay.lend_states(mark)

    def _run(self, replay: Replay, upto: int | None = None) -> None:
        replay.run(upto=upto, on_ready=self._take, on_filled=self._fulfil)

    def _reach(self, serial: int) -> None:
        """Run all earlier recordings to their ends, then open this one.

        In this order, because a seeded recording begins where the generators are:
        the second of two must go on where the first ended, as in eager.
        """
        while self._waiting and self._waiting[-1][0] <= serial:
            for replay in self._replays.values():
                self._run(replay)
                replay.settle_states()  # with which the next one may go on
            number, recording = self._waiting.pop()
            self._replays[number] = self._open(recording, self._members[recording])
        for number, replay in self._replays.items():
            if number < serial:
                self._run(replay)

    def _open(self, recording: Recording, members: list[Slot]) -> Replay:
        # By name, a step of which this rank keeps no part was skipped before.
        slots = [slot for slot in members if recorded_value(slot) is not None]
        self._workspace.on_undo(partial(unsettle, recording))
        if self._request.seed is not None and self._request.rng == "eager":
            self._workspace.on_undo(recording.start_from_here(self._device))
        wanted = [known_value(slot) for slot in slots]
        draws = draws_for(
            recording, dict(zip(wanted, slots, strict=True)), self._request
        )
        for value in wanted:
            # An earlier call made something that lies in the same memory.
            if (real := handed_out(value, self._request.device)) is not None:
                self._handed[value] = real
        places = recording.places.values()
        inside = {value for named in places for value in named.values()}
        if len(inside) > len(set(wanted)):
            self._parts.add(recording)
        return Replay(recording, self._device, wanted=wanted, before_random=draws)

    def _finish(self) -> None:
        """Run what is left, then make tensors that were computed from leaves."""
        seeded = self._request.seed is not None and self._request.rng == "eager"
        if self._waiting:
            self._reach(self._waiting[0][0])
        for replay in self._replays.values():
            self._run(replay)
            replay.finish(keep_generators=True if seeded else None)
        self._replays.clear()
        for slot, value, tensor in self._computed:
            again = recompute(value, self._leaves, self._request.device, tensor)
            real = tensor if again is None else again
            self._workspace.adopt(slot, dressed(slot.tensor, real))
        self._computed.clear()

    def _take(self, value: Value, tensor: Tensor) -> None:
        """Give a tensor that is ready to every object that stands for it."""
        tensor = self._on_target(tensor)
        known = self._handed.get(value)
        if known is None and value.recording in self._parts:
            hand_out(value, tensor, self._request.device)
        for slot in self._slots[value]:
            if not isinstance(slot.tensor, DeferredTensor):  # sharded since
                self._workspace.adopt(slot, tensor)
                home = slot.read()
                for name, found in attributes_in_place(
                    slot.owner, slot.name, value
                ).items():
                    home.__dict__.setdefault(name, found)
                continue
            real = tensor if known is None else known
            if not slot.tensor.is_leaf:
                self._computed.append((slot, value, real))
                continue
            self._workspace.adopt(slot, dressed(slot.tensor, real))
            if slot.tensor.requires_grad:
                self._leaves[value] = slot.tensor

    def _fulfil(self, value: Value, write: Callable[[Tensor, Any], None]) -> bool:
        """Let the parts that stay here be written, where all holders were sharded."""
        slots = self._slots[value]
        like = (value.shape, value.dtype)
        return (
            self._device == self._request.device
            and not any(isinstance(slot.tensor, DeferredTensor) for slot in slots)
            and all((s.tensor.shape, s.tensor.dtype) == like for s in slots)
            and all(self._workspace.fulfil(slot, write) for slot in slots)
        )

    def _on_target(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the target device, with everything that shares its memory.

        Needed for values replayed elsewhere, and for tensors that the constructor
        put on a device of its own choice.
        """
        device = self._request.device
        if tensor.device == device:
            return tensor
        if tensor.layout is not torch.strided or not tensor.is_leaf:
            return tensor.to(device)
        storage = tensor.untyped_storage()
        known = self._moved.get(storage._cdata)
        if known is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(storage, 0, (storage.nbytes(),), (1,))
            known = self._moved[storage._cdata] = (
                storage,
                flat.to(device).untyped_storage(),
            )
        moved = torch.empty(0, dtype=tensor.dtype, device=device)
        return moved.set_(
            known[1], tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def recorded_value(slot: Slot) -> Value | None:
    """Return the recorded value behind a slot, also if it was sharded since."""
    return value_in_place(slot.owner, slot.name, slot.tensor)


def known_value(slot: Slot) -> Value:
    """Return the recorded value behind a slot that was claimed for having one."""
    value = recorded_value(slot)
    assert value is not None, "claimed because it has one"
    return value
