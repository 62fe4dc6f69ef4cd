"""Allocator for DTensors: each rank keeps its part of what one device would have made.

[Note: Values that do not depend on the world size]
Problem: DTensor's own random operations, and init functions run on local shards, give
other values for every world size, mesh and sharding; shards come out alike, replicas
apart.

Naive attempt: seed each rank by its coordinate. Replicas agree then, but nothing
equals the model on one device, and fan-in is computed from shards.

Design: the init code runs on a tensor of full size (see `staging.py`) with the same
generator state on every rank, and the rank keeps its slice. No communication; all
ranks draw all numbers, so their generators stay together.

Shortcoming: every rank computes everything. The whole is as fast as one device would
be, not W times faster; a rank's memory holds the largest full tensor meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from deferred_init.aliases import dense_bytes, has_own_dispatch
from deferred_init.distributed.fsdp2 import fsdp_params
from deferred_init.distributed.quantized_shards import cut
from deferred_init.distributed.slicing import (
    Axis,
    Region,
    Segments,
    copy_region,
    region_of,
    window_of,
)
from deferred_init.fast.window import Window
from deferred_init.handlers.protocol import Request, Workspace
from deferred_init.handlers.registry import add_allocator, add_refresher
from deferred_init.slots import Inventory

__all__ = ["DTensorAllocator", "FSDP2Refresher", "region_on_this_rank"]
__all__ += ["rows_of_rank"]


class DTensorAllocator:
    """Allocates local tensors, and keeps a rank's part of full values."""

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        """Say why the tensor cannot be allocated, or None."""
        assert isinstance(tensor, DTensor)
        if _has_partial_sums(tensor.placements):
            return (
                f"has the placements {list(tensor.placements)}, expected no partial "
                "sums: a part of a sum has no value of its own to initialize"
            )
        local = tensor._local_tensor
        if not local.is_meta and has_own_dispatch(type(local)):
            return (
                f"is a DTensor over `{type(local).__name__}`, expected plain local "
                "tensors: materialize the model first, then shard it"
            )
        mesh = tensor.device_mesh.device_type
        if request.device.type not in (mesh, "cpu"):
            return (
                f"is sharded over a mesh of {mesh} devices and cannot be made on "
                f"{request.device}: pass device={mesh!r}"
            )
        try:
            region_on_this_rank(tensor)
        except ValueError as error:
            return f"cannot be cut: {error}"
        return None

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Bytes of this rank's part in the given dtype."""
        return _local(tensor).numel() * dtype.itemsize

    def full_bytes(self, tensor: Tensor) -> int:
        """Bytes of the whole tensor."""
        return dense_bytes(tensor)

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a DTensor of the same sharding with uninitialized local memory."""
        assert isinstance(tensor, DTensor)
        local = tensor._local_tensor
        data = torch.empty_strided(
            local.size(), local.stride(), dtype=tensor.dtype, device=device
        )
        return _wrap(tensor, data, tensor._spec)

    def part_of(
        self, tensor: Tensor, full: Tensor, device: torch.device | None = None
    ) -> Tensor | None:
        """Return a DTensor over this rank's part, where it can be cut in one piece.

        A value of a class of its own is cut as `distributed/quantized_shards.py` says.
        None for other dense values, of which `keep` copies the part, and where the
        home has memory already.
        """
        assert isinstance(tensor, DTensor)
        region = region_on_this_rank(tensor)
        if region is None:
            return None
        if has_own_dispatch(type(full)):
            return _wrap(tensor, cut(tensor, full), tensor._spec)
        if (
            region.cut is None
            or full.device != device
            or full.dtype != tensor.dtype
            or full.size() != tensor.size()
            or not tensor._local_tensor.is_contiguous()
            or not full.is_contiguous()  # else all of it is copied first, on a CPU
        ):
            return None
        data = full.detach().narrow_copy(*region.cut)
        return _wrap(tensor, data, tensor._spec)

    def keep(self, tensor: Tensor, full: Tensor) -> None:
        """Copy this rank's part of a full value into the local tensor."""
        assert isinstance(tensor, DTensor)
        region = region_on_this_rank(tensor)
        if region is not None:
            copy_region(tensor._local_tensor, full.detach(), region)

    def fill(
        self,
        tensor: Tensor,
        write: Callable[[Tensor, Window], None],
        *,
        dry_run: bool = False,
    ) -> bool:
        """Let this rank's part be written in place, if it is a window of the whole."""
        assert isinstance(tensor, DTensor)
        local, region = tensor._local_tensor, region_on_this_rank(tensor)
        if region is None or local.numel() == 0:
            return True
        window = window_of(tensor.size(), region)
        if window is None or not local.is_contiguous():
            return False
        if not dry_run:
            write(local.detach(), window)
        return True

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the full value; every rank of the mesh has to call this."""
        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            return tensor.full_tensor()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in another dtype, on the same mesh."""
        assert isinstance(tensor, DTensor)
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(tensor.size(), tensor.stride(), dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
        return _wrap(tensor, tensor._local_tensor.detach().to(dtype), spec)


class FSDP2Refresher:
    """Lets FSDP2 look again at the parameters that were given memory."""

    def refresh(
        self, inventory: Inventory, holders: Sequence[Any], workspace: Workspace
    ) -> None:
        """Refresh the 1-D data from which FSDP2 gathers, and its padding.

        FSDP2 does this by itself in the first forward; doing it now brings padding
        copies into the peak that is measured, and leaves no stale data to an audit.
        """
        params = [
            param
            for param in fsdp_params(site.module for site in inventory.sites())
            if not param.sharded_param.is_meta
        ]
        before = [(vars(param), vars(param).copy()) for param in params]
        workspace.on_undo(partial(_put_back, before))
        for param in params:
            param.reset_sharded_param()
            # Whether gathering is the tensor's own affair depends on its class.
            param._init_extensions()


def _put_back(before: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for attributes, values in before:
        attributes.update(values)


def region_on_this_rank(tensor: DTensor) -> Region | None:
    """Return the indices that this rank keeps, or None outside of the mesh.

    Raises:
        ValueError: If the local tensor has not the shape that the placements give.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    return _region(
        tensor.size(),
        tensor.placements,
        _shape_of(mesh),
        tuple(coordinate),
        tensor._local_tensor.size(),
    )


def rows_of_rank(tensor: DTensor, rank: int) -> Segments | None:
    """Return the ranges of the first dim that a rank keeps, or None outside the mesh.

    Args:
        tensor: One with dims.
        rank: A global rank.
    """
    mesh = tensor.device_mesh
    places = (mesh.mesh == rank).nonzero().tolist()
    if not places:
        return None
    where = tuple(places[0])
    return _region(tensor.size(), tensor.placements, mesh.shape, where, None).dims[0]


_mesh_shapes: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()


def _shape_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the shape of a mesh, which never changes; torch computes it each time."""
    shape = _mesh_shapes.get(mesh)
    if shape is None:
        shape = _mesh_shapes[mesh] = mesh.shape
    return shape


@lru_cache(maxsize=256)
def _has_partial_sums(placements: tuple[Any, ...]) -> bool:
    return any(isinstance(placement, Partial) for placement in placements)


@lru_cache(maxsize=4096)
def _region(
    shape: torch.Size,
    placements: tuple[Any, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    local_shape: torch.Size | None,
) -> Region:
    """Compute a region; the layers of a model have few different ones."""
    axes = [
        Axis(
            dim=getattr(placement, "dim", None),
            size=mesh_shape[axis],
            rank=coordinate[axis],
            split_factor=getattr(placement, "split_factor", None),
        )
        for axis, placement in enumerate(placements)
    ]
    return region_of(shape, axes, local_shape)


def _wrap(like: DTensor, local: Tensor, spec: Any) -> Tensor:
    # Not by a call of the class, which adds nothing but the time of an empty
    # `__init__` behind a wrapper.
    new: Any = DTensor.__new__
    made: Any = new(DTensor, local, spec, requires_grad=like.requires_grad)
    if isinstance(like, nn.Parameter):
        # As `nn.Parameter` marks it, without the `detach()` that it calls before:
        # a replay hands tensors over while dispatch to subclasses is off.
        made._is_param = True
    return made  # type: ignore[no-any-return]


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


add_allocator(DTensorAllocator(), DTensor)
add_refresher(FSDP2Refresher())
