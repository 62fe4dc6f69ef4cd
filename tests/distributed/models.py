"""Models for the tests of several ranks, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from backend import DEVICE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deferred_init as di

__all__ = [
    "LAYOUTS",
    "Block",
    "MetaNet",
    "Net",
    "Untied",
    "compare",
    "deferred",
    "eager",
    "shard",
    "train",
]

LAYOUTS = {
    "fsdp": (2, 3, 4),
    "hsdp": (4,),
    "tp": (2, 3, 4),
    "tp+fsdp": (4,),
    "mixed precision": (2,),
    "offload": (2,),
}


class Block(nn.Module):
    """Two linear layers and a norm; 7 and 5 divide by no number of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)
        self.register_buffer("scale", torch.rand(1), persistent=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale.to(x.dtype)


class Net(nn.Module):
    """A tied head, a frozen weight, buffers of both kinds, rows fewer than ranks."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(11, width, padding_idx=2)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(2))
        self.gain = nn.LayerNorm(width)
        self.few = nn.Linear(width, 1)
        self.head: Any = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        first: Any = self.blocks[0]
        first.up.weight.requires_grad_(False)
        self.positions: Any
        self.register_buffer("positions", torch.arange(3.0) / 3, persistent=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.gain(x) + self.few(x) * self.positions[1].to(x.dtype)
        return self.head(x)


class MetaNet(Net):
    """Without the buffers, whose values a model on meta does not tell."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device(DEVICE):
            self.positions = torch.arange(3.0) / 3
            for index, block in enumerate(self.blocks):
                block.scale = torch.full((1,), 0.5 + index)


class Untied(nn.Module):
    """FSDP1 wants ties inside one unit; this model has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 9)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def deferred(built: str, make: Callable[[], Any]) -> Any:
    """Build on meta, or record; `built` says which."""
    if built == "recorded":
        return di.deferred_init(make)
    with torch.device("meta"):
        return make()


def eager(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


def shard(model: Any, layout: str) -> None:
    """Shard a `Net`, real or deferred, over all ranks."""
    world = dist.get_world_size()
    if layout in ("tp", "tp+fsdp"):
        shape = (1, world) if layout == "tp" else (2, world // 2)
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            _tensor_parallel(block, mesh["tp"])
        if layout == "tp":
            return
        mesh = mesh["dp"]
    elif layout == "hsdp":
        mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("dp", "fsdp"))
    else:
        mesh = init_device_mesh(DEVICE, (world,))
    options: dict[str, Any] = {"mesh": mesh}
    if layout == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if layout == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> None:
    # Replicated between the layers: 7 columns divide by no number of ranks.
    parallelize_module(
        block,
        mesh,
        {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate()),
        },
    )


def compare(model: nn.Module, expected: nn.Module) -> None:
    """Check that a model equals one made by a single process, bit for bit."""
    mine, its = _tensors(model), _tensors(expected)
    assert list(mine) == list(its)
    for name, tensor in its.items():
        got = mine[name]
        assert got.requires_grad == tensor.requires_grad, name
        full = got.full_tensor() if isinstance(got, DTensor) else got
        assert full.dtype == tensor.dtype, name
        assert torch.equal(full, tensor), name


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2
) -> list[float]:
    """Take optimizer steps on the same tokens on every rank; return the losses."""
    tokens = torch.tensor([[1, 2, 3, 10], [0, 4, 5, 9]])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])
