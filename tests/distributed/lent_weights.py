"""Two weights that init code is lent, and an allocator that keeps a part of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deferred_init.handlers.protocol import Request, StagedAllocator
from deferred_init.hot_loans import HotLoans
from deferred_init.inventory import take_inventory
from deferred_init.staged_loan import Loan
from deferred_init.staging import Staging


class FirstRow:
    """Keeps the first row of everything."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.gathered = 0

    def problem(self, tensor: Tensor, request: Request) -> str | None:
        return None

    def num_bytes(self, tensor: Tensor, dtype: torch.dtype) -> int:
        return tensor[0].numel() * dtype.itemsize

    def full_bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(tensor, device=device)

    def part_of(
        self, tensor: Tensor, full: Tensor, device: torch.device | None = None
    ) -> Tensor | None:
        return None

    def keep(self, tensor: Tensor, full: Tensor) -> None:
        self.rows[id(tensor)] = full.detach()[0].clone()

    def fill(self, tensor: Tensor, write: object, *, dry_run: bool = False) -> bool:
        return False

    def gather(self, tensor: Tensor) -> Tensor:
        self.gathered += 1
        return self.rows[id(tensor)].expand(tensor.size())

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


def _poison(fresh: Tensor) -> None:
    fresh.fill_(float("nan"))


class Lent:
    """Two meta weights of 4 x 3 floats, 48 bytes each, lent under a budget."""

    def __init__(
        self, budget_bytes: int = 48, *, stored: bool = False, hot: bool = False
    ) -> None:
        self.module = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(4, 3, device="meta")) for name in "ab"}
        )
        self.allocator = FirstRow()
        assert isinstance(self.allocator, StagedAllocator)
        keep = self.allocator.keep
        self.staging: Staging | HotLoans = (
            HotLoans(keep, _poison) if hot else Staging(budget_bytes, keep, _poison)
        )
        self.homes = dict(self.module.items())
        for slot in take_inventory((self.module,)).slots:
            if stored:
                self.allocator.rows[id(slot.tensor)] = torch.full((3,), 7.0)
            loan = Loan(
                slot.tensor,
                self.allocator,
                torch.device("cpu"),
                keeps=True,
                stored=stored,
            )
            self.staging.lend(loan, (slot,))

    def fill(self, body: Callable[[nn.ParameterDict], None]) -> dict[str, list[float]]:
        with self.staging, torch.no_grad():
            body(self.module)
        self.staging.keep_all()
        self.staging.give_back()
        return {
            name: self.allocator.rows[id(home)].tolist()
            for name, home in self.homes.items()
            if id(home) in self.allocator.rows
        }

    def is_hot(self, name: str) -> bool:
        loan = self.staging.loan_of(self.module[name])
        assert loan is not None
        return loan.hot
