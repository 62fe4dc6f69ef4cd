"""Staging: lends init code a tensor of full size where only a part of it stays.

[Note: Full-size values under a memory budget]
Problem: a rank keeps a slice of a DTensor, but the init code has to see the whole: its
shape decides the scale, and a draw for a slice is not a slice of the draw. One init
function may write a whole model (`nn.Transformer` does), and all of it in full size
is what sharding was to avoid.

Naive attempt: give every tensor of the step memory in full size, slice at the end.

Design: what is lent is *cold*: right shape, dtype and device, one element of memory.
A `TorchFunctionMode` sees every use. Before the first use of its data a tensor is made
*hot*: memory of full size, holding the present value unless the operation overwrites
it. When a hot tensor would exceed the budget (the largest tensor of the plan), others
are made cold again: the rank's slice is kept, the memory is freed. A view that somebody
still holds of a hot tensor keeps it hot. If a use ever got past the mode, writing to
a cold tensor would fail, since its elements share one place in memory.

Shortcoming: to read a value that was made cold before, the shards are gathered, which
is communication, and needs all ranks of the mesh to do the same; they do, since all
run the same plan. Ordinary init functions overwrite.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deferred_init.handlers.protocol import StagedAllocator
from deferred_init.slots import Slot

__all__ = ["Loan", "Staging"]

# fmt: off
_READS_NO_DATA = frozenset(
    {
        "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout",
        "is_meta", "is_cuda", "is_cpu", "grad", "itemsize", "nbytes", "names",
        "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "grad_fn",
        "is_sparse", "is_quantized", "is_nested", "output_nr", "size", "dim",
        "numel", "nelement", "ndimension", "is_floating_point", "is_complex",
        "element_size", "requires_grad_", "get_device", "__len__", "__hash__",
    }
)
_OVERWRITES = frozenset(
    {
        "normal_", "uniform_", "trunc_normal_", "constant_", "zeros_", "ones_",
        "zero_", "fill_", "copy_", "eye_", "xavier_uniform_", "xavier_normal_",
        "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "dirac_", "sparse_",
        "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_",
        "random_",
    }
)
# fmt: on


class Loan:
    """One tensor that is lent in full size.

    Attributes:
        home: The tensor that keeps a part of it.
        scratch: What the init code sees instead.
        keeps: Whether what is written shall be kept; else it is thrown away.
        stored: Whether `home` holds the present value.
        hot: Whether the scratch has memory.
    """

    def __init__(
        self, home: Tensor, scratch: Tensor, *, keeps: bool, stored: bool
    ) -> None:
        self.home = home
        self.scratch = scratch
        self.keeps = keeps
        self.stored = stored
        self.hot = False
        self._cold = scratch.data

    def cool(self) -> None:
        """Let go of the memory."""
        self.scratch.data = self._cold
        self.hot = False

    def held_elsewhere(self) -> bool:
        """Whether somebody else holds the memory: a view, or `.data`."""
        storage = self.scratch.untyped_storage()
        # One use is the scratch's own, one that of `storage` here.
        return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


class Staging(TorchFunctionMode):
    """The loans of one step; a mode that makes them hot when they are used.

    Args:
        device: Where the full-size memory is taken.
        budget_bytes: How much of it may be in use before loans are made cold.
        keep: Called with a home and its full value, to keep the part.
        prepare: Called with fresh memory, to poison it.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        keep: Callable[[Tensor, Tensor], None],
        prepare: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._budget_bytes = budget_bytes
        self._keep = keep
        self._prepare = prepare
        self._loans: dict[int, tuple[Loan, StagedAllocator]] = {}
        self._hot: OrderedDict[int, int] = OrderedDict()
        self._written: list[tuple[Slot, Tensor]] = []

    def lend(
        self,
        slots: tuple[Slot, ...],
        home: Tensor,
        allocator: StagedAllocator,
        *,
        keeps: bool,
        stored: bool,
    ) -> None:
        """Put a cold scratch into every place that holds a tensor."""
        cold = torch.empty((), dtype=home.dtype, device=self._device).expand(
            home.size()
        )
        scratch: Tensor = cold
        if isinstance(home, nn.Parameter):
            scratch = nn.Parameter(cold, requires_grad=home.requires_grad)
        scratch.__dict__.update(home.__dict__)
        loan = Loan(home, scratch, keeps=keeps, stored=stored)
        self._loans[id(scratch)] = (loan, allocator)
        for slot in slots:
            slot.write(scratch)
            self._written.append((slot, home))

    def give_back(self) -> None:
        """Put the homes back into their places, with attributes that were set."""
        for slot, home in self._written:
            slot.write(home)
        for loan, _ in self._loans.values():
            if loan.keeps:
                loan.home.__dict__.update(loan.scratch.__dict__)

    def keep_all(self) -> None:
        """Keep the parts of everything that is still hot."""
        for key in list(self._hot):
            self._cool(key)

    def loan_of(self, tensor: Tensor) -> Loan | None:
        """Return the loan that a tensor object is the scratch of."""
        found = self._loans.get(id(tensor))
        return None if found is None else found[0]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the loans hot that an operation uses, then run it."""
        kwargs = kwargs or {}
        name = _name(func)
        if name not in _READS_NO_DATA:
            used = [key for key in _tensor_ids(args, kwargs) if key in self._loans]
            for key in used:
                whole = name in _OVERWRITES and id(_target(args, kwargs)) == key
                self._heat(key, overwritten=whole or name == "data.__set__", used=used)
        return func(*args, **kwargs)

    def _heat(self, key: int, *, overwritten: bool, used: list[int]) -> None:
        loan, allocator = self._loans[key]
        if loan.hot:
            self._hot.move_to_end(key)
            return
        size = allocator.full_bytes(loan.home)
        self._make_room(size, used)
        memory = torch.empty_strided(
            loan.home.size(),
            loan.home.stride(),
            dtype=loan.home.dtype,
            device=self._device,
        )
        if overwritten or not loan.stored:
            self._prepare(memory)
        else:
            memory.copy_(allocator.gather(loan.home))
        loan.scratch.data = memory
        loan.hot = True
        self._hot[key] = size

    def _make_room(self, size: int, used: list[int]) -> None:
        for key in list(self._hot):
            if sum(self._hot.values()) + size <= self._budget_bytes:
                return
            if key not in used and not self._loans[key][0].held_elsewhere():
                self._cool(key)

    def _cool(self, key: int) -> None:
        loan, _ = self._loans[key]
        if loan.keeps:
            self._keep(loan.home, loan.scratch)
            loan.stored = True
        loan.cool()
        del self._hot[key]


def _name(func: Any) -> str:
    """Name an operation; attributes by the attribute, `data` by what is done to it."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", ""))
        return f"data.{name}" if attribute == "data" else attribute
    return name


def _target(args: Any, kwargs: Any) -> Any:
    """Return what an in-place operation writes; `torch.nn.init` passes keywords."""
    return args[0] if args else kwargs.get("tensor")


def _tensor_ids(*values: Any) -> Iterator[int]:
    """Yield the ids of all tensors in arguments, sequences and dicts opened."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield id(value)
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
