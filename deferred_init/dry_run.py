"""Finds out what code would fill, by running it on tensors without memory.

[Note: Filled or merely written]
A tensor counts as filled if operations that do not read it (`normal_`, `zero_`,
`copy_`, ...) cover all of it: at once, or slice by slice. Scaling, adding, or zeroing
one row writes to a tensor, but leaves garbage where garbage was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import byte_span, dense_bytes, storage_key
from deferred_init.dispatch import DispatchMode
from deferred_init.operators import LEAVES_RAW, OVERWRITES, is_silent_write

__all__ = ["WriteWatch"]

_NORMAL = torch.ops.aten.normal_.default


class WriteWatch(DispatchMode):
    """A mode that notes which storages operations write to, fill, or leave raw.

    Keys are those of `storage_key`. Tensors seen are kept alive for as long as the
    watch, so that no key is given out twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._raw: set[int] = set()
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._kept: list[Tensor] = []

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether all of a tensor's elements were overwritten without being read."""
        if tensor.numel() == 0:
            return True
        key = storage_key(tensor)
        if key is None:
            return False
        first, end = byte_span(tensor)
        for start, stop in sorted(self._spans.get(key, ())):
            if start > first:
                return False
            first = max(first, stop)
            if first >= end:
                return True
        return False

    def is_raw(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by `empty` under the watch and never filled."""
        return storage_key(tensor) in self._raw and not self.is_filled(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note what it writes."""
        idle = func is _NORMAL and _does_nothing(*args, **(kwargs or {}))
        result = args[0] if idle else func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in LEAVES_RAW and isinstance(result, Tensor):
            self._note(result, self._raw)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            info = argument.alias_info
            writes = info is not None and info.is_write
            writes = writes or is_silent_write(func, argument.name)
            if writes and isinstance(value, Tensor):
                self._note(value, self.written)
                if name in OVERWRITES:
                    self._fill(value)
        for key, value in (kwargs or {}).items():
            if key == "out" and isinstance(value, Tensor):
                self._note(value, self.written)
                self._fill(value)
        return result

    def _note(self, tensor: Tensor, found: set[int]) -> None:
        key = storage_key(tensor)
        if key is not None:
            found.add(key)
            self._kept.append(tensor)

    def _fill(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key is not None:
            self._spans.setdefault(key, []).extend(_runs(tensor))


def _does_nothing(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None
) -> bool:
    """Whether `normal_` changes nothing: without memory, and with nothing to refuse.

    On meta torch runs it by a definition in Python, which takes 0.3 ms. The count of
    writes is raised before.
    """
    plain = type(mean) is type(std) is float and std >= 0 and generator is None
    on_meta = tensor.device.type == "meta"  # a hollow tensor denies it by `is_meta`
    return plain and on_meta and tensor.is_floating_point()


def _runs(tensor: Tensor) -> list[tuple[int, int]]:
    """Bytes covered without gaps, in pieces; nothing for what is too scattered."""
    start, stop = byte_span(tensor)
    if stop - start == dense_bytes(tensor):
        return [(start, stop)]
    pieces = int(tensor.size(0)) if tensor.dim() > 1 else 0
    if pieces > 1024:
        return []
    return [run for index in range(pieces) for run in _runs(_piece(tensor, index))]


def _piece(tensor: Tensor, index: int) -> Tensor:
    offset = int(tensor.storage_offset()) + index * int(tensor.stride(0))
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().as_strided(
            tensor.size()[1:], tensor.stride()[1:], offset
        )
