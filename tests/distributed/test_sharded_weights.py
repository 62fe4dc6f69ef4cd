"""Loading into sharded models: every rank its own part, from every source."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE
from models import LAYOUTS, Net, compare, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

import deferred_init as di
from deferred_init.sources import Fuse, Transpose, open_source
from deferred_init.sources.byte_files import LocalFile

Ranks = Callable[[int], RankPool]
CASES = [(layout, worlds[-1]) for layout, worlds in LAYOUTS.items()]


def _stored() -> nn.Module:
    torch.manual_seed(23)
    return Net()


def _save(kind: str, folder: Path) -> Any:
    state = {key: value.clone() for key, value in _stored().state_dict().items()}
    del state["head.weight"]
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(state, folder / "model.safetensors")
    elif kind == "torch":
        torch.save(state, folder / "model.pt")
    return state


def _load(_rank: int, layout: str, kind: str, folder: Path, dtype: Any) -> None:
    warnings.simplefilter("ignore")
    expected = _stored()
    if dtype is not None:
        expected.to(dtype)
    model = di.deferred_init(Net)
    expected.load_state_dict(_stored().state_dict())
    _same_buffers(expected, model)
    shard(model, layout)
    held = dict(model.named_parameters())
    weights = expected.state_dict() if kind == "mapping" else folder
    report = di.materialize(
        model,
        DEVICE,
        weights=weights,
        missing="error",
        unexpected="ignore",
        dtype=dtype,
    )
    assert report.ok
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
    mine = dict(model.named_parameters())
    for name, wanted in expected.named_parameters():
        part = mine[name]
        got = part.full_tensor() if isinstance(part, DTensor) else part
        assert torch.equal(got, wanted), name
        assert got.dtype == wanted.dtype


def _same_buffers(expected: nn.Module, model: nn.Module) -> None:
    names = [name for name, _ in expected.named_buffers()]
    assert names == [name for name, _ in model.named_buffers()]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "mapping"])
@pytest.mark.parametrize(("layout", "world"), CASES)
def test_each_rank_gets_its_part_of_the_checkpoint(
    ranks: Ranks, layout: str, world: int, kind: str, tmp_path: Path
) -> None:
    _save(kind, tmp_path)
    ranks(world).run(_load, layout, kind, tmp_path, None)


def test_parts_are_cast_on_arrival(ranks: Ranks, tmp_path: Path) -> None:
    _save("safetensors", tmp_path)
    ranks(2).run(_load, "fsdp", "safetensors", tmp_path, torch.float64)


def _count(rank: int, folder: Path) -> int:
    warnings.simplefilter("ignore")
    read = 0
    read_into = LocalFile.read_into

    def counted(self: Any, offset: int, buffer: memoryview) -> None:
        nonlocal read
        read += len(buffer)
        read_into(self, offset, buffer)

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
    source = open_source(folder)
    LocalFile.read_into = counted  # type: ignore[method-assign]
    try:
        di.materialize(model, DEVICE, weights=source, missing="error")
    finally:
        LocalFile.read_into = read_into  # type: ignore[method-assign]
    return read


def test_a_rank_reads_only_the_bytes_of_its_part(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    eager = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    save_file(dict(eager.state_dict()), tmp_path / "model.safetensors")
    total = 4 * 4 * (64 * 64 + 64)
    assert ranks(2).run(_count, tmp_path) == [total // 2, total // 2]


def _fused(_rank: int) -> None:
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    whole = torch.cat([a, b])
    for dim in (0, 1):
        model = nn.Module()
        empty = distribute_tensor(torch.empty(8, 7, device="meta"), mesh, [Shard(dim)])
        model.weight = nn.Parameter(empty)
        rule = Fuse("weight", ["a", "b"])
        di.materialize(model, DEVICE, weights={"a": a, "b": b}, names=[rule])
        assert isinstance(model.weight, DTensor)
        assert torch.equal(model.weight.full_tensor(), whole)
        model.weight = nn.Parameter(
            distribute_tensor(torch.empty(8, 7, device="meta"), mesh, [Shard(dim)])
        )
        turned = {"weight": whole.t().contiguous()}
        di.materialize(model, DEVICE, weights=turned, names=[Transpose("weight")])
        assert torch.equal(model.weight.full_tensor(), whole)


def test_joined_and_turned_tensors_are_cut_for_each_rank(ranks: Ranks) -> None:
    ranks(3).run(_fused)


def _missing(_rank: int) -> None:
    warnings.simplefilter("ignore")
    stored = dict(_stored().state_dict())
    del stored["blocks.1.up.weight"]
    torch.manual_seed(3)
    expected = Net()
    expected.load_state_dict(stored, strict=False)
    model = di.deferred_init(Net)
    shard(model, "fsdp")
    di.materialize(model, DEVICE, weights=stored, seed=3)
    compare(model, expected)


def test_what_the_checkpoint_lacks_gets_the_values_of_one_process(ranks: Ranks) -> None:
    ranks(2).run(_missing)
