"""Where loaded values go: memory for a tensor of the model, made in its final form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch, is_deferred
from deferred_init.handlers.protocol import Workspace
from deferred_init.handlers.registry import allocator_for
from deferred_init.loading.as_stored import copy_as_stored, special_tensor
from deferred_init.loading.boxes import Segments
from deferred_init.loading.matching import Load
from deferred_init.poison import fill_poison
from deferred_init.slots import Inventory
from deferred_init.sources.protocol import (
    ByteFile,
    Extent,
    TensorInfo,
    TensorSource,
)

__all__ = ["Destination", "Destinations"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """Memory that is to be filled.

    Attributes:
        memory: A plain tensor: the parameter's own memory, or scratch.
        region: For each dim the ranges of the whole tensor that it keeps; None: all.
        in_order: Whether it shares memory with others, so that order matters.
        done: What to call when the values have arrived, or None.
        in_place: Whether it has its values already: it was left in the file, or
            copied as it is stored.
        reader: The rank that reads it for all ranks of a node, or None.
    """

    memory: Tensor
    region: Sequence[Segments] | None = None
    in_order: bool = False
    done: Callable[[], None] | None = None
    in_place: bool = False
    reader: int | None = None


class Destinations:
    """Makes memory for what is loaded, and hands it to the model.

    Args:
        inventory: The model's slots.
        workspace: What changes the model.
        source: Where the values come from.
    """

    def __init__(
        self, inventory: Inventory, workspace: Workspace, source: TensorSource
    ) -> None:
        self._inventory = inventory
        self._workspace = workspace
        self._source = source
        self._device = workspace.request.device
        self._mapped: dict[int, Any] = {}
        self.bytes_in_place = 0

    def make(
        self, load: Load, infos: Mapping[str, TensorInfo], *, may_stay: bool = True
    ) -> Destination:
        """Make the memory for one tensor.

        Args:
            load: The tensor and what it is made of.
            infos: What is stored.
            may_stay: Whether values may be left in the file, where that is possible.
        """
        slot = load.target.slot
        if slot.key not in slot.container:
            raise RuntimeError(
                f"`{load.target.name}` became part of another parameter when its "
                "module was initialized, so that nothing can be loaded into it: "
                "load the weights after `materialize`, by the module's own method"
            )
        tensor: Tensor = slot.read()
        if is_deferred(tensor):
            final = self._final_class(tensor)
            if final is not None:
                mapped = self._map(load, tensor, infos) if may_stay else None
                return self._new(load, tensor, final, mapped)
            self._workspace.allocate([slot])
            tensor = slot.read()
        return self._existing(load, tensor)

    def _final_class(self, tensor: Tensor) -> type | None:
        """Return the class of an ordinary tensor that has its memory to itself."""
        if self._inventory.groups[id(tensor)].shared:
            return None
        if type(tensor) in (Tensor, torch.nn.Parameter):
            return type(tensor)
        allocator = allocator_for(tensor)
        assert allocator is not None, "checked in the plan"
        final = type(allocator.empty_like(tensor, torch.device("meta")))
        return None if has_own_dispatch(final) else final

    def _new(
        self, load: Load, tensor: Tensor, final: type, data: Tensor | None
    ) -> Destination:
        """Make memory in the final dtype, unless there is data in the file."""
        in_place = data is not None
        if data is None:
            data = torch.empty_strided(
                tensor.size(),
                tensor.stride(),
                dtype=load.target.dtype,
                device=self._device,
            )
            if self._workspace.request.verify == "full":
                fill_poison(data)
        memory = data.detach()  # adopting exchanges what `data` refers to
        made = data
        if final is not Tensor:
            made = Tensor._make_subclass(final, data, tensor.requires_grad)
        self._workspace.adopt(load.target.slot, made)
        return Destination(memory=memory, in_place=in_place)

    def _existing(self, load: Load, tensor: Tensor) -> Destination:
        """Use memory that the tensor has."""
        shared = self._inventory.groups[load.target.slot.tensor_id].shared
        local = getattr(tensor, "_local_tensor", None)
        if local is not None:
            return Destination(memory=local.detach(), region=_region(tensor))
        if not has_own_dispatch(type(tensor)):
            return Destination(memory=tensor.detach(), in_order=shared)
        stored = special_tensor(self._source, load.pieces)
        if stored is not None and copy_as_stored(stored, tensor):
            return Destination(memory=tensor.detach(), in_place=True)
        if stored is not None:
            self._workspace.note(
                f"weights: `{load.target.name}` is stored as {type(stored).__name__} "
                f"of another format than the model's {type(tensor).__name__}, and its "
                "values were quantized anew"
            )
        scratch = torch.empty(tensor.size(), dtype=tensor.dtype, device=self._device)
        return Destination(memory=scratch, done=lambda: _arrive(tensor, scratch))

    def _map(
        self, load: Load, tensor: Tensor, infos: Mapping[str, TensorInfo]
    ) -> Tensor | None:
        """Return a tensor over the bytes of the file, if they can stay there."""
        piece = load.pieces[0]
        info = infos[piece.key]
        if (
            self._device.type != "cpu"
            or len(load.pieces) > 1
            or piece.shape != piece.source_view
            or piece.transposed
            or info.extent is None
            or info.dtype != load.target.dtype
            or info.extent.offset % info.dtype.itemsize
            or not tensor.is_contiguous()
            or tensor.numel() == 0
        ):
            return None
        mapped = self._mapping(info.extent.file)
        if mapped is None:
            return None
        self.bytes_in_place += info.num_bytes
        return _over(mapped, info.extent, info.dtype, tensor)

    def _mapping(self, file: ByteFile) -> Any | None:
        if id(file) not in self._mapped:
            self._mapped[id(file)] = file.map()
        return self._mapped[id(file)]


def _over(mapped: Any, extent: Extent, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    flat = torch.frombuffer(
        mapped, dtype=dtype, count=tensor.numel(), offset=extent.offset
    )
    return flat.as_strided(tensor.size(), tensor.stride())


def _arrive(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor of a special class take in values."""
    with torch.no_grad():
        tensor.copy_(values)
    if hasattr(tensor, "_high_precision_init_val"):
        # Transformer Engine hands it to the optimizer as the master weight.
        tensor._high_precision_init_val = values.detach().cpu()


def _region(tensor: Tensor) -> Sequence[Segments]:
    from deferred_init.handlers.dtensor import region_on_this_rank

    region = region_on_this_rank(tensor)  # type: ignore[arg-type]
    if region is None:  # this rank is not in the mesh
        return [() for _ in tensor.size()]
    return region.dims
