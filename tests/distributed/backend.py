"""On what the tests of several ranks run: gloo on CPUs, or NCCL with one GPU a rank.

`pytest tests/distributed --backend nccl` sets the variable that is read here, which
the processes that the tests start inherit.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["DEVICE", "generator_states", "join", "missing_gpus"]

_ON_NCCL = os.environ.get("DEFERRED_INIT_BACKEND", "gloo") == "nccl"
DEVICE = "cuda" if _ON_NCCL else "cpu"
"""Where models of the tests are made, and of what devices their meshes are."""


def missing_gpus(world_size: int) -> str:
    """Say why so many ranks cannot be started, or nothing."""
    found = torch.cuda.device_count() if _ON_NCCL else world_size
    if found >= world_size:
        return ""
    return f"NCCL needs {world_size} GPUs, one a rank; torch finds {found}"


def join(store: dist.Store, rank: int, world_size: int) -> None:
    """Make this process a rank, and `DEVICE` what its tensors are made on."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if _ON_NCCL:
        torch.cuda.set_device(rank)
        torch.set_default_device(DEVICE)
    dist.init_process_group(
        # Meshes of CPUs, where a test asks for them, and objects stay on gloo.
        "cpu:gloo,cuda:nccl" if _ON_NCCL else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
    )


def generator_states() -> Tensor:
    """Return the states of the generators from which models are drawn, as one."""
    states = [torch.get_rng_state()]
    if _ON_NCCL:
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)
