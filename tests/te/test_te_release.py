"""Models of TE are freed when their last name goes, without a garbage collection."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import deferred_init as di

pytestmark = [pytest.mark.te, pytest.mark.usefixtures("no_collector")]
KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "modules": lambda te: te.TransformerLayer(16, 32, 2, device="meta"),
    "ops": lambda te: te.ops.Sequential(
        te.ops.RMSNorm(8, device="meta"), te.ops.Linear(8, 8, device="meta")
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_freed_when_its_last_name_goes(te: Any, kind: str) -> None:
    with di.on_meta():
        model = nn.Sequential(KINDS[kind](te))
    di.materialize(model, "cpu", seed=0, verify="full", progress=False)
    left = [weakref.ref(thing) for thing in (*model.parameters(), *model.modules())]

    del model

    assert [type(ref()).__name__ for ref in left if ref() is not None] == []
