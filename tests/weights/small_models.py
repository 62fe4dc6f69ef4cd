"""Models into which something is loaded, what they hold, and files for them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def stack(num_layers: int = 4, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert [key for key in state if not torch.equal(loaded[key], state[key])] == []


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_file({k: v.contiguous() for k, v in state.items()}, path)
    return path
