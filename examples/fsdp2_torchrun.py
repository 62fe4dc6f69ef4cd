r"""FSDP2 from a model without memory: the same initial values on any number of ranks.

On one machine, without a GPU as well:

    torchrun --nproc-per-node 2 examples/fsdp2_torchrun.py

On N nodes, started on each of them with the same command but for the scheduler's
placement (`$HEAD` is the host name of any one node):

    torchrun --nnodes $N --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 examples/fsdp2_torchrun.py

All ranks run this script alike; none needs more memory than its shards and the
largest parameter. The last line that rank 0 prints is a checksum of all parameters:
it does not depend on how many ranks there are.
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import deferred_init as di


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the two layers make of the input to it."""
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


class Model(nn.Module):
    """A small language model whose head is tied to its embedding."""

    def __init__(self, width: int = 64, vocabulary: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        x: Tensor = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def main() -> None:
    """Build, shard, materialize, train two steps."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", timeout=timedelta(minutes=5)
    )
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    model = di.deferred_init(Model, device=device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = di.materialize(model, device, seed=0, optimizers=[optimizer])

    checksum = _checksum(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(2):
        tokens = torch.randint(101, (4, 16), generator=generator).to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(f"{report.final_bytes:,} bytes on this rank; ready: {report.ok}")
        print(f"parameters {checksum}")
    # gloo's threads let go of the last tensors a moment after the collective: Python
    # must not be ending by then, or torch aborts.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def _checksum(model: nn.Module) -> str:
    """Hash all parameters in full; collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = parameter.full_tensor().detach().cpu()
        digest.update(name.encode() + full.numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
