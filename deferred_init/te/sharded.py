"""What Transformer Engine makes whole, and FSDP2 keeps in parts.

[Note: Scales of sharded weights]
With per-tensor scaling all parts of a weight have the scale of the whole, which every
rank computes from the whole. When an optimizer or a checkpoint writes a part anew,
current scaling needs the maximum over all ranks: Transformer Engine names the group
for that on the part, but only in the first gathering, so that weights loaded before
it would get a scale per rank. It is named here at once.

Block-scaled weights cannot be cut: `fully_shard` turns one that exists into high
precision, with the values that it had in blocks. The same is done here.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deferred_init.handlers.protocol import Workspace
from deferred_init.handlers.registry import allocator_for
from deferred_init.slots import Slot
from deferred_init.te.probe import is_quantized

__all__ = ["MODEL_PARALLEL_ATTRIBUTES", "adopt_part", "memory_for", "stand_in"]

MODEL_PARALLEL_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
)


def stand_in(slot: Slot) -> nn.Parameter:
    """Return a whole parameter without memory in place of a sharded one."""
    tensor = slot.tensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(whole, requires_grad=tensor.requires_grad)


def memory_for(slot: Slot, device: torch.device) -> nn.Parameter:
    """Return memory for a whole parameter, in place of a deferred one."""
    tensor = slot.tensor
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(whole, requires_grad=False)


def adopt_part(slot: Slot, made: Tensor, workspace: Workspace) -> None:
    """Keep this rank's part of what Transformer Engine made for a sharded parameter.

    Args:
        slot: Holds a DTensor, which stays the same object.
        made: The whole, quantized or not.
        workspace: What changes the model.
    """
    home: Any = slot.tensor
    whole = made
    if is_quantized(made) and not _can_be_cut(made):
        with torch.no_grad():
            whole = made.detach().dequantize()
        workspace.note(
            f"`{slot.fqn}` is kept in {home.dtype} with the values that "
            f"{type(made).__name__} gave it, as `fully_shard` would: such a tensor "
            "cannot be cut"
        )
    workspace.adopt(slot, whole)
    for name in MODEL_PARALLEL_ATTRIBUTES:
        if name in made.__dict__:
            home.__dict__.setdefault(name, made.__dict__[name])
    if is_quantized(home._local_tensor):
        _name_amax_group(home)
    _keep_high_precision(home, made)


def _can_be_cut(tensor: Tensor) -> bool:
    """Whether `split` gives tensors of the same class: those with one scale."""
    return hasattr(tensor, "_scale_inv") and hasattr(tensor, "_transpose")


def _name_amax_group(home: Any) -> None:
    """Say over which ranks a part's next maximum is to be taken."""
    local = home._local_tensor
    if not hasattr(local._quantizer, "with_amax_reduction"):
        return  # delayed scaling reduces its histories by itself
    axes = [axis for axis, p in enumerate(home.placements) if p.is_shard()]
    if not axes:
        return
    group = home.device_mesh.get_group(axes[0])
    if hasattr(type(local), "amax_reduction_group"):
        local.amax_reduction_group = group
    else:  # earlier releases, in which it is a matter of the part's own quantizer
        local._quantizer.amax_reduction_group = group
        local._quantizer.with_amax_reduction = True


def _keep_high_precision(home: Any, made: Tensor) -> None:
    """Cut the values from before quantization, and attach them where TE looks."""
    values = made.__dict__.get("_high_precision_init_val")
    if values is None:
        return
    allocator: Any = allocator_for(home)
    part: Any = allocator.empty_like(home, values.device)
    allocator.keep(part, values)
    local = home._local_tensor
    local._high_precision_init_val = part._local_tensor
    for name, value in made.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is made:
            setattr(local, name, MethodType(value.__func__, local))
