"""Checksums of tensors, to compare them across ranks without sending them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deferred_init.aliases import has_own_dispatch

__all__ = ["Checksum", "checksum", "dense_part"]

_CHUNK = 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """What is left of a tensor's bits.

    Attributes:
        plain: The sum of the elements' bits.
        weighted: Their sum with the position as weight, so that order counts.
        num_elements: How many there are.
        constant: Whether all are alike.
    """

    plain: int
    weighted: int
    num_elements: int
    constant: bool


def dense_part(tensor: Tensor) -> Tensor | None:
    """Return what holds a tensor's elements: itself, or data that its class keeps.

    A quantized tensor keeps them as bytes under one of its attributes; the first dense
    one with as many elements is taken. None if there is no such attribute.
    """
    if not has_own_dispatch(type(tensor)):
        return tensor
    for value in vars(tensor).values():
        if (
            isinstance(value, Tensor)
            and not has_own_dispatch(type(value))
            and value.numel() == tensor.numel()
        ):
            return value
    return None


def checksum(tensor: Tensor) -> Checksum:
    """Compute the checksum of a dense tensor, on its device, in pieces.

    Takes 16 bytes per element of one piece (16 MiB) for scratch.
    """
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data)
    bits = data.contiguous().reshape(-1).view(_INTEGERS[data.element_size()])
    if bits.numel() == 0:
        return Checksum(plain=0, weighted=0, num_elements=0, constant=True)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    weights = torch.arange(1, min(_CHUNK, bits.numel()) + 1, device=bits.device)
    alike = torch.ones((), dtype=torch.bool, device=bits.device)
    for index, piece in enumerate(bits.split(_CHUNK)):
        wide = piece.to(torch.int64)
        sums[0] += wide.sum()
        # Integer sums wrap round alike on all devices.
        sums[1] += (wide * weights[: wide.numel()]).sum() * (2 * index + 1)
        alike &= (piece == bits[0]).all()
    plain, weighted = sums.tolist()
    return Checksum(
        plain=plain,
        weighted=weighted,
        num_elements=bits.numel(),
        constant=bool(alike),
    )
