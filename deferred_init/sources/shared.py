"""A source that the ranks of a node read together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deferred_init.sources.protocol import TensorInfo, TensorSource

__all__ = ["SharedReads"]


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Asks for what several ranks of a node need to be read by one of them.

    Attributes:
        source: Where the tensors are.
    """

    source: TensorSource

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of the source."""
        return self.source.tensors

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor; see `TensorSource`."""
        return self.source.read(key, start, stop)
