r"""A trainer in the style of torchtitan: a mesh, tensor parallelism, FSDP2, DCP.

    torchrun --nproc-per-node 2 examples/trainer_torchrun.py
    torchrun --nproc-per-node 2 examples/trainer_torchrun.py --tp 2

Runs on CPUs or GPUs. Such trainers build the model on meta, split and shard it, call
`to_empty`, and then an `init_weights` of the model that was written to work on shards.
Here the constructor calls `init_weights`, which knows nothing of meshes, and one line
takes the place of the rest: `di.materialize`. The first line that rank 0 prints is a
checksum of the initial values; it is the same for every mesh, and the losses are those
of one device. The end of the script loads its checkpoint into a new model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deferred_init as di


@dataclass(frozen=True)
class Sizes:
    """The shape of the model."""

    width: int = 64
    layers: int = 3
    heads: int = 4
    vocabulary: int = 96
    length: int = 32


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return what each position reads from those before it."""
        parts = [w(x).unflatten(-1, (-1, self.size)) for w in (self.wq, self.wk)]
        query, key = (_turn(part, turns).transpose(1, 2) for part in parts)
        value = self.wv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        read = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        out: Tensor = self.wo(read.transpose(1, 2).flatten(2))
        return out


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * turns[: x.shape[1], None]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class Block(nn.Module):
    """Attention and a gated layer, each added to its input."""

    def __init__(self, number: int, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.width)
        self.w1 = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.w2 = nn.Linear(4 * sizes.width, sizes.width, bias=False)
        self.std = 0.02 / (2 * (number + 1)) ** 0.5

    def init_weights(self) -> None:
        """Draw the layers' weights, less widely the deeper they are."""
        attention = self.attention
        for layer in (attention.wq, attention.wk, attention.wv, self.w1):
            nn.init.trunc_normal_(layer.weight, std=0.02)
        for layer in (attention.wo, self.w2):
            nn.init.trunc_normal_(layer.weight, std=self.std)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return the input with what the two layers add."""
        x = x + self.attention(self.attention_norm(x), turns)
        added: Tensor = self.w2(nn.functional.silu(self.w1(self.ffn_norm(x))))
        return x + added


class Transformer(nn.Module):
    """A decoder whose positions stand in a buffer that is in no checkpoint."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleDict(
            {str(number): Block(number, sizes) for number in range(sizes.layers)}
        )
        self.norm = nn.RMSNorm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        size = sizes.width // sizes.heads
        speeds = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(sizes.length), speeds)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights, as if there were one device."""
        nn.init.normal_(self.embed.weight)
        for layer in self.layers.values():
            layer.init_weights()
        bound = 3 * self.sizes.width**-0.5
        nn.init.trunc_normal_(self.output.weight, std=bound / 3, a=-bound, b=bound)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        logits: Tensor = self.output(self.norm(x))
        return logits


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Split over `tp`, then shard over `dp`; nothing has memory yet."""
    if mesh["tp"].size() > 1:
        for layer in model.layers.values():
            inward = ("attention.wq", "attention.wk", "attention.wv", "w1")
            plan: dict[str, Any] = {name: ColwiseParallel() for name in inward}
            plan |= {name: RowwiseParallel() for name in ("attention.wo", "w2")}
            parallelize_module(layer, mesh["tp"], plan)
        gathered = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"output": gathered})
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def make(
    sizes: Sizes, mesh: DeviceMesh, device: torch.device
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model with its initial values, and its optimizer."""
    model = di.deferred_init(Transformer, sizes, device=device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    di.materialize(model, device, seed=0, optimizers=[optimizer])
    return model, optimizer


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, mesh: DeviceMesh
) -> None:
    """Train a few steps on sequences that count upwards."""
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=3)
    generator = torch.Generator().manual_seed(0)
    share = mesh["dp"].get_local_rank()
    for step in range(steps):
        first = torch.randint(64, (8, 1), generator=generator)
        rows = (first + torch.arange(model.sizes.length)) % model.sizes.vocabulary
        rows = rows.chunk(mesh["dp"].size())[share].to(model.turns.device)
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = clip(model, 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh["dp"].size()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        _say(f"step {step}: loss {mean.item():.4f}, gradient {norm:.3f}")


def clip(model: nn.Module, limit: float) -> float:
    """Scale the gradients down to a norm; they lie on one mesh or on both."""
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    norm = sum(_whole(square).item() for square in squares) ** 0.5
    for parameter in model.parameters():
        if parameter.grad is not None and norm > limit:
            parameter.grad.mul_(limit / norm)
    return norm


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def checksum(model: nn.Module) -> str:
    """Hash all parameters and buffers in full; collective."""
    made = hashlib.sha256()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        whole = _whole(value)
        whole = torch.view_as_real(whole) if whole.is_complex() else whole
        made.update(name.encode() + whole.detach().cpu().numpy().tobytes())
    return made.hexdigest()[:16]


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def main() -> None:
    """Build, train, save, and load into a new model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    shape = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))

    model, optimizer = make(Sizes(), mesh, device)
    _say(f"initial values {checksum(model)}")
    train(model, optimizer, arguments.steps, mesh)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder[0])

    again, other = make(Sizes(), mesh, device)
    weights, moments = get_state_dict(again, other)
    dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder[0])
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=moments)
    _say(f"loaded as it was saved: {checksum(again) == checksum(model)}")
    # gloo's threads let go of the last tensors a moment after the collective: Python
    # must not be ending by then, or torch aborts.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
