"""A fault on one rank, at any boundary: all ranks roll back, at once and by name."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE
from models import Net, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

import deferred_init as di
from tests.reliability.faults import ERRORS, Boundaries, raising
from tests.reliability.portrait import bits, generators, seed

Ranks = Callable[[int], RankPool]
# A rank that fails is heard at once; only one that stays away is waited for.
SOON_S, TIMEOUT_S = 30.0, 60.0


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Any]:
    found: list[Any] = [generators()]
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        found.append((name, id(tensor), type(tensor), tensor.requires_grad))
        found.append(
            (local.device.type, local.shape, local.dtype, bits(local.detach()))
        )
    for group in optimizer.param_groups if optimizer is not None else ():
        found.append([id(param) for param in group["params"]])
    return found


def _without_ids(facts: list[Any]) -> list[Any]:
    return [
        f if not isinstance(f, tuple) else [x for x in f if not _is_id(x)]
        for f in facts
        if not isinstance(f, list)
    ]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and value > 1 << 20


def _sharded(built: str, layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed(3)
    if built == "recorded":
        model: nn.Module = di.deferred_init(Net)
    else:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    if built == "recorded":
        shard(model, layout)
    else:
        torch.distributed.fsdp.fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _run(model: nn.Module, optimizer: Any, **options: Any) -> di.Report:
    held = () if optimizer is None else optimizer
    return di.materialize(
        model, DEVICE, optimizers=held, rank_timeout_s=TIMEOUT_S, **options
    )


def _one_rank_fails(rank: int, make: Any, cases: int, options: dict[str, Any]) -> int:
    """Let each rank in turn fail at boundaries spread over the work; count them."""
    warnings.simplefilter("ignore")
    model, optimizer = make(rank)
    with Boundaries() as counted:
        _run(model, optimizer, **options)
    done = _without_ids(_facts(model, optimizer))
    # Before that the ranks have no meeting in which they could be told.
    first = counted.crossed.index("before _last_writers") + 1
    spread = len(counted.crossed) - first
    for case in range(cases):
        error = list(ERRORS.values())[case % len(ERRORS)]
        model, optimizer = make(rank)
        before = _facts(model, optimizer)
        fails = case % 2 == rank
        at = first + spread * case // max(cases - 1, 1) if fails else 0
        begun = time.monotonic()
        expected: Any = di.MaterializeError
        if fails and not issubclass(error, Exception):
            expected = error
        with (
            Boundaries(at, raising(error("on purpose"))) as crossed,
            pytest.raises(expected) as caught,
        ):
            _run(model, optimizer, **options)
        place = f"case {case}, {(counted if fails else crossed).crossed[at - 1]}"
        assert time.monotonic() - begun < SOON_S, place
        if not fails:
            assert f"it failed on rank {case % 2}: " in str(caught.value), place
            assert "on purpose" in str(caught.value), place
        assert _facts(model, optimizer) == before, place
        _run(model, optimizer, **options)
        assert _without_ids(_facts(model, optimizer)) == done, place
    return cases


def _sharded_cases(rank: int, built: str, layout: str, verify: str) -> int:
    def make(_rank: int) -> Any:
        return _sharded(built, layout)

    return _one_rank_fails(rank, make, 18, {"verify": verify})


@pytest.mark.parametrize(
    ("built", "layout", "verify"),
    [
        ("recorded", "fsdp", "full"),
        ("recorded", "tp", "fast"),
        ("meta", "fsdp", "full"),
    ],
)
def test_all_ranks_roll_back_when_one_fails_at_any_boundary(
    ranks: Ranks, built: str, layout: str, verify: str
) -> None:
    assert ranks(2).run(_sharded_cases, built, layout, verify) == [18, 18]


def _broadcast_cases(rank: int) -> int:
    def make(rank: int) -> Any:
        seed(3)
        with torch.device(DEVICE if rank == 0 else "meta"):
            model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        model.append(nn.Linear(3, 2, device="meta"))
        return model, None

    return _one_rank_fails(rank, make, 12, {"broadcast_from": 0, "seed": 1})


def test_the_source_and_the_receivers_of_a_broadcast_hear_of_each_others_faults(
    ranks: Ranks,
) -> None:
    assert ranks(2).run(_broadcast_cases) == [12, 12]
