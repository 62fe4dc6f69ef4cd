"""Compare two models tensor by tensor, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Comparison", "compare", "named_tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a materialized model compares with its eager twin.

    Attributes:
        num_tensors: Names compared, parameters and buffers, ties under each name.
        unequal: Names whose values differ in at least one bit.
        misshapen: Names that only one has, or whose dtype, shape, strides,
            device or gradient flag differ.
        broken_ties: Names that are one tensor in only one of the two.
    """

    num_tensors: int
    unequal: tuple[str, ...]
    misshapen: tuple[str, ...]
    broken_ties: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not (self.unequal or self.misshapen or self.broken_ties)


def compare(ours: nn.Module, eager: nn.Module) -> Comparison:
    """Compare two models tensor by tensor, bit by bit."""
    left, right = dict(named_tensors(ours)), dict(named_tensors(eager))
    misshapen = sorted(left.keys() ^ right.keys())
    common = [name for name in left if name in right]
    misshapen += [n for n in common if _geometry(left[n]) != _geometry(right[n])]
    alike = [name for name in common if name not in misshapen]
    return Comparison(
        num_tensors=len(left.keys() | right.keys()),
        unequal=tuple(n for n in alike if not _same_bits(left[n], right[n])),
        misshapen=tuple(misshapen),
        broken_ties=_broken_ties(left, right, common),
    )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, a tied one under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    # Compared as bytes: `torch.equal` takes 0.0 for -0.0 and no NaN for itself.
    left_bytes, right_bytes = (
        each.detach().contiguous().reshape(-1).view(torch.uint8)
        for each in (left, right)
    )
    return torch.equal(left_bytes, right_bytes)


def _broken_ties(
    left: dict[str, Tensor], right: dict[str, Tensor], names: list[str]
) -> tuple[str, ...]:
    """Names that share their tensor with other names in one model than in the other."""

    def partners(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
        by_identity: dict[int, list[str]] = {}
        for name in names:
            by_identity.setdefault(id(tensors[name]), []).append(name)
        return {name: group for group in by_identity.values() for name in group}

    ours, theirs = partners(left), partners(right)
    return tuple(name for name in names if ours[name] != theirs[name])
