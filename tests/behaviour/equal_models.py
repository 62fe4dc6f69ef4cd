"""Models on meta, and what it means that one equals the model built eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import deferred_init as di


def on_meta(build: Callable[..., nn.Module], *args: Any) -> Any:
    with torch.device("meta"):
        return build(*args)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name, ties and all."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Assert equality of values, geometry, flags and of which tensors are one."""
    ours, theirs = dict(tensors(model)), dict(tensors(expected))
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        made = ours[name]
        assert type(made) is type(value), name
        assert made.device == value.device, name
        assert (made.dtype, made.stride()) == (value.dtype, value.stride()), name
        assert made.requires_grad == value.requires_grad, name
        assert torch.equal(made, value), name
    assert _one_object(ours) == _one_object(theirs)


def made_as_eager(
    build: Callable[[], nn.Module], **options: Any
) -> tuple[Any, di.Report]:
    """Materialize a model on meta; assert that it and the generator are as in eager."""
    torch.manual_seed(1)
    expected = build()
    state = torch.get_rng_state()
    model = on_meta(build)
    held = dict(tensors(model))
    report = di.materialize(model, "cpu", seed=1, **options)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)
    made = dict(tensors(model))
    assert all(made[name] is tensor for name, tensor in held.items())
    return model, report


def _one_object(named: dict[str, Tensor]) -> list[str]:
    first: dict[int, str] = {}
    return [first.setdefault(id(tensor), name) for name, tensor in named.items()]
