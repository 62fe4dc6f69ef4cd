"""Which ranks share a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from deferred_init.distributed.rendezvous import Meeting
from deferred_init.handlers.protocol import Request
from deferred_init.slots import Inventory

__all__ = ["meeting_for", "ranks_of", "sharing_ranks"]


def sharing_ranks(inventory: Inventory, request: Request) -> tuple[int, ...]:
    """Return the ranks that hold parts of the same tensors, or nothing if just one."""
    tensors = (slot.tensor for slot in inventory.slots)
    return ranks_of(tensors, request.broadcast_from)


def ranks_of(tensors: Iterable[Tensor], broadcast_from: int | None) -> tuple[int, ...]:
    """Return the ranks of all meshes of the tensors, or all if there is a broadcast."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    if "fake" in dist.get_backend() or dist.get_world_size() == 1:
        return ()
    if broadcast_from is not None:
        return tuple(range(dist.get_world_size()))
    ranks: set[int] = set()
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            ranks.update(mesh.mesh.flatten().tolist())
    return tuple(sorted(ranks)) if len(ranks) > 1 and dist.get_rank() in ranks else ()


def meeting_for(inventory: Inventory, request: Request, about: str) -> Meeting | None:
    """Return the meeting of the ranks that share a model, or None if just one."""
    ranks = sharing_ranks(inventory, request)
    return Meeting(ranks, request.rank_timeout_s, about) if ranks else None
