"""The base of this package's dispatch modes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that handles operations without asking `torch._dynamo`.

    torch wraps `__torch_dispatch__` of a subclass so that no compiled code traces into
    it: the first operation imports `torch._dynamo`, which takes from half a second up,
    and each takes longer. Init functions are not compiled.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = vars(cls).get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if own is not None:
            cls.__torch_dispatch__ = own  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
