"""What the recorder needs to know of an operator, read from its schema once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deferred_init.operators import FILLS, OVERWRITES, is_silent_write

__all__ = ["OpInfo", "op_info"]

_RESHAPES = ("aten::set_", "aten::resize_", "aten::resize_as_")
# Draw without saying so in their tags.
_DRAWS = frozenset({"aten::_sobol_engine_draw"})
# Meta has no such tensors, or claims them to be strided.
_OPAQUE = ("sparse", "mkldnn", "quantize", "nested_tensor")


class OpInfo:
    """Facts on one operator overload.

    Attributes:
        scalar: It returns something that is no tensor.
        draws: It draws random numbers.
        fills: It only fills its first argument, so meta need not run it.
        overwrites: It overwrites all of its first argument without reading it.
        like: It only looks at the geometry of its first argument.
        opaque: Its results have no storage of the plain kind.
        reshapes: It changes the geometry of its first argument in place.
        mutated: Positions of the arguments that it writes to.
        mutated_names: Their names, also of keyword-only ones.
        outputs: The names of the `out=` arguments, in the order of the results.
        has_dtype: It has a `dtype` argument.
        has_device: It has a `device` argument.
    """

    __slots__ = (
        "draws",
        "fills",
        "has_device",
        "has_dtype",
        "like",
        "mutated",
        "mutated_names",
        "names",
        "opaque",
        "outputs",
        "overwrites",
        "reshapes",
        "scalar",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name
        tags = getattr(func, "tags", ())
        self.names = tuple(arg.name for arg in schema.arguments)
        self.mutated = tuple(
            index
            for index, arg in enumerate(schema.arguments)
            if not arg.kwarg_only and _is_written(func, arg)
        )
        self.mutated_names = tuple(
            arg.name for arg in schema.arguments if _is_written(func, arg)
        )
        self.outputs = tuple(
            arg.name
            for arg in schema.arguments
            if arg.kwarg_only and arg.alias_info and arg.alias_info.is_write
        )
        self.scalar = bool(schema.returns) and not any(
            "Tensor" in str(item.type) for item in schema.returns
        )
        self.draws = torch.Tag.nondeterministic_seeded in tags or name in _DRAWS
        self.fills = name in FILLS
        self.overwrites = name in OVERWRITES
        self.reshapes = name in _RESHAPES or torch.Tag.inplace_view in tags
        self.opaque = any(word in name for word in _OPAQUE)
        self.like = name.endswith("_like") or name.startswith("aten::new_")
        self.has_dtype = "dtype" in self.names
        self.has_device = "device" in self.names

    def written(self, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
        """Yield the arguments of a call that it writes to, lists opened."""
        for index in self.mutated:
            if index < len(args):
                yield from _opened(args[index])
        for name in self.mutated_names:
            if name in kwargs:
                yield from _opened(kwargs[name])


def _is_written(func: Any, argument: Any) -> bool:
    info = argument.alias_info
    if info is not None and info.is_write:
        return True
    return is_silent_write(func, argument.name)


def _opened(item: Any) -> Iterator[Any]:
    """Yield an argument, or the items of a list of tensors."""
    if isinstance(item, (list, tuple)):
        yield from item
    else:
        yield item


_known: dict[Any, OpInfo] = {}


def op_info(func: Any) -> OpInfo:
    """Return the facts on an operator overload, computed once."""
    info = _known.get(func)
    if info is None:
        info = _known[func] = OpInfo(func)
    return info
