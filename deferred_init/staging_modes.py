"""The modes by which staging learns what init code does with what it was lent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from deferred_init.dispatch import DispatchMode
from deferred_init.operators import OVERWRITES

__all__ = ["PROMISED", "Contents", "Uses"]

# fmt: off
_NEEDS_NO_MEMORY = frozenset(
    {
        "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout",
        "is_meta", "is_cuda", "is_cpu", "grad", "itemsize", "nbytes", "names",
        "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "grad_fn",
        "is_sparse", "is_quantized", "is_nested", "output_nr", "size", "dim",
        "numel", "nelement", "ndimension", "is_floating_point", "is_complex",
        "element_size", "requires_grad_", "get_device", "__len__", "__hash__",
        "new_empty", "new_zeros", "new_ones",
        "empty_like", "zeros_like", "ones_like", "rand_like", "randn_like",
    }
)
# What only fills a tensor and looks at its shape: may be promised, see `staged_loan`.
PROMISED = frozenset(
    {
        "normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
        "kaiming_normal_", "kaiming_uniform_",
    }
)
# fmt: on


class Uses(TorchFunctionMode):
    """Tells which tensors a function is going to use the memory of.

    Args:
        use: Called with the tensors, and whether the memory of the first of them is
            going to be replaced by an assignment to `data`.
        passing: Names of functions that are not told of.
    """

    def __init__(
        self,
        use: Callable[[list[Tensor], bool], None],
        passing: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._use = use
        self._passing = _NEEDS_NO_MEMORY | passing

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Tell what a function uses, then run it."""
        kwargs = kwargs or {}
        name = _name(func)
        if name not in self._passing:
            replaced = name == "data.__set__"
            self._use(list(_tensors(*args, *kwargs.values())), replaced)
        return func(*args, **kwargs)


class Contents(DispatchMode):
    """Tells which contents an operation is going to need.

    Args:
        absent: Watched only while this is not empty.
        touch: Called with the tensor that is overwritten completely, if any, and with
            all other tensors of the operation.
    """

    def __init__(
        self,
        absent: Mapping[int, Any],
        touch: Callable[[Tensor | None, list[Tensor]], None],
    ) -> None:
        super().__init__()
        self._absent = absent
        self._touch = touch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Tell what an operation needs, unless it only makes a view, then run it."""
        kwargs = kwargs or {}
        if self._absent and not getattr(func, "is_view", False):
            target = kwargs.get("out")
            if target is None and func._schema.name in OVERWRITES:
                target = args[0]
            written = target if isinstance(target, Tensor) else None
            others = [t for t in _tensors(*args, *kwargs.values()) if t is not written]
            self._touch(written, others)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Name an operation; attributes by the attribute, `data` by what is done to it."""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__"):
        attribute = str(getattr(getattr(func, "__self__", None), "__name__", ""))
        return f"data.{name}" if attribute == "data" else attribute
    return name


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Yield all tensors in arguments, sequences and dicts opened."""
    pending = list(values)
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
