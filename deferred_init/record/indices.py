"""Indices of recorded tensors that torch would make into tensors without values.

`table[[0, 2]]` makes an index tensor of the list, and makes it on the device of the
table: on meta the numbers are lost. Such an index is made into a real tensor before.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from deferred_init.record.paused import plain_torch

__all__ = ["with_values"]


def with_values(index: Any) -> Any:
    """Return an index with real tensors in the place of lists, ranges and arrays.

    Args:
        index: What stands in the brackets.
    """
    if type(index) is list and _is_tuple(index):
        index = tuple(index)
    if type(index) is tuple:
        return tuple(_with_values(item) for item in index)
    return _with_values(index)


def _is_tuple(index: list[Any]) -> bool:
    """Whether torch takes a list of lists for one index a dim: releases differ."""
    if not any(isinstance(item, (list, tuple, range)) for item in index):
        return False
    with plain_torch():
        return torch.zeros(1, 1)[[[0], [0]]].dim() == 1


def _are_numbers(values: list[Any]) -> bool:
    """Whether a nest of lists holds nothing but whole numbers and truth values."""
    return all(
        _are_numbers(list(value))
        if isinstance(value, (list, tuple, range))
        else isinstance(value, int)
        for value in values
    )


def _with_values(item: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(item, (list, range)):
        values = list(item)
        if not _are_numbers(values):
            return item
        with plain_torch():
            return torch.tensor(values, dtype=None if values else torch.long)
    if numpy is not None and isinstance(item, numpy.ndarray):
        with plain_torch():
            return torch.as_tensor(item)
    return item
