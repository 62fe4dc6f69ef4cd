"""What a plan means for each device: bytes per tensor and rank, and the peak.

[Note: Ranks without processes]
A world size is a number here. Parameters are counted as FSDP2 shards them by default:
along dim 0, in equal chunks, the last ones padded to full size, so that all ranks hold
the same bytes. Buffers are whole on every rank. While a rank makes its part of a
tensor it holds the full one (see the note in `handlers/dtensor.py`). Weights that are
stored quantized are made before the model is sharded, so that each device holds all
of them for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from deferred_init.aliases import dense_bytes
from deferred_init.handlers.protocol import Claim, Request, Step, is_staged
from deferred_init.handlers.registry import allocator_for
from deferred_init.hardware import Hardware
from deferred_init.record import value_in_place
from deferred_init.replay_memory import replay_scratch
from deferred_init.representation import Representation
from deferred_init.slots import Inventory, Slot, SlotKind
from deferred_init.staging import largest_staged_bytes
from deferred_init.target_dtype import final_dtype

__all__ = ["Forecast", "PlannedTensor", "forecast"]
__all__ += ["new_bytes", "peak_of", "representation_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor that will be made.

    Attributes:
        fqn: Its first qualified name.
        shape: Its full shape.
        dtype: What it computes as.
        stored_as: `dense`, or how it is stored quantized.
        num_bytes: Bytes on the device; 0 if it lies in another one's storage.
        rank_bytes: Bytes on each rank once it is sharded.
        initializer: Who makes it.
        source: Where its values come from.
        draws: Whether random numbers go into it; None where only its initializer
            knows.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    stored_as: str
    num_bytes: int
    rank_bytes: int
    initializer: str
    source: str
    draws: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan in bytes.

    Attributes:
        tensors: What will be made, in order.
        world_size: Over how many ranks parameters are sharded.
        gpu: What it was planned for, or None.
        rank_bytes: What stays on each device.
        peak_bytes: The most that a device holds while the model is made.
        peak_reason: What makes that peak.
    """

    tensors: tuple[PlannedTensor, ...]
    world_size: int
    gpu: Hardware | None
    rank_bytes: int
    peak_bytes: int
    peak_reason: str

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in the GPU's memory; None without a GPU.

        The model alone: gradients, optimizer state and activations come on top.
        """
        return None if self.gpu is None else self.peak_bytes <= self.gpu.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-compatible data."""
        data = asdict(self)
        data["tensors"] = list(data["tensors"])
        return {"fits": self.fits, **data}


def forecast(
    steps: Sequence[Step],
    inventory: Inventory,
    request: Request,
    *,
    world_size: int = 1,
    gpu: Hardware | None = None,
) -> Forecast:
    """Count what a plan's steps put on each device."""
    counted: set[int] = set()
    tensors = tuple(
        _planned(slot, step, inventory, request, counted, world_size)
        for step in steps
        for slot in step.claim.slots
    )
    whole = sum(tensor.num_bytes for tensor in tensors)
    stays = sum(tensor.rank_bytes for tensor in tensors)
    quantized = any(step.claim.stored for step in steps)
    if world_size > 1 and not quantized:
        peak, name = _in_parts(steps, stays)
        more, parts = peak - stays, ", of which each rank keeps its part"
    else:
        peak, name = peak_of(steps, inventory, request, replay_scratch(steps))
        more, parts = peak - whole, ""
    reason = "the tensors themselves"
    if more:
        reason += f", and {more:,} bytes more while `{name}` is made{parts}"
    if world_size > 1 and quantized:
        reason = (
            "all of the model on each device, since weights that are stored quantized "
            f"are made before they are sharded; then {stays:,} bytes stay"
        )
    return Forecast(
        tensors=tensors,
        world_size=world_size,
        gpu=gpu,
        rank_bytes=stays,
        peak_bytes=peak,
        peak_reason=reason,
    )


def new_bytes(
    claim: Claim, inventory: Inventory, request: Request, counted: set[int]
) -> int:
    """Bytes that a claim adds: those of its storages that were not counted before."""
    return sum(
        [_new_bytes(slot, claim, inventory, request, counted) for slot in claim.slots]
    )


def _new_bytes(
    slot: Slot, claim: Claim, inventory: Inventory, request: Request, counted: set[int]
) -> int:
    """Bytes that a slot adds: those of its storage, once per storage."""
    group = inventory.groups[slot.tensor_id]
    if group.key in counted:
        return 0
    counted.add(group.key)
    if group.shared:
        return group.num_bytes
    stored = representation_of(slot, claim)
    if stored is None:
        return _dense_bytes(slot, request)
    here = getattr(slot.tensor, "_local_tensor", slot.tensor)
    return _bytes(slot, stored, tuple(here.shape), request)


