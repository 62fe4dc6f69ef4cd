"""Whether a checkpoint that stores both sides of a tie stores the same twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deferred_init.errors import listing
from deferred_init.loading.matching import Load
from deferred_init.sources.protocol import TensorSource

__all__ = ["check_twins"]

_COMPARED_BYTES = 1 << 26


def check_twins(source: TensorSource, steps: Sequence[Sequence[Load]]) -> None:
    """Compare the sides of every tie that is stored more than once.

    Raises:
        ValueError: Two sides differ: the model is tied, the checkpoint is not.
    """
    different = [
        f"{load.pieces[0].key} and {twin}"
        for loads in steps
        for load in loads
        for twin in load.twins
        if not _are_equal(source, load.pieces[0].key, twin)
    ]
    if different:
        raise ValueError(
            f"the model ties what {source.name} stores with different values: "
            f"{listing(different)}. Build the model without the tie, or rename one of "
            "the two by `names`"
        )


def _are_equal(source: TensorSource, one: str, other: str) -> bool:
    first, second = source.tensors[one], source.tensors[other]
    if first.extent is not None and first.extent == second.extent:
        return True
    rows = first.shape[0] if first.shape else 1
    step = max(1, _COMPARED_BYTES * rows // max(1, first.num_bytes))
    return all(
        torch.equal(
            _bits(source, one, at, rows, step), _bits(source, other, at, rows, step)
        )
        for at in range(0, rows, step)
    )


def _bits(
    source: TensorSource, key: str, start: int, rows: int, step: int
) -> torch.Tensor:
    """Return rows as bytes: a NaN is equal to itself then."""
    found = source.read(key, start, min(rows, start + step)).detach()
    return found.contiguous().reshape(-1).view(torch.uint8)
