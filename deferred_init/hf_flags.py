"""The flag by which transformers knows what is initialized, on modules and tensors.

[Note: Flags of transformers]
`initialize_weights` skips modules flagged `_is_hf_initialized`, and its init functions
skip tensors flagged so. Models built under `torch.device("meta")` are not flagged,
those of `init_empty_weights` or `.to("meta")` are, all modules True. So flags say
nothing about what is deferred. They are set here as eager construction has them at that
moment: modules of an inner `PreTrainedModel`, which ran its own `initialize_weights`
before, and modules that are completely real are flagged; others are not; real tensors
are flagged meanwhile. All modules are flagged at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["copy_flag", "flagged_meanwhile", "set_flag"]

_INITIALIZED = "_is_hf_initialized"


def set_flag(holder: nn.Module | Tensor, initialized: bool) -> None:
    """Say of a module or a tensor whether it is initialized."""
    setattr(holder, _INITIALIZED, initialized)


def copy_flag(source: nn.Module, to: nn.Module) -> None:
    """Give a module the flag of another, if that has one of its own."""
    if _INITIALIZED in vars(source):
        set_flag(to, vars(source)[_INITIALIZED])


@contextmanager
def flagged_meanwhile(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Flag tensors so that the init functions of transformers leave them alone."""
    flagged = [tensor for tensor in tensors if not hasattr(tensor, _INITIALIZED)]
    for tensor in flagged:
        set_flag(tensor, True)
    try:
        yield
    finally:
        for tensor in flagged:
            vars(tensor).pop(_INITIALIZED, None)
