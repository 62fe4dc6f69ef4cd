"""Planning for hardware that is not here: which GPU, and how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Request, Step, is_staged
from deferred_init.handlers.registry import allocator_for
from deferred_init.hardware import Hardware, find_gpu
from deferred_init.slots import Inventory, SlotKind

__all__ = ["Outlook", "make_outlook"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a plan is made for.

    Attributes:
        request: The request, with the GPU's compute capability in it.
        gpu: The GPU, or None.
        world_size: Over how many ranks parameters are to be sharded.
    """

    request: Request
    gpu: Hardware | None
    world_size: int

    def problems(self, inventory: Inventory) -> list[str]:
        """Say what the hardware cannot run and what FSDP2 would refuse."""
        return [*self._refused_recipe(), *self._refused_tensors(inventory)]

    def notes(self, steps: Sequence[Step]) -> tuple[str, ...]:
        """Say where the recipe does nothing that the caller may expect of it."""
        recipe = self.request.recipe
        quantizes = recipe is not None and recipe.quantize_weights
        if not quantizes or not steps or any(step.claim.stored for step in steps):
            return ()
        return (
            f"the recipe `{recipe.name}` stores weights of Transformer Engine's "
            "modules quantized, and there is none among what is made",
        )

    def _refused_recipe(self) -> list[str]:
        recipe = self.request.recipe
        if self.gpu is None or recipe is None:
            return []
        reason = recipe.unsupported_reason(self.gpu.compute_capability)
        if reason is None:
            return []
        return [
            f"the recipe `{recipe.name}` cannot run on {self.gpu.name.upper()}: "
            f"{reason}. Choose another recipe, or another GPU"
        ]

    def _refused_tensors(self, inventory: Inventory) -> list[str]:
        if self.world_size == 1:
            return []
        found = []
        sharded = [
            slot.fqn
            for slot in inventory.deferred
            if is_staged(allocator_for(slot.tensor))
        ]
        if sharded:
            found.append(
                f"{len(sharded)} tensors are sharded already ({listing(sharded)}), and "
                f"world_size={self.world_size} would shard them again: plan the model "
                "before it is sharded, or leave out world_size"
            )
        scalars = [
            slot.fqn
            for slot in inventory.deferred
            if slot.kind is SlotKind.PARAMETER and slot.tensor.ndim == 0
        ]
        if scalars:
            found.append(
                f"{len(scalars)} parameters have no dimension to shard, which FSDP2 "
                f"refuses: {listing(scalars)}. Make each a tensor of one element"
            )
        return found


def make_outlook(request: Request, gpu: str | None, world_size: int) -> Outlook:
    """Check what a plan is asked to be made for.

    Raises:
        ValueError: An unknown GPU, a GPU for another device than CUDA, or a world
            size that is not a positive integer.
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size must be a positive integer, found {world_size!r}")
    if gpu is None:
        return Outlook(request=request, gpu=None, world_size=world_size)
    found = find_gpu(gpu)
    if request.device.type != "cuda":
        raise ValueError(
            f"gpu={gpu!r} needs device='cuda', found device={str(request.device)!r}"
        )
    return Outlook(
        request=replace(request, compute_capability=found.compute_capability),
        gpu=found,
        world_size=world_size,
    )
