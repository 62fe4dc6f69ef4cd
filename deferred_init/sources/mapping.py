"""Tensors that are in memory already: a state dict, or a file that torch mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch
from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import TensorBytes
from deferred_init.sources.protocol import Extent, TensorInfo
from deferred_init.sources.quantized import readable

__all__ = ["MappingSource", "flatten"]


class MappingSource:
    """A mapping of names to tensors; its tensors are copied, never taken over.

    Mappings within it become dotted names, and what is no tensor is left out.

    Args:
        mapping: The tensors; neither it nor they are changed.
        name: What reports call it.

    Raises:
        PlanError: There is no tensor in it, some have no memory (meta), or a layout
            that cannot be copied row by row.
    """

    def __init__(
        self, mapping: Mapping[str, Any], name: str = "a mapping in memory"
    ) -> None:
        self.name = name
        self._values = flatten(mapping)
        arrays = [
            key
            for key, value in _leaves(mapping)
            if hasattr(value, "__array_interface__") and not isinstance(value, Tensor)
        ]
        if arrays:
            raise PlanError(
                f"{name}: {len(arrays)} values are numpy arrays, expected tensors: "
                f"{listing(arrays)}. Pass `torch.from_numpy(array)`"
            )
        if not self._values:
            raise PlanError(
                f"{name} holds no tensors: expected names and tensors, as those of "
                "`model.state_dict()`"
            )
        empty = [key for key, value in self._values.items() if value.is_meta]
        if empty:
            raise PlanError(
                f"{name}: {len(empty)} tensors are on the meta device and have no "
                f"values: {listing(empty)}. Materialize the model that they are of"
            )
        odd = [
            key
            for key, value in self._values.items()
            if value.layout is not torch.strided or value.is_quantized
        ]
        if odd:
            raise PlanError(
                f"{name}: {len(odd)} tensors are sparse or quantized, expected dense "
                f"ones: {listing(odd)}. Pass what `to_dense()` or `dequantize()` gives"
            )
        self._tensors = {key: _describe(key, v) for key, v in self._values.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its dotted name."""
        return self._tensors

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor, sharing its memory."""
        value = readable(self._values[key])
        return value[start:stop] if value.ndim else value

    def as_stored(self, key: str) -> Tensor | None:
        """Return a tensor of a special class whole; None for an ordinary one."""
        value = self._values[key]
        return value if has_own_dispatch(type(value)) else None


def flatten(mapping: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of nested mappings by dotted name.

    >>> list(flatten({"model": {"w": torch.zeros(1)}, "step": 3}))
    ['model.w']
    """
    return {
        key: value.detach()
        for key, value in _leaves(mapping)
        if isinstance(value, Tensor)
    }


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _describe(key: str, value: Tensor) -> TensorInfo:
    odd = has_own_dispatch(type(value)) or value.is_conj() or value.is_neg()
    extent = None
    if not odd and value.device.type == "cpu" and value.is_contiguous():
        extent = Extent(file=TensorBytes(f"`{key}`", value), offset=0)
    return TensorInfo(shape=tuple(value.shape), dtype=value.dtype, extent=extent)
