"""A model is constructed on meta without draws, and comes out the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from deferred_init.structure_only import StructureOnly


class _Draws(TorchDispatchMode):
    """Lists the random operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _build(around: AbstractContextManager[Any]) -> tuple[nn.Module, list[str]]:
    with _Draws() as draws, around:
        parts = (nn.Embedding(3, 2), nn.Conv1d(2, 2, 1), nn.Linear(2, 2))
        return nn.ModuleList(parts), draws.names


def test_torchs_modules_are_constructed_without_drawing() -> None:
    model, drawn = _build(StructureOnly())
    other, drawn_on_meta = _build(torch.device("meta"))
    assert (len(drawn), len(drawn_on_meta)) == (0, 5)
    ours = {name: (p.size(), p.device) for name, p in model.named_parameters()}
    assert ours == {name: (p.size(), p.device) for name, p in other.named_parameters()}


def test_it_is_the_default_device_while_it_lasts() -> None:
    with torch.device("cpu"):
        with StructureOnly():
            assert torch.get_default_device() == torch.device("meta")
            with torch.device("cpu"):
                assert not torch.empty(2).is_meta
            assert torch.empty(2).is_meta
            assert not torch.empty(2, device="cpu").is_meta
        assert not torch.empty(2).is_meta


def test_a_real_tensor_is_drawn() -> None:
    real = torch.zeros(2, 2)
    with StructureOnly():
        assert init.normal_(real) is real
    assert real.count_nonzero() == 4


@pytest.mark.parametrize(
    ("draw", "tensor"),
    [
        (init.kaiming_uniform_, torch.empty(2, device="meta")),
        (init.normal_, torch.empty(2, dtype=torch.int64, device="meta")),
    ],
)
def test_what_cannot_be_drawn_is_still_an_error(
    draw: Callable[[Tensor], Tensor], tensor: Tensor
) -> None:
    with StructureOnly(), pytest.raises((ValueError, RuntimeError)):
        draw(tensor)
