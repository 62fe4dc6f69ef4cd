"""Poison: bit patterns that say "nobody wrote here".

With `verify="full"` fresh memory is filled with them, and the audit counts what is
left of them. Patterns are written and compared as integers, so that a NaN equals
itself and no conversion changes its payload.

[Note: Which patterns]
Floating point: a quiet NaN with a payload that no operation produces, so that it also
spreads if something computes with it. Integers of four and eight bytes: 0xA5A5...
`bool`: the byte 0xA5, which no operation writes. Shorter integers have no value that
nobody could mean; their poison counts only where a whole tensor is made of it.
Packed `float4`, which has no NaN, is treated like them. What cannot be poisoned is left
alone, and `fill_poison` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch

__all__ = ["count_poison", "fill_poison", "in_parts", "poison_left"]

_PART_ELEMENTS = 1 << 26
_MIN_WHOLE = 4


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How one dtype is poisoned.

    Attributes:
        view: Integer dtype of the same width.
        bits: The pattern, as a number of that dtype.
        certain: Whether a single element is proof; else only a whole tensor is.
    """

    view: torch.dtype
    bits: int
    certain: bool


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits


def _patterns() -> dict[torch.dtype, _Pattern]:
    byte, short, word, long = torch.int8, torch.int16, torch.int32, torch.int64
    table = {
        "float64": (long, 0x7FFCA5A5A5A5A5A5, 64, True),
        "float32": (word, 0x7FE5A5A5, 32, True),
        "bfloat16": (short, 0x7FE5, 16, True),
        "float16": (short, 0x7FE5, 16, True),
        "float8_e4m3fn": (byte, 0x7F, 8, True),
        "float8_e5m2": (byte, 0x7F, 8, True),
        "float8_e4m3fnuz": (byte, 0x80, 8, True),
        "float8_e5m2fnuz": (byte, 0x80, 8, True),
        "float8_e8m0fnu": (byte, 0xFF, 8, True),
        "float4_e2m1fn_x2": (byte, 0xA5, 8, False),
        "int64": (long, 0xA5A5A5A5A5A5A5A5, 64, True),
        "uint64": (long, 0xA5A5A5A5A5A5A5A5, 64, True),
        "int32": (word, 0xA5A5A5A5, 32, True),
        "uint32": (word, 0xA5A5A5A5, 32, True),
        "int16": (short, 0xA5A5, 16, False),
        "uint16": (short, 0xA5A5, 16, False),
        "int8": (byte, 0xA5, 8, False),
        "uint8": (byte, 0xA5, 8, False),
        "bool": (byte, 0xA5, 8, True),
    }
    return {
        getattr(torch, name): _Pattern(view, _signed(bits, width), certain)
        for name, (view, bits, width, certain) in table.items()
        if hasattr(torch, name)
    }


_PATTERNS = _patterns()


def fill_poison(tensor: Tensor) -> bool:
    """Fill a tensor with the poison of its dtype, in place.

    Works on any strides, also expanded and overlapping ones. Gradients and version
    counters are not touched.

    Args:
        tensor: Fresh memory. Of a DTensor this rank's part is filled.

    Returns:
        False if nothing was done: the dtype has no poison, or the tensor is of a
        subclass that keeps its data in its own way, sparse, or without memory.
    """
    found = _as_integers(tensor)
    if found is None:
        return False
    integers, pattern = found
    if integers.numel():
        _span(integers).fill_(pattern.bits)
    return True


def poison_left(tensor: Tensor) -> int:
    """Count the elements that still hold poison; waits for the device.

    For dtypes in which any value could be meant (integers of one or two bytes), all
    elements count if every one of at least four holds the pattern, else none does.
    """
    counted = count_poison(tensor)
    return 0 if counted is None else int(counted.item())


def count_poison(tensor: Tensor) -> Tensor | None:
    """Count as `poison_left` does, on the tensor's device, without waiting.

    Returns:
        An `int64` tensor without dimensions, or None where there is no poison.
    """
    found = _as_integers(tensor)
    if found is None or tensor.numel() == 0:
        return None
    integers, pattern = found
    count = torch.zeros((), dtype=torch.int64, device=integers.device)
    for part in in_parts(integers):
        hit = part == pattern.bits
        if tensor.is_complex():
            hit = hit.any(dim=-1)
        count += hit.sum()
    if not pattern.certain:
        whole = (count == tensor.numel()) & (count >= _MIN_WHOLE)
        count = torch.where(whole, count, torch.zeros_like(count))
    return count


def _as_integers(tensor: Tensor) -> tuple[Tensor, _Pattern] | None:
    """View a tensor's memory as integers; None where it cannot be."""
    local = getattr(tensor, "_local_tensor", None)
    data = local if isinstance(local, Tensor) else tensor
    if has_own_dispatch(type(data)) or data.layout is not torch.strided or data.is_meta:
        return None
    data = data.detach()
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    if data.is_complex():
        data = torch.view_as_real(data)
    pattern = _PATTERNS.get(data.dtype)
    if pattern is None:
        return None
    return data.view(pattern.view), pattern


def _span(integers: Tensor) -> Tensor:
    """Return the elements themselves, or all memory they reach if they overlap."""
    if torch._debug_has_internal_overlap(integers) != 1:  # 1: surely, as if expanded
        return integers
    pairs = zip(integers.size(), integers.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in pairs)
    return integers.as_strided((reach + 1,), (1,), integers.storage_offset())


def in_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Cut a large tensor into views, so that what is computed of it is small.

    Returns:
        Views of 2**26 elements at most where rows allow it, which cover the tensor.
    """
    if tensor.numel() <= _PART_ELEMENTS:
        return (tensor,)
    if tensor.size(0) == 1:
        return in_parts(tensor[0])
    per_row = tensor.numel() // tensor.size(0)
    return tuple(torch.split(tensor, max(1, _PART_ELEMENTS // per_row)))
