"""Poisons memory that foreign code allocates, so that what it forgets is found."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deferred_init.dispatch import DispatchMode
from deferred_init.poison import fill_poison

__all__ = ["PoisonedMemory"]

_RAW = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted"}
    | {"new_empty", "new_empty_strided"}
)


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
        name = func._schema.name.split("::")[-1]
        if name in _RAW and isinstance(result, Tensor) and not result.is_meta:
            fill_poison(result)
        return result