def representation_of(slot: Slot, claim: Claim) -> Representation | None:
    """Say how a claim stores a slot quantized; None for dense."""
    if not claim.stored:
        return None
    return next((how for each, how in claim.stored if each is slot), None)


def _scratch_of(step: Step, request: Request) -> tuple[int, str]:
    """Bytes on top of what stays while a step runs, and the name to blame.

    What is cast exists in its own dtype first: one tensor at a time in a replay, those
    of a module together elsewhere.
    """
    whole = step.site.title
    if request.dtype is None and request.recipe is None:  # then nothing is cast
        return step.claim.scratch_bytes, whole
    cast = [
        (dense_bytes(slot.tensor), slot.fqn)
        for slot in step.claim.slots
        if final_dtype(slot, request) != slot.tensor.dtype
        and not is_staged(allocator_for(slot.tensor))
    ]
    largest, name = max(cast, default=(0, whole))
    if step.claim.order is None:
        largest, name = sum(size for size, _ in cast), whole
    if step.claim.scratch_bytes >= largest:
        return step.claim.scratch_bytes, whole
    return largest, name


def peak_of(
    steps: Sequence[Step],
    inventory: Inventory,
    request: Request,
    between: Mapping[int, int] = MappingProxyType({}),
) -> tuple[int, str]:
    """The most that is held on one device, and the name of what is made then.

    Args:
        steps: In the order in which they run.
        inventory: What they were made from.
        request: What was asked for.
        between: What a replay holds besides, by index of the step.
    """
    made, most, name = 0, 0, ""
    for step in steps:
        made += step.num_bytes
        scratch, what = _scratch_of(step, request)
        scratch += between.get(step.index, 0)
        if made + scratch > most:
            most, name = made + scratch, what
    return max(most, made) + largest_staged_bytes(inventory), name


def _in_parts(steps: Sequence[Step], stays: int) -> tuple[int, str]:
    """The peak of one rank: its parts, and the largest tensor in full."""
    full = (
        (dense_bytes(slot.tensor), slot.fqn)
        for step in steps
        for slot in step.claim.slots
        if slot.kind is SlotKind.PARAMETER
    )
    largest, name = max(full, default=(0, ""))
    most = max((step.claim.scratch_bytes for step in steps), default=0)
    return stays + largest + most, name


def _planned(
    slot: Slot,
    step: Step,
    inventory: Inventory,
    request: Request,
    counted: set[int],
    world_size: int,
) -> PlannedTensor:
    tensor = slot.tensor
    stored = representation_of(slot, step.claim)
    num_bytes = _new_bytes(slot, step.claim, inventory, request, counted)
    rank_bytes = num_bytes
    shared = inventory.groups[id(tensor)].shared
    if world_size > 1 and num_bytes and _would_be_sharded(slot) and not shared:
        rows = -(-tensor.shape[0] // world_size)
        part = (rows, *tensor.shape[1:])
        rank_bytes = _bytes(slot, stored, part, request)
    value = value_in_place(slot.owner, slot.name, tensor)
    return PlannedTensor(
        fqn=slot.fqn,
        shape=tuple(tensor.shape),
        dtype=str(final_dtype(slot, request)).removeprefix("torch."),
        stored_as="dense" if stored is None else str(stored),
        num_bytes=num_bytes,
        rank_bytes=rank_bytes,
        initializer=step.initializer.name,
        source=step.claim.source,
        draws=None if value is None else value.draws,
    )


def _bytes(
    slot: Slot,
    stored: Representation | None,
    shape: tuple[int, ...],
    request: Request,
) -> int:
    """Bytes of a slot's tensor if it has a certain shape."""
    if stored is not None:
        known = stored.num_bytes(shape, request.compute_capability)
        if known is not None:
            return known
    if shape != tuple(slot.tensor.shape):
        return math.prod(shape) * final_dtype(slot, request).itemsize
    return _dense_bytes(slot, request)


def _dense_bytes(slot: Slot, request: Request) -> int:
    allocator = allocator_for(slot.tensor)
    assert allocator is not None, "checked by unallocatable"
    return allocator.num_bytes(slot.tensor, final_dtype(slot, request))


def _would_be_sharded(slot: Slot) -> bool:
    """Whether FSDP2 would shard it; scalars are refused before."""
    return slot.kind is SlotKind.PARAMETER and slot.tensor.ndim > 0
