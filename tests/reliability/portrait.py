"""A portrait of a model: everything that two equal models have in common.

Looks at the object graph on its own, and shares no code with the package.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Portrait:
    """Paths to facts: values, flags, classes, and which paths are the same object."""

    def __init__(self, model: Any) -> None:
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._objects: dict[int, str] = {}
        self._storages: dict[int, str] = {}
        self._kept: list[Any] = []
        self._visit("", model)

    def _visit(self, path: str, item: Any) -> None:
        if item is None or isinstance(item, (int, float, str, type)):
            self.facts[path] = item
            return
        first = self._objects.setdefault(id(item), path)
        self._kept.append(item)
        if first != path:
            self.facts[path] = ("same as", first)
            return
        if isinstance(item, Tensor):
            self._tensor(path, item)
        elif isinstance(item, nn.Module):
            self._module(path, item)
        elif isinstance(item, dict):
            for key, value in item.items():
                self._visit(f"{path}[{key!r}]", value)
        elif isinstance(item, (list, tuple)):
            for index, value in enumerate(item):
                self._visit(f"{path}[{index}]", value)
        elif hasattr(item, "__dict__") and not callable(item):
            for key, value in vars(item).items():
                self._visit(f"{path}.{key}", value)
        else:
            self.facts[path] = type(item).__name__

    def _module(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        self.facts[f"{path}!"] = (type(module).__qualname__, tuple(held))
        for name, value in held.items():
            if name.endswith("_hooks"):
                hooks = value.values() if isinstance(value, dict) else value
                names = [getattr(hook, "__name__", "") for hook in hooks]
                self.facts[f"{path}/{name}"] = names
            elif name == "_non_persistent_buffers_set":
                self.facts[f"{path}/{name}"] = sorted(value)
            elif not name.startswith("_") or name in (
                "_parameters",
                "_buffers",
                "_modules",
            ):
                self._visit(f"{path}/{name}", value)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        self.tensors[path] = tensor
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self.facts[path] = {
            "class": type(tensor),
            "shape": tuple(tensor.shape),
            "dtype": tensor.dtype,
            "device": str(tensor.device),
            "stride": tensor.stride(),
            "offset": tensor.storage_offset(),
            "requires_grad": tensor.requires_grad,
            "is_leaf": tensor.is_leaf,
            "hooks": len(tensor._backward_hooks or {}),
            "after": len(tensor._post_accumulate_grad_hooks or {}),
            "memory of": self._storages.setdefault(storage._cdata, path),
            "bytes": bits(tensor),
        }
        for key, value in vars(tensor).items():
            self._visit(f"{path}.{key}", value)

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct memory."""
        seen = {t.untyped_storage()._cdata: t for t in self.tensors.values()}
        return sum(t.untyped_storage().nbytes() for t in seen.values())


def bits(tensor: Tensor) -> bytes | None:
    """Return the elements' bits, or None on meta."""
    if tensor.is_meta:
        return None
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes()


def portrait(model: Any) -> dict[str, Any]:
    """Return the facts of a model."""
    return Portrait(model).facts


def generators() -> tuple[Any, ...]:
    """Return the states of all generators of a CPU."""
    numpy_state = numpy.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numpy_state[1].tobytes(),
        numpy_state[2:],
    )


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fail with the differing paths only."""
    wrong = []
    for path in {**expected, **found}:
        one, other = found.get(path, "absent"), expected.get(path, "absent")
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                one, other = (
                    {k: v for k, v in one.items() if v != other[k]},
                    {k: v for k, v in other.items() if v != one[k]},
                )
            wrong.append(f"{path!r}: found {one}, expected {other}")
    assert not wrong, "\n".join(wrong[:8])
