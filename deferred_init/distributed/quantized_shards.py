"""Shards of tensors that have a representation of their own, such as FP8 weights.

[Note: Quantize the whole, then cut]
Problem: a scale belongs to a whole tensor. Quantizing each shard by itself, as
Transformer Engine's `reset_parameters` does on shards, needs a reduction of the
maximum between ranks, and with delayed scaling leaves another history on each.

Design: every rank quantizes the whole, which it holds for a moment anyway, and cuts
its part out of that, with the operations by which `fully_shard` cuts a tensor that
exists. So a model that is sharded first and made afterwards has the same bits and
scales as one that was made first, and nothing is communicated.

Shortcoming: parts have to be equal, because FSDP2 pads before it gathers and such
tensors are gathered as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from deferred_init.distributed.fsdp2 import fsdp_params

__all__ = ["cut", "unfit_shards"]


def cut(tensor: DTensor, full: Tensor) -> Tensor:
    """Return this rank's part of a full value, as `fully_shard` would cut it.

    Args:
        tensor: Says by its placements and mesh which part; sharded along one mesh
            axis at most, and this rank is in the mesh.
        full: The whole, of any class for which torch's `split` is defined.

    Returns:
        A tensor with memory of its own; where ranks hold unequal parts, a view of one
        that is padded to the largest part.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    axes = _sharded_axes(tensor)
    axis, dim = axes[0] if axes else (0, 0)
    num_shards = tensor.device_mesh.size(axis) if axes else 1
    index = coordinate[axis] if axes else 0
    with torch.no_grad():
        whole = full.detach()
        chunks = torch.chunk(whole, num_shards, dim)
        padded = whole.new_zeros(chunks[0].size())
        length = 0
        if index < len(chunks):
            length = chunks[index].size(dim)
            padded.narrow(dim, 0, length).copy_(chunks[index])
        return padded.narrow(dim, 0, length)


def unfit_shards(modules: Iterable[nn.Module]) -> dict[int, str]:
    """Say which parameters cannot hold a part of a quantized weight.

    Args:
        modules: All modules of the models.

    Returns:
        For `id(parameter)` of each one that FSDP2 manages: why, and what to do; an
        empty text if it can. What is sharded in another way is missing.
    """
    return {
        id(param.sharded_param): _why_unfit(param) for param in fsdp_params(modules)
    }


def _why_unfit(param: Any) -> str:
    tensor: DTensor = param.sharded_param
    if param.offload_to_cpu:
        return (
            "FSDP2 keeps it on the CPU, where it cannot be quantized: shard without "
            "the offload policy, or keep it in high precision"
        )
    axes = _sharded_axes(tensor)
    others = [p for p in tensor.placements if not isinstance(p, (Shard, Replicate))]
    if others or len(axes) > 1 or any(dim for _, dim in axes):
        return (
            f"its placements are {list(tensor.placements)}, expected one shard along "
            "dim 0: shard it with `fully_shard` alone, or keep it in high precision"
        )
    num_shards = math.prod(tensor.device_mesh.size(axis) for axis, _ in axes)
    if tensor.size(0) % num_shards:
        return (
            f"its {tensor.size(0)} rows do not divide by {num_shards} ranks, and FSDP2 "
            "gathers only equal parts of such a weight: shard it over a number of "
            "ranks that divides its rows, or keep it in high precision"
        )
    return ""


def _sharded_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """Return the mesh axes that shard, each with the dim of the tensor."""
    return [
        (axis, placement.dim)
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    ]
