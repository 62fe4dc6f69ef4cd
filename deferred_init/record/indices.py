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
        index: What stands in the brackets. A list that holds lists or tensors is left
            as it is: releases of torch differ in what it means.
    """
    if type(index) is tuple:
        return tuple(_with_values(item) for item in index)
    return _with_values(index)


def _with_values(item: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(item, (list, range)):
        values = list(item)
        if not all(isinstance(value, int) for value in values):
            return item
        with plain_torch():
            return torch.tensor(values, dtype=None if values else torch.long)
    if numpy is not None and isinstance(item, numpy.ndarray):
        with plain_torch():
            return torch.as_tensor(item)
    return item
