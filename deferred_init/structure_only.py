"""A default device of meta on which nothing is drawn.

[Note: Drawing on meta]
A model is constructed on meta to see what it consists of. Its constructors draw all the
same, and torch carries out random operations on meta in Python: a quarter of the
time of the construction. Nothing comes of it, as there are no values, so these
calls return at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import init
from torch.utils._device import DeviceContext

__all__ = ["StructureOnly"]

# For each operation the number of dimensions below which it is an error.
_DRAWS: dict[Any, int] = {
    init.kaiming_uniform_: 2,
    init.normal_: 0,
    init.uniform_: 0,
}


class StructureOnly(DeviceContext):
    """Like `torch.device("meta")` as a context, without the draws of `torch.nn.init`.

    It is that context, and no second mode beside it: with each mode every look at an
    attribute of a tensor goes through Python once more.
    """

    def __init__(self) -> None:
        super().__init__("meta")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the tensor that is to be drawn as it is; run anything else."""
        if func in _DRAWS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if _comes_out_the_same(tensor, _DRAWS[func]):
                return tensor
        default: Any = super().__torch_function__
        return default(func, types, args, kwargs)


def _comes_out_the_same(tensor: Any, least_dims: int) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_meta
        and tensor.is_floating_point()
        and tensor.dim() >= least_dims
    )
