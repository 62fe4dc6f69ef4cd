"""Run torch code with every recording mode of this thread switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["in_fake_mode", "index_of", "no_dispatch", "no_function_modes"]
__all__ += ["plain_torch"]
__all__ += ["without_default_device", "without_own_mode"]


def index_of(device: torch.device) -> int | None:
    """Return a device's index; torch's own annotation leaves `None` out."""
    return device.index


_FAKE = torch._C._TorchDispatchModeKey.FAKE
no_dispatch = torch._C._DisableTorchDispatch
no_function_modes = torch._C.DisableTorchFunction
"""A context in which no function mode is asked, `torch.device(...)` as a context among
them: with one, every look at a tensor's attribute goes through Python."""


def in_fake_mode() -> bool:
    """Whether code that is recorded runs under a `FakeTensorMode` of its own.

    What it makes there is no part of the model, and draws no numbers.
    """
    return torch._C._get_dispatch_mode(_FAKE) is not None


@contextmanager
def plain_torch() -> Iterator[None]:
    """Switch off function and dispatch modes: what runs here is plain torch."""
    with no_function_modes(), no_dispatch():
        yield


def without_default_device() -> AbstractContextManager[object]:
    """Switch off `torch.device(...)` as a context, for code that cannot notice.

    For init functions of torch itself, which allocate nothing without naming the
    device. Any other function mode than that one stays in force.
    """
    alone = torch._C._len_torch_function_stack() <= 1
    return no_function_modes() if alone else nullcontext()


def without_own_mode() -> AbstractContextManager[object]:
    """Switch off the mode of a policy by names, for memory that nobody draws into.

    Every operation under a mode goes through Python. With any other mode than that one
    (a user's, or torch's own) all stay in force.
    """
    alone = torch._C._len_torch_dispatch_stack() == 1
    return no_dispatch() if alone else nullcontext()
