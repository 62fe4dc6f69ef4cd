"""Which dtype each kind of tensor gets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

import torch

__all__ = ["DTYPES", "DtypePolicy"]

DTYPES: Final = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePolicy:
    """A dtype per kind of floating-point tensor; None keeps what the model has.

    Args:
        parameter: Every parameter of which no narrower kind speaks.
        norm: Parameters of normalization layers.
        buffer: Buffers (rotary frequencies, running statistics).

    Raises:
        ValueError: A dtype that is not one of `DTYPES`.
    """

    parameter: torch.dtype | None = None
    norm: torch.dtype | None = None
    buffer: torch.dtype | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            dtype = getattr(self, each.name)
            if dtype is not None and dtype not in DTYPES.values():
                raise ValueError(
                    f"`dtype.{each.name}` must be one of {list(DTYPES)}, "
                    f"found {dtype!r}"
                )

    def target(
        self, dtype: torch.dtype, *, is_buffer: bool, in_norm: bool
    ) -> torch.dtype:
        """Say which dtype a tensor gets; only real floating-point ones ever change."""
        if not dtype.is_floating_point:
            return dtype
        if is_buffer:
            return self.buffer or dtype
        chosen = self.norm if in_norm else None
        return chosen or self.parameter or dtype
