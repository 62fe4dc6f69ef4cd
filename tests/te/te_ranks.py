"""What tests of Transformer Engine on several ranks share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

# Where the processes that are started find the pool as well.
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from rank_pool import RankPool

__all__ = ["RankPool", "Ranks", "assert_same", "belief", "shard"]

Ranks = Callable[[int], RankPool]


@contextmanager
def belief() -> Iterator[Any]:
    """Let TE's constructors find a GPU."""
    warnings.simplefilter("ignore")
    import transformer_engine.pytorch as te

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield te


def shard(model: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, **options)


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    mine, its = dict(model.named_parameters()), dict(twin.named_parameters())
    assert list(mine) == list(its)
    for name, got in mine.items():
        expected: Any = its[name]
        assert torch.equal(got.full_tensor(), expected.full_tensor()), name
        assert torch.equal(got._local_tensor, expected._local_tensor), name
        assert got.requires_grad == expected.requires_grad, name
