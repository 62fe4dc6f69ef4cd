"""Poisons memory that foreign code allocates, so that what it forgets is found."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deferred_init.dispatch import DispatchMode
from deferred_init.operators import LEAVES_RAW
from deferred_init.poison import fill_poison

__all__ = ["PoisonedMemory"]


class PoisonedMemory(DispatchMode):
    """A mode in which `torch.empty` and its kin return poison.

    With `verify="full"` constructors run under it, as fresh memory of the workspace is
    poisoned too: what is left of it in the end was never initialized.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; poison what it leaves uninitialized."""
        result = func(*args, **(kwargs or {}))
        raw = func._schema.name in LEAVES_RAW
        if raw and isinstance(result, Tensor) and not result.is_meta:
            fill_poison(result)
        return result
