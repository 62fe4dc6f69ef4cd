"""The memory of a materialized model goes with its last name, as eager's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plain_models
import pytest
import torch
from te_models import RECIPES, build, module_model, ops_model
from torch import nn

import deferred_init as di

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_collector")]
KINDS: dict[str, Callable[[str], nn.Module]] = {
    "modules": lambda device: module_model("TransformerLayer", device),
    "ops": lambda device: ops_model("nested", device),
}


def _left_by(make: Callable[[], nn.Module]) -> int:
    """Bytes that stay after a model was made and its name deleted, the second time."""
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        model = make()
        assert torch.cuda.memory_allocated() > before
        del model
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("way", [plain_models.on_meta, plain_models.recorded])
def test_a_model_of_torch(way: Callable[[], nn.Module]) -> None:
    def make() -> nn.Module:
        model = way()
        di.materialize(model, "cuda", seed=0, progress=False)
        return model

    assert _left_by(make) == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_te(kind: str, recipe: str) -> None:
    te_recipe: Any = RECIPES[recipe]()

    def eager() -> nn.Module:
        return build(lambda: KINDS[kind]("cuda"), te_recipe)

    def make() -> nn.Module:
        model = build(lambda: KINDS[kind]("meta"), te_recipe)
        di.materialize(model, "cuda", seed=0, progress=False)
        return model

    assert _left_by(make) <= _left_by(eager)
