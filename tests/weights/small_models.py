"""Models on meta into which something is loaded, and what they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def stack(num_layers: int = 4, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert [key for key in state if not torch.equal(loaded[key], state[key])] == []
