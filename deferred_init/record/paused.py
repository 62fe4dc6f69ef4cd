"""Run torch code with every recording mode of this thread switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["index_of", "no_dispatch", "plain_torch"]


def index_of(device: torch.device) -> int | None:
    """Return a device's index; torch's own annotation leaves `None` out."""
    return device.index


no_dispatch = torch._C._DisableTorchDispatch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Switch off function and dispatch modes: what runs here is plain torch."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        yield
