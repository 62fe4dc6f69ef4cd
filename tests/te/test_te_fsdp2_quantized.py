"""Quantized weights of Transformer Engine under FSDP2, by gloo on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from te_capabilities import te_needs
from te_ranks import Ranks, belief, shard
from torch import Tensor, nn

import deferred_init as di

pytestmark = [pytest.mark.te, pytest.mark.distributed]


def _quantized(rows: int, *, columnwise: bool) -> Any:
    """Quantize on a CPU by hand: FP8 data of E4M3, and a scale of a half."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    quantizer = Float8Quantizer(
        torch.full((1,), 2.0), torch.zeros(1), tex.DType.kFloat8E4M3
    )
    data = (torch.arange(rows * 6) % 120).to(torch.uint8).view(rows, 6)
    made = quantizer.create_tensor_from_data(data, fake_dtype=torch.bfloat16)
    if columnwise:
        made._transpose = data.t().contiguous()
        made._transpose_invalid = False
    return made


def _holder(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def _parts(_rank: int, rows: int, columnwise: bool) -> None:
    from deferred_init.handlers.dtensor import DTensorAllocator

    whole = _quantized(rows, columnwise=columnwise)
    eager: Any = _holder(whole)
    shard(eager)
    late: Any = _holder(torch.empty(rows, 6, dtype=torch.bfloat16, device="meta"))
    shard(late)
    part: Any = DTensorAllocator().part_of(late.weight, whole)
    mine, its = part._local_tensor, eager.weight._local_tensor
    assert type(mine) is type(its) is type(whole)
    assert type(part) is type(eager.weight)
    assert part.dtype == torch.bfloat16
    assert mine.shape == its.shape
    for name in ("_data", "_scale_inv", "_transpose"):
        first, second = getattr(mine, name), getattr(its, name)
        assert (
            (first is None)
            == (second is None)
            == (name == "_transpose" and not columnwise)
        )
        if first is not None:
            assert torch.equal(first, second), name
            assert (
                first.data_ptr() != getattr(whole, name).data_ptr() or not mine.numel()
            )


@te_needs("quantized tensors on a CPU")
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize(("size", "rows"), [(2, 6), (3, 7)])
def test_a_quantized_whole_is_cut_as_fully_shard_cuts_one(
    ranks: Ranks, size: int, rows: int, columnwise: bool
) -> None:
    ranks(size).run(_parts, rows, columnwise)


def _adopted(rank: int) -> None:
    """Keep parts through a workspace, then train FSDP2's records on them."""
    from deferred_init.distributed.fsdp2 import fsdp_params
    from deferred_init.handlers.ecosystems import load_handlers
    from deferred_init.handlers.protocol import Request
    from deferred_init.inventory import take_inventory
    from deferred_init.te.sharded import adopt_part
    from deferred_init.workspace import ExecutionWorkspace

    whole = _quantized(6, columnwise=False)
    high = torch.arange(36.0).view(6, 6).bfloat16()
    whole._high_precision_init_val = high
    model: Any = _holder(torch.empty(6, 6, dtype=torch.bfloat16, device="meta"))
    shard(model)
    load_handlers()
    home = model.weight
    inventory = take_inventory([model])
    workspace = ExecutionWorkspace(inventory, Request(device=torch.device("cpu")))
    (slot,) = inventory.slots
    adopt_part(slot, whole, workspace)
    assert model.weight is home
    local = home._local_tensor
    assert type(local) is type(whole)
    part = slice(3 * rank, 3 * rank + 3)
    assert torch.equal(local._data, whole._data[part])
    assert torch.equal(local._high_precision_init_val, high[part])
    (record,) = fsdp_params([model])
    record.reset_sharded_param()
    assert record.sharded_param is home
    assert torch.equal(record._sharded_param_data._data, local._data.view(-1))
    workspace.undo.rollback()
    assert home.is_meta
    assert home._local_tensor.is_meta


@te_needs("quantized tensors on a CPU")
def test_a_parameter_that_gets_a_quantized_part_stays_the_same_object(
    ranks: Ranks,
) -> None:
    ranks(2).run(_adopted)


def _alike(rank: int, case: str) -> list[tuple[str, str]]:
    model: Any = _holder(_quantized(6, columnwise=False))
    shard(model)
    assert not di.audit(model, verify="full").findings
    with torch.no_grad():
        if case == "alike":
            model.weight._local_tensor._data.copy_(torch.arange(18).view(3, 6))
        else:
            model.register_buffer("whole", _quantized(6, columnwise=False))
            model.whole._data[0, 0] += rank
    findings = di.audit(model, verify="full").findings
    return [(finding.code, finding.fqn) for finding in findings]


@te_needs("quantized tensors on a CPU")
@pytest.mark.parametrize(
    ("case", "expected"),
    [("alike", ("shards-alike", "weight")), ("differ", ("replicas-differ", "whole"))],
)
def test_quantized_shards_that_are_alike_and_replicas_that_differ_are_found(
    ranks: Ranks, case: str, expected: tuple[str, str]
) -> None:
    assert ranks(2).run(_alike, case) == [[expected]] * 2


def _refused(_rank: int, case: str) -> str:
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.tensor import Shard
    from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling

    rows = 15 if case == "uneven" else 16
    te_recipe = Float8CurrentScaling()
    if case == "recipe":
        te_recipe = CustomRecipe(qfactory=lambda *_: None)
    with belief() as te, te.quantized_model_init(recipe=Float8CurrentScaling()):
        if case == "joined":
            model: Any = te.ops.GroupedLinear(
                2, 8, 8, device="meta", single_grouped_weight=True
            )
        else:
            model = te.Linear(8, rows, device="meta")
    if case == "recipe":
        model.fp8_meta["recipe"] = te_recipe
    if case == "offload":
        shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif case == "dim 1":
        shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    elif case == "not FSDP2":
        from torch.distributed.tensor import distribute_module

        distribute_module(model, dist.init_device_mesh("cpu", (2,)))
    else:
        shard(model)
    held = dict(model.named_parameters())
    options: dict[str, Any] = {}
    if case == "loaded":
        options["weights"] = {"weight": torch.ones(rows, 8), "bias": torch.ones(rows)}
    with pytest.raises(di.PlanError) as caught:
        di.plan(model, "cuda", gpu="h200", **options)
    assert all(p is held[name] and p.is_meta for name, p in model.named_parameters())
    return str(caught.value)


@te_needs("records of registered parameters")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("uneven", "quantized, but its 15 rows do not divide by 2 ranks"),
        ("loaded", "sharded already, so that no values can be loaded into them"),
        ("offload", "FSDP2 keeps it on the CPU, where it cannot be quantized"),
        ("dim 1", "[Shard(dim=1)], expected one shard along dim 0: shard it with"),
        ("not FSDP2", "FSDP2 did not shard it: materialize the model first, then"),
        ("recipe", "quantized by `CustomRecipe` and is sharded already, which works"),
        ("joined", "joins its parameters into one when they get memory, but they are"),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused_with_the_order_that_works(
    ranks: Ranks, case: str, said: str
) -> None:
    for text in ranks(2).run(_refused, case):
        assert said in text, text
