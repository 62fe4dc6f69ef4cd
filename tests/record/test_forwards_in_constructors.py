"""A constructor that runs a forward: what that changes is recorded too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from tests.reliability.portrait import assert_equal, generators, portrait, seed


def _trained_statistics() -> nn.Module:
    """A dummy forward to find out a size, in training mode and with grad mode on."""
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    size = features(torch.rand(2, 3, 8, 8)).flatten(1).shape[1]
    return nn.Sequential(features, nn.Linear(size, 2))


def _lazy() -> nn.Module:
    model = nn.Sequential(
        nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2)
    )
    model[0].weight.mine = "kept"
    model(torch.rand(4, 2, 5))
    return model


def _lazy_and_frozen() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(3, dtype=torch.float64), nn.LazyLinear(2))
    model[1].weight.requires_grad = False
    model[0](torch.rand(2, 4, dtype=torch.float64))
    model[1](torch.rand(2, 3))
    return model


@pytest.mark.parametrize("build", [_trained_statistics, _lazy, _lazy_and_frozen])
def test_what_a_forward_changes_is_eagers(build: Callable[[], nn.Module]) -> None:
    seed()
    expected = portrait(build())
    after = generators()
    seed()
    model = di.deferred_init(build)
    di.materialize(model, "cpu", verify="full")
    assert_equal(portrait(model), expected)
    assert generators() == after


def test_operators_that_hide_their_writes_are_known() -> None:
    """Each is called on real tensors, and what it changes is compared with the list."""
    from deferred_init.operators import is_silent_write

    x, stats = torch.randn(4, 3), [torch.zeros(3), torch.ones(3)]
    calls: dict[Any, tuple[Any, ...]] = {
        torch.ops.aten.native_batch_norm.default: (
            *(x, None, None, *stats, True, 0.1, 1e-5),
        ),
        torch.ops.aten.batch_norm_update_stats.default: (x, *stats, 0.1),
    }
    for func, args in calls.items():
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        func(*args)
        for argument, old, new in zip(
            func._schema.arguments, before, args, strict=False
        ):
            changed = isinstance(new, Tensor) and not torch.equal(old, new)
            assert changed == is_silent_write(func, argument.name), argument.name


@pytest.mark.parametrize("recorded", [True, False])
def test_what_is_still_lazy_is_refused_by_name(recorded: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))

    model = di.deferred_init(build) if recorded else build()
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, "cpu")
    assert str(caught.value).count("1.weight") == 1
    assert "the lazy module `1` (`LazyLinear`) have no shape yet" in str(caught.value)
    found = [f for f in di.audit(model).findings if f.fqn == "1.weight"]
    assert [f.code for f in found] == ["deferred-tensor"]
    assert "has no shape yet" in found[0].message
