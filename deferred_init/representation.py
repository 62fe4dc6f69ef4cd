"""How many bytes a quantized weight takes, from its shape alone.

Needs no Transformer Engine and no GPU. The layouts are those that the quantizers of
release 2.20.2 give in `inner_tensor_specs`; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Representation"]

_FLOAT8_BLOCK = 128
_MXFP8_BLOCK = 32
_NVFP4_BLOCK = 16
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Representation:
    """A way to store a weight quantized.

    Attributes:
        te_recipe: Name of the recipe's class, for people.
        kind: `delayed`, `current`, `block`, `mxfp8`, `nvfp4`; others are unknown.
        columnwise: Whether the copy for the backward pass is stored too.
        block_dim: For `block`: 2 for 128 x 128 blocks, 1 for 1 x 128.
    """

    te_recipe: str
    kind: str
    columnwise: bool
    block_dim: int = 2

    def __str__(self) -> str:
        copies = "row- and column-wise" if self.columnwise else "row-wise"
        return f"{self.te_recipe}, {copies}"

    def num_bytes(
        self, shape: Sequence[int], compute_capability: tuple[int, int] | None = None
    ) -> int | None:
        """Return the bytes of data and scales; None for a recipe that is not known.

        Args:
            shape: The weight's shape.
            compute_capability: Of the GPU. Without one, two copies are assumed
                where Hopper needs two and Blackwell one.
        """
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        if self.kind in ("delayed", "current"):
            copies = 1 + (self.columnwise and not _one_copy(compute_capability))
            return copies * rows * columns + _FP32_BYTES
        one_way = {"block": self._block, "mxfp8": _mxfp8, "nvfp4": _nvfp4}.get(
            self.kind
        )
        if one_way is None:
            return None
        ways = (False, True) if self.columnwise else (False,)
        return sum(one_way(rows, columns, columnwise) for columnwise in ways)

    def _block(self, rows: int, columns: int, columnwise: bool) -> int:
        """FP8 data and FP32 scales, whose inner dimension is padded to 4."""
        inner, outer = (rows, columns) if columnwise else (columns, rows)
        if self.block_dim == 2:
            scales = _blocks(outer, _FLOAT8_BLOCK) * _padded(
                _blocks(inner, _FLOAT8_BLOCK), 4
            )
        else:
            scales = _blocks(inner, _FLOAT8_BLOCK) * _padded(outer, 4)
        return rows * columns + _FP32_BYTES * scales


def _mxfp8(rows: int, columns: int, columnwise: bool) -> int:
    """FP8 data and one byte per 32 elements, padded for the matrix product."""
    if columnwise:
        scales = _padded(_blocks(rows, _MXFP8_BLOCK), 4) * _padded(columns, 128)
    else:
        scales = _padded(rows, 128) * _padded(_blocks(columns, _MXFP8_BLOCK), 4)
    return rows * columns + scales


def _nvfp4(rows: int, columns: int, columnwise: bool) -> int:
    """FP4 data, one byte per 16 elements, and the FP32 maximum of the tensor."""
    inner, outer = (rows, columns) if columnwise else (columns, rows)
    scales = _padded(outer, 128) * _padded(_blocks(inner, _NVFP4_BLOCK), 4)
    return outer * (inner // 2) + scales + _FP32_BYTES


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _padded(size: int, multiple: int) -> int:
    return _blocks(size, multiple) * multiple


def _one_copy(compute_capability: tuple[int, int] | None) -> bool:
    """Whether FP8 matrix products read one copy in both directions.

    The condition of `is_non_tn_fp8_gemm_supported` in Transformer Engine 2.20.2.
    """
    if compute_capability is None:
        return False
    return (10, 0) <= compute_capability < (12, 0) or compute_capability >= (13, 0)
