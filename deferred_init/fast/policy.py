"""The policy `fast`: fills of whole tensors come from a generator of our own.

[Note: What is replaced]
`normal_`, `uniform_` and `nn.init.trunc_normal_` on a contiguous tensor that is all of
its memory, which is what the functions of `torch.nn.init` and the modules call. All
other random operations, and these with a generator of the caller's, are seeded by name.
`trunc_normal_` is a loop of several operations; a replacement stands in while a step
runs, and hands the bounds to the mode behind one `uniform_`, so that all other modes
see an operation that overwrites a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from deferred_init.fast.distributions import (
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
)
from deferred_init.fast.fill import fill, fillable, writer
from deferred_init.fast.philox import stream_key
from deferred_init.handlers.protocol import Step
from deferred_init.rng import ByName, NamedDraws
from deferred_init.staged_loan import Lender, Loan, lenders

__all__ = ["Fast", "distribution_of"]

_KINDS: dict[Any, Callable[..., Distribution]] = {
    torch.ops.aten.normal_.default: Normal,
    torch.ops.aten.uniform_.default: Uniform,
    torch._C.TensorBase.normal_: Normal,
    torch._C.TensorBase.uniform_: Uniform,
    torch.nn.init._no_grad_trunc_normal_: TruncatedNormal,
}
_OPTIONS = {"mean": 0, "std": 1, "from": 0, "to": 1, "a": 2, "b": 3}


class Fast(ByName):
    """Fill whole tensors from the counter-based generator, the rest as `ByName`."""

    name = "fast"

    def step(self, step: Step) -> AbstractContextManager[object]:
        """Run one step with its fills replaced."""
        return _Fills(self._seed, self._device, step, self._names)


def distribution_of(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Distribution | None:
    """Return what a call draws, or None if it is not one of those replaced.

    Args:
        call: The function or operator.
        args: Its arguments after the tensor.
        kwargs: Its keyword arguments.
    """
    try:
        kind = _KINDS.get(call)
    except TypeError:  # cannot be hashed
        return None
    if kind is None or kwargs.keys() - _OPTIONS.keys():
        return None
    values: dict[int, Any] = dict(enumerate(args))
    values.update((_OPTIONS[name], value) for name, value in kwargs.items())
    if not all(type(value) in (int, float) for value in values.values()):
        return None
    count = 4 if kind is TruncatedNormal else 2
    defaults = (0.0, 1.0, -2.0, 2.0)
    return kind(*(float(values.get(at, defaults[at])) for at in range(count)))


class _Fills(NamedDraws):
    """Replaces fills of whole tensors.

    Attributes:
        truncated: What the next `uniform_` stands for; None again if it was done.
    """

    truncated: TruncatedNormal | None = None

    def __enter__(self) -> _Fills:
        """Let `nn.init.trunc_normal_` ask this mode for one fill."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._original: Any = torch.nn.init._no_grad_trunc_normal_
        torch.nn.init._no_grad_trunc_normal_ = self._truncated_normal
        return self

    def __exit__(self, *error: Any) -> None:
        """Give `nn.init.trunc_normal_` back what it called."""
        torch.nn.init._no_grad_trunc_normal_ = self._original
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _truncated_normal(
        self,
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if generator is None and not tensor.is_meta:
            self.truncated = TruncatedNormal(mean, std, a, b)
            with torch.no_grad():
                tensor.uniform_()
            done, self.truncated = self.truncated is None, None
            if done:
                return tensor
        return self._original(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]

    def draw(
        self, name: str, ordinal: int, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        options = {k: v for k, v in kwargs.items() if v is not None}
        wanted = self.truncated or distribution_of(func, args[1:], options)
        lender, loan = _cold_loan(args[0]) if args else (None, None)
        target = loan.blank() if loan else args[0] if args else None
        if wanted is not None and target is not None and fillable(target, wanted):
            key = stream_key(self.seed, name, ordinal)
            if loan is not None:
                loan.promised = writer(wanted, key)
            else:
                fill(target, wanted, key)
            self.truncated = None
            return args[0]
        if lender is not None and loan is not None:
            args = (lender.warm(loan), *args[1:])
        return super().draw(name, ordinal, func, args, kwargs)


def _cold_loan(tensor: object) -> tuple[Lender, Loan] | tuple[None, None]:
    """Return who lent a tensor that has no memory yet; see `staged_loan`."""
    if isinstance(tensor, Tensor):
        for lender in lenders:
            loan = lender.cold_loan(tensor)
            if loan is not None:
                return lender, loan
    return None, None
