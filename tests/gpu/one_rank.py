"""One GPU as the only rank of a process group, and models sharded over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    if type(model) is nn.Sequential:
        for layer in model:
            fully_shard(layer)
    return fully_shard(model)
