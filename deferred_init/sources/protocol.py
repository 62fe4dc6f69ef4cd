"""What a source of weights is: named tensors, of known shape, that can be read.

A source is opened, described and checked while the plan is made, and read while it
is executed. What lies in plain bytes somewhere (`Extent`) is read by several threads
straight to where it is needed; everything else is asked for with `read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["ByteFile", "Extent", "TensorInfo", "TensorSource"]


class ByteFile(Protocol):
    """Something with bytes at offsets: a file, an object in a store, a tensor.

    Used by several threads at once.
    """

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from an offset.

        Raises:
            OSError: The bytes cannot be read, or there are fewer of them.
        """
        ...

    def check_unchanged(self) -> None:
        """See that it is still what was there when the source was opened.

        Raises:
            OSError: It changed, shrank or is gone.
        """
        ...

    def map(self) -> Any | None:
        """Map it into memory, copy-on-write, as an object with the buffer protocol.

        Returns None if it cannot be mapped, or should not be.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where the elements of a tensor lie, row-major and without gaps.

    Attributes:
        file: What holds them.
        offset: Of the first byte.
    """

    file: ByteFile
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a source.

    Attributes:
        shape: Its sizes.
        dtype: Its dtype as stored.
        extent: Where its bytes lie, or None if only `TensorSource.read` knows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    extent: Extent | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors from anywhere; what `weights=` takes besides paths and dicts."""

    @property
    def name(self) -> str:
        """What reports and errors call it: a path, an address."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its key; known without reading any values."""
        ...

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return the rows `start:stop` along the first dimension of a tensor.

        A tensor without dimensions has one row. The result is only read, so it may
        share memory with the source; it may lie on any device.

        Raises:
            OSError: It cannot be read.
        """
        ...
