"""One rank of a node reads what several need: each byte once, and failures are told."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import DEVICE
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deferred_init as di
from deferred_init.sources import open_source
from deferred_init.sources.byte_files import LocalFile

Ranks = Callable[[int], RankPool]
WIDTH, DEPTH = 192, 4
MATRIX = 4 * WIDTH * WIDTH
BIAS = 4 * WIDTH


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def stored() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {
        key: torch.randn(value.shape) for key, value in build().state_dict().items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    save_file(stored(), tmp_path / "model.safetensors")
    return tmp_path


def sharded(layout: str) -> nn.Module:
    with torch.device("meta"):
        model = build()
    world = dist.get_world_size()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh(DEVICE, (world,)))
    elif layout == "hsdp":
        mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("r", "s"))
        fully_shard(model, mesh=mesh)
    else:
        styles = [ColwiseParallel(), RowwiseParallel()] * (DEPTH // 2)
        named = {str(index): style for index, style in enumerate(styles)}
        parallelize_module(model, init_device_mesh(DEVICE, (world,)), named)
    return model


def check(model: nn.Module) -> None:
    expected = stored()
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert torch.equal(whole, expected[name].to(whole.dtype)), name


@contextmanager
def counted(fail_at: int | None = None) -> Iterator[list[int]]:
    """Count the bytes that this process reads, or let a read fail."""
    read: list[int] = []
    read_into = LocalFile.read_into

    def counting(self: Any, offset: int, buffer: memoryview) -> None:
        if len(read) == fail_at:
            raise OSError("Input/output error")
        read.append(len(buffer))
        read_into(self, offset, buffer)

    LocalFile.read_into = counting  # type: ignore[method-assign]
    try:
        yield read
    finally:
        LocalFile.read_into = read_into  # type: ignore[method-assign]


def _load(
    rank: int, layout: str, folder: Path, shared: bool, nodes: int, dtype: Any = None
) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    model = sharded(layout)
    host = socket.gethostname
    per_node = dist.get_world_size() // nodes
    socket.gethostname = lambda: f"node{rank // per_node}"
    source = open_source(folder, mmap=False, shared=shared)
    try:
        with counted() as read:
            report = di.materialize(
                model, DEVICE, weights=source, missing="error", dtype=dtype, seed=0
            )
    finally:
        socket.gethostname = host
    assert report.ok
    check(model)
    return sum(read), [note for note in report.notes if "read them for all" in note]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "world", "alone", "together"),
    [
        # Rows of their own: there is nothing to share.
        ("fsdp", 2, DEPTH * (MATRIX + BIAS), DEPTH * (MATRIX + BIAS)),
        # Two replicas of each shard; biases are too small to be sent.
        ("hsdp", 4, 2 * DEPTH * (MATRIX + BIAS), DEPTH * (MATRIX + 2 * BIAS)),
        # Half of the layers are cut by columns, of which rows are read in full.
        ("tp", 2, 6 * MATRIX + 6 * BIAS, 4 * MATRIX + 6 * BIAS),
    ],
)
def test_each_byte_is_read_once_per_node(
    ranks: Ranks,
    folder: Path,
    layout: str,
    world: int,
    alone: int,
    together: int,
    dtype: Any,
) -> None:
    for shared, expected in ((False, alone), (True, together)):
        found = ranks(world).run(_load, layout, folder, shared, 1, dtype)
        assert sum(count for count, _ in found) == expected
        told = shared and layout != "fsdp"
        assert all(bool(notes) is told for _, notes in found)
        if told:  # the work is divided
            assert max(count for count, _ in found) < 0.8 * sum(c for c, _ in found)


def test_every_node_reads_for_itself(ranks: Ranks, folder: Path) -> None:
    found = ranks(4).run(_load, "tp", folder, True, 2)
    columns, rows = DEPTH // 2, DEPTH // 2
    # By columns every node reads all rows; by rows every rank reads its own.
    matrices = columns * 2 * MATRIX + rows * MATRIX
    biases = rows * BIAS + columns * 4 * BIAS
    assert sum(count for count, _ in found) == matrices + biases


def _fail(rank: int, folder: Path, layout: str, nodes: int, who: int) -> str:
    warnings.simplefilter("ignore")
    from deferred_init.handlers import checkpoint

    model = sharded(layout)
    before = [(name, id(p), p.device.type) for name, p in model.named_parameters()]
    host, step_bytes = socket.gethostname, checkpoint._STEP_BYTES
    per_node = dist.get_world_size() // nodes
    socket.gethostname = lambda: f"node{rank // per_node}"
    checkpoint._STEP_BYTES = MATRIX
    source = open_source(folder, mmap=False, shared=True)
    start = time.monotonic()
    try:
        with counted(fail_at=1 if rank == who else None):
            di.materialize(model, DEVICE, weights=source, rank_timeout_s=60, seed=0)
    except di.MaterializeError as error:
        text = str(error)
    else:
        text = "no error"
    finally:
        socket.gethostname, checkpoint._STEP_BYTES = host, step_bytes
    after = [(name, id(p), p.device.type) for name, p in model.named_parameters()]
    assert after == before
    assert time.monotonic() - start < 50
    di.materialize(model, DEVICE, weights=open_source(folder), seed=0)
    check(model)
    return text


@pytest.mark.parametrize(
    ("layout", "world", "nodes", "who"),
    [("tp", 2, 1, 0), ("tp", 2, 1, 1), ("hsdp", 4, 1, 3), ("tp", 4, 2, 2)],
)
def test_a_reader_that_fails_is_told_to_all_and_nobody_hangs(
    ranks: Ranks, folder: Path, layout: str, world: int, nodes: int, who: int
) -> None:
    found = ranks(world).run(_fail, folder, layout, nodes, who)
    for text in found:
        assert "Input/output error" in text
        assert "put back as they were" in text


def _without_group(rank: int, folder: Path) -> bool:
    """Load what nobody shares: a model that is whole on every rank."""
    with torch.device("meta"):
        model = build()
    source = open_source(folder, shared=True)
    report = di.materialize(model, DEVICE, weights=source, seed=0)
    check(model)
    return any("read them for all" in note for note in report.notes)


def test_a_model_that_is_not_sharded_is_loaded_by_each_rank(
    ranks: Ranks, folder: Path
) -> None:
    assert ranks(2).run(_without_group, folder) == [False, False]


def _other_keys(rank: int, odd: bool) -> bool:
    warnings.simplefilter("ignore")
    prefix = "module." if odd and rank == 1 else ""
    state = {prefix + key: value for key, value in stored().items()}
    model = sharded("tp")
    source = open_source(state, shared=True)
    report = di.materialize(model, DEVICE, weights=source, seed=0)
    check(model)
    return any("read them for all" in note for note in report.notes)


def test_ranks_whose_checkpoints_differ_do_not_share(ranks: Ranks) -> None:
    assert ranks(2).run(_other_keys, True) == [False, False]
    assert ranks(2).run(_other_keys, False) == [True, True]
