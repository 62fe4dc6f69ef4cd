"""What it means that a deferred model equals the eager one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deferred_init.record import deferred_init, materialize_module


class Built(nn.Module):
    """A module whose constructor is a function of the test."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        super().__init__()
        body(self)


def seed(value: int = 0) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and tensor attributes, duplicates kept."""
    found: dict[str, Tensor] = {}
    for prefix, owner in model.named_modules(remove_duplicate=False):
        held = {**owner._parameters, **owner._buffers, **vars(owner)}
        for name, item in held.items():
            if isinstance(item, Tensor):
                found[f"{prefix}.{name}"] = item
    return found


def sharing(tensors: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    return (
        [objects.setdefault(id(t), name) for name, t in tensors.items()],
        [
            storages.setdefault(t.untyped_storage()._cdata, name)
            for name, t in tensors.items()
        ],
    )


def assert_same(eager: nn.Module, other: nn.Module) -> None:
    left, right = tensors_of(eager), tensors_of(other)
    assert left.keys() == right.keys()
    for name, a in left.items():
        b = right[name]
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(a, what) == getattr(b, what), (name, what)
        assert type(a) is type(b), name
        assert a.stride() == b.stride(), name
        assert a.storage_offset() == b.storage_offset(), name
        assert vars(a).keys() == vars(b).keys(), name
        assert torch.equal(a, b), (name, a, b)
    assert sharing(left) == sharing(right)


@pytest.fixture(autouse=True)
def _defined_memory() -> Iterator[None]:
    """Make uninitialized memory NaN, so that it can be compared."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def assert_eager_equals_deferred() -> Callable[..., nn.Module]:
    """Build a module both ways from one seed and compare everything."""

    def check(
        body: Callable[[Any], None], after: Callable[[Any], Any] = lambda model: None
    ) -> nn.Module:
        seed()
        eager = Built(body)
        after(eager)
        state = torch.get_rng_state()
        seed()
        before = torch.get_rng_state()
        model = deferred_init(Built, body)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.initial_seed() == 0
        after(model)
        materialize_module(model)
        assert_same(eager, model)
        assert torch.equal(state, torch.get_rng_state())
        return model

    return check


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """Silence transformers for the tests of a file, and no longer."""
    log = pytest.importorskip("transformers").logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    log.set_verbosity(verbosity)
    if bars:
        log.enable_progress_bar()
