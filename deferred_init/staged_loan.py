"""One tensor that is lent in full size, and what its memory is going to hold.

[Note: Promised fills]
Under `rng="fast"` a value depends on its place alone, so that a rank can write its
part without the rest. A fill of a whole tensor that has no memory yet is only noted:
with the next use it is carried out in full, and if there is none, on the part that is
kept. Code that reaches memory past torch would see none, so this is done for
initializers alone that say of themselves `only_uses_torch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from deferred_init.aliases import storage_key
from deferred_init.fast.window import Window
from deferred_init.handlers.protocol import StagedAllocator

__all__ = ["Fill", "Lender", "Loan", "lenders"]

Fill = Callable[[Tensor, Window], None]


class Loan:
    """One tensor that is lent in full size.

    Attributes:
        home: The tensor that keeps a part of it.
        scratch: What the init code sees instead, once it is lent.
        keeps: Whether what is written shall be kept; else it is thrown away.
        stored: Whether `home` holds a value.
        hot: Whether the scratch has memory.
        promised: What fills it when it gets memory, or its part when that is kept.
    """

    scratch: Tensor
    promised: Fill | None = None

    def __init__(
        self,
        home: Tensor,
        allocator: StagedAllocator,
        device: torch.device,
        *,
        keeps: bool,
        stored: bool,
    ) -> None:
        self.home = home
        self.allocator = allocator
        self.keeps = keeps
        self.stored = stored
        self.full_bytes = allocator.full_bytes(home)
        self.hot = False
        self._device = device
        self._elements: list[Tensor] = []

    def lend(self, *, hot: bool) -> None:
        """Make the scratch, with memory at once or without."""
        home = self.home
        self.hot = hot
        scratch = self._memory() if hot else self._one_element()
        if isinstance(home, nn.Parameter):
            grad = home.requires_grad
            scratch = Tensor._make_subclass(nn.Parameter, scratch, grad)
        if home.__dict__:
            scratch.__dict__.update(home.__dict__)
        self.scratch = scratch

    def heat(self) -> None:
        """Give the scratch memory; its contents are undefined."""
        self.scratch.data = self._memory()
        self.hot = True

    def cool(self) -> None:
        """Let go of the memory."""
        self.scratch.data = self._one_element()
        self.hot = False

    def blank(self) -> Tensor:
        """Return a meta tensor of the geometry that the memory will have."""
        home = self.home
        size, stride = home.size(), home.stride()
        return torch.empty_strided(size, stride, dtype=home.dtype, device="meta")

    def _memory(self) -> Tensor:
        home = self.home
        return torch.empty_strided(
            home.size(), home.stride(), dtype=home.dtype, device=self._device
        )

    def _one_element(self) -> Tensor:
        home = self.home
        element = torch.empty((), dtype=home.dtype, device=self._device)
        self._elements.append(element)  # so that its address stays its own
        return element.expand(home.size())

    def stood_in(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on what stood in for the memory at some time."""
        key = storage_key(tensor)
        return any(storage_key(element) == key for element in self._elements)

    def load(self) -> None:
        """Put the value of the home into the memory."""
        self.scratch.detach().copy_(self.allocator.gather(self.home))

    def held_elsewhere(self) -> bool:
        """Whether somebody else holds the memory: a view, or `.data`."""
        storage = self.scratch.untyped_storage()
        # One use is the scratch's own, one that of `storage` here.
        return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


class Lender(Protocol):
    """Who lends tensors without memory, and takes note of what will fill them."""

    def cold_loan(self, tensor: Tensor) -> Loan | None:
        """Return the loan without memory that a tensor is the scratch of."""
        ...

    def warm(self, loan: Loan) -> Tensor:
        """Give a loan memory, and return it."""
        ...


lenders: list[Lender] = []
"""Those that accept promises now."""
