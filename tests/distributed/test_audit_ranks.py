"""The audit finds on every rank what is wrong between ranks and in wrappers."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Net, shard
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard

import deferred_init as di
from deferred_init.distributed.checksum import checksum

Ranks = Callable[[int], RankPool]


def _made(layout: str = "fsdp", width: int = 12) -> Any:
    warnings.simplefilter("ignore")
    model = di.deferred_init(Net, width)
    shard(model, layout)
    assert di.materialize(model, DEVICE, seed=3, verify="full").ok
    return model


def _findings(model: nn.Module, verify: str = "full") -> list[tuple[str, str]]:
    findings = di.audit(model, verify=verify).findings
    return [(finding.code, finding.fqn) for finding in findings]


def test_shards_that_are_identical_are_found(ranks: Ranks) -> None:
    for found in ranks(2).run(_alike):
        assert found == [("shards-alike", "embed.weight")]


def _alike(_rank: int) -> list[tuple[str, str]]:
    warnings.simplefilter("ignore")

    def make() -> Any:
        return nn.Sequential(OrderedDict(embed=nn.Embedding(6, 4)))

    model = di.deferred_init(make)
    fully_shard(model)
    di.materialize(model, DEVICE, seed=3)
    torch.manual_seed(0)
    with torch.no_grad():
        nn.init.normal_(model.embed.weight._local_tensor)
    return _findings(model)


def _differ(rank: int, what: str) -> list[tuple[str, str]]:
    model = _made("hsdp")
    with torch.no_grad():
        if what == "parameter" and rank >= 2:
            model.blocks[0].down.weight._local_tensor.add_(1)
        if what == "buffer" and rank == 3:
            model.positions.add_(1)
    assert _findings(model, "fast") == []
    return _findings(model)


@pytest.mark.parametrize(
    ("what", "name"), [("parameter", "blocks.0.down.weight"), ("buffer", "positions")]
)
def test_replicas_that_differ_are_found(ranks: Ranks, what: str, name: str) -> None:
    for found in ranks(4).run(_differ, what):
        assert found
        assert set(found) == {("replicas-differ", name)}


def _messages(rank: int) -> str:
    model = _made("fsdp")
    with torch.no_grad():
        model.positions.add_(rank)
    (finding,) = di.audit(model, verify="full").findings
    return finding.message


def test_a_finding_about_ranks_names_them(ranks: Ranks) -> None:
    for text in ranks(3).run(_messages):
        assert "other bits on ranks 0 and 1 and 2; materialize on all ranks" in text


def _split_tie(_rank: int) -> tuple[str, list[tuple[str, str]]]:
    warnings.simplefilter("ignore")
    model: Any = di.deferred_init(Net)
    fully_shard(model.embed)
    fully_shard(model)
    with pytest.raises(di.PlanError) as caught:
        di.materialize(model, DEVICE, seed=0)
    real = Net()
    fully_shard(real.embed)
    fully_shard(real)
    return str(caught.value), _findings(real, "fast")


def test_a_tie_that_two_fsdp_groups_manage_is_refused_and_found(ranks: Ranks) -> None:
    for text, found in ranks(2).run(_split_tie):
        assert "are one parameter, which FSDP2 was told to manage in two groups" in text
        assert "`embed.weight`" in text
        assert "`head.weight`" in text
        assert [code for code, _ in found] == ["tie-across-groups"]


def _stale(_rank: int, how: str) -> list[tuple[str, str, str]]:
    model = _made()
    if how != "noticed":
        model(torch.tensor([[1]])).sum().backward()
        model.zero_grad()
    linear = model.blocks[0].up
    old = linear.bias
    if how == "memory":
        old._local_tensor = old._local_tensor.clone()
    else:
        linear.bias = nn.Parameter(old.detach().clone())
    report = di.audit(model)
    return [
        (finding.code, finding.fqn, finding.severity) for finding in report.findings
    ]


@pytest.mark.parametrize(
    ("how", "severity"),
    [("replaced", "error"), ("memory", "error"), ("noticed", "warning")],
)
def test_a_stale_parameter_that_the_wrapper_holds_is_found(
    ranks: Ranks, how: str, severity: str
) -> None:
    for found in ranks(2).run(_stale, how):
        assert ("wrapper-stale", "blocks.0.up.bias", severity) in found


def _healthy(_rank: int, layout: str) -> list[tuple[str, str]]:
    return _findings(_made(layout))


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "tp+fsdp"])
def test_nothing_is_found_in_a_healthy_sharded_model(ranks: Ranks, layout: str) -> None:
    assert ranks(4).run(_healthy, layout) == [[]] * 4


def _alone(rank: int) -> list[tuple[str, str]]:
    from deferred_init.distributed import audit_ranks

    audit_ranks._TIMEOUT_S = 1.0
    model = _made()
    audit_ranks._TIMEOUT_S = 0.5
    return _findings(model) if rank == 0 else []


def test_a_full_audit_on_one_rank_alone_says_that_all_have_to_take_part() -> None:
    pool = RankPool(2)
    found = pool.run(_alone)
    pool.end()
    assert found[0] == [("ranks-missing", "")]


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40),
    data=st.data(),
)
def test_a_checksum_changes_with_a_value_and_with_the_order(
    values: list[int], data: st.DataObject
) -> None:
    tensor = torch.tensor(values, dtype=torch.int16)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(values) - 1))] ^= 1
    assert checksum(changed) != checksum(tensor)
    swapped = tensor.clone()
    swapped[[0, -1]] = tensor[[-1, 0]]
    assert (checksum(swapped) == checksum(tensor)) == (values[0] == values[-1])
    assert checksum(tensor).constant == (len(set(values)) == 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn],
)
def test_every_dtype_has_a_checksum_over_all_of_its_pieces(dtype: torch.dtype) -> None:
    size = 2**20 + 3
    tensor = torch.zeros(size, dtype=torch.float32).to(dtype)
    other = tensor.clone()
    other.view(torch.uint8)[-1] = 1
    assert checksum(tensor).num_elements in (size, 2 * size)
    assert checksum(other) != checksum(tensor)
