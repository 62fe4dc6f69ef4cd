"""Transformer Engine under FSDP2, by gloo on CPUs: what is kept of what TE makes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

# Where the processes that are started find the pool as well.
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from rank_pool import RankPool
from te_capabilities import has, te_needs

import deferred_init as di

pytestmark = [pytest.mark.te, pytest.mark.distributed]
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.close()


@contextmanager
def _belief() -> Iterator[Any]:
    """Let TE's constructors find a GPU."""
    warnings.simplefilter("ignore")
    import transformer_engine.pytorch as te

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield te


def _shard(model: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, **options)


def _assert_same(model: nn.Module, twin: nn.Module) -> None:
    mine, its = dict(model.named_parameters()), dict(twin.named_parameters())
    assert list(mine) == list(its)
    for name, got in mine.items():
        expected: Any = its[name]
        assert torch.equal(got.full_tensor(), expected.full_tensor()), name
        assert torch.equal(got._local_tensor, expected._local_tensor), name
        assert got.requires_grad == expected.requires_grad, name


def _stack(te: Any, device: str) -> nn.Module:
    apart = {"single_grouped_weight": False, "single_grouped_bias": False}
    return nn.Sequential(
        te.Linear(8, 15, device=device),
        te.LayerNormLinear(15, 8, device=device, zero_centered_gamma=True),
        te.LayerNormMLP(8, 16, device=device, activation="swiglu"),
        te.GroupedLinear(
            *(2, 8, 8), device=device, **(apart if has("joined weights") else {})
        ),
        te.LayerNorm(8, device=device),
    )


def _ops(te: Any, device: str) -> Any:
    return te.ops.Sequential(
        te.ops.BasicLinear(8, 15, device=device),
        te.ops.Bias(15, device=device),
        te.ops.Linear(15, 8, device=device),
        te.ops.LayerNorm(8, device=device),
    )


MODELS = {"modules": _stack, "ops": _ops}


def _high_precision(_rank: int, kind: str, order: str) -> None:
    with _belief() as te:
        model = MODELS[kind](te, "meta")
        model[0].weight.requires_grad_(False)
        torch.manual_seed(3)
        twin = MODELS[kind](te, "cpu")
        twin[0].weight.requires_grad_(False)
        state = torch.get_rng_state()
    if order == "shard first":
        _shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    held = dict(model.named_parameters())
    assert di.materialize(model, "cpu", seed=3, optimizers=[optimizer]).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param is held[name] for name, param in model.named_parameters())
    if order == "shard last":
        _shard(model)
    _shard(twin)
    _assert_same(model, twin)
    assert not di.audit(model, verify="full").findings


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        pytest.param(
            *("modules", "shard first"),
            marks=te_needs("records of registered parameters"),
        ),
        ("modules", "shard last"),
        ("ops", "shard first"),
        ("ops", "shard last"),
    ],
)
def test_high_precision_shards_equal_those_of_an_eager_model(
    ranks: Ranks, kind: str, order: str
) -> None:
    ranks(2).run(_high_precision, kind, order)


def _parallel_attributes(_rank: int) -> None:
    with _belief() as te:
        model = te.Linear(8, 16, device="meta", parallel_mode="column")
    _shard(model)
    di.materialize(model, "cpu", seed=0)
    assert model.weight.partition_dim == 0
    assert model.weight.tensor_model_parallel is not None
    with _belief() as te:
        other = te.Linear(8, 16, device="meta")
    _shard(other)
    other.weight.partition_dim = 7  # the user's word counts
    di.materialize(other, "cpu", seed=0)
    assert other.weight.partition_dim == 7


@te_needs("records of registered parameters")
def test_shards_carry_the_attributes_that_te_sets_when_it_makes_a_weight(
    ranks: Ranks,
) -> None:
    ranks(2).run(_parallel_attributes)


class _Tracker:
    """As Megatron's, for the CPU: one generator, whose state it keeps."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            self.states = {"model-parallel-rng": torch.manual_seed(seed).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        yield
        self.states[name] = torch.get_rng_state()
        torch.set_rng_state(outer)


def _tracked(te: Any, device: str, tracker: _Tracker) -> nn.Module:
    parallel = {"parallel_mode": "column", "tp_size": 2}
    return nn.Sequential(
        te.Linear(
            8, 16, get_rng_state_tracker=lambda: tracker, device=device, **parallel
        ),
        te.ops.BasicLinear(
            8, 8, rng_state_tracker_function=lambda: tracker, device=device
        ),
    )


def _from_trackers(rank: int, case: str) -> str:
    odd = rank if case == "differ" else 0
    trackers = _Tracker(7 + odd), _Tracker(7)
    with _belief() as te:
        model = _tracked(te, "meta", trackers[0])
        torch.manual_seed(3)
        twin = _tracked(te, "cpu", trackers[1])
    _shard(model)
    _shard(twin)
    if case == "differ":
        with pytest.raises(di.PlanError) as caught:
            di.materialize(model, "cpu", seed=3)
        return str(caught.value)
    rng = "by_name" if case == "by name" else "eager"
    report = di.materialize(model, "cpu", seed=3, rng=rng)
    if case == "equal":
        _assert_same(model, twin)
        assert torch.equal(*(t.states["model-parallel-rng"] for t in trackers))
    return "; ".join(report.assumptions)


@te_needs("records of registered parameters")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("equal", ""),
        ("differ", "state of the random generators' tracker: "),
        ("by name", 'draws its part of 2 under rng="by_name", which gives'),
    ],
)
def test_tensor_parallel_parts_come_from_trackers_on_which_ranks_agree(
    ranks: Ranks, case: str, said: str
) -> None:
    for text in ranks(2).run(_from_trackers, case):
        assert said in text
        assert bool(said) == ("part of 2" in text or "tracker" in text)


def _biases(te: Any, device: str) -> Any:
    return te.ops.Sequential(*(te.ops.Bias(4, device=device) for _ in range(2)))


def _fusers(_rank: int) -> None:
    with _belief() as te:
        model: Any = _biases(te, "meta")
        early = te.ops.fuser.OperationFuser(list(model))
    model._module_groups = model._make_module_groups(model._modules.values())
    _shard(model)
    di.materialize(model, "cpu", seed=0, strict=False)
    assert model._module_groups is None
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for expected in (2.0, 1.5):
        out = model(torch.zeros(2, 4))
        assert torch.equal(out, torch.full((2, 4), expected))
        out.mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (fuser,) = model._module_groups
    assert not any(hasattr(p, "device_mesh") for p in fuser._flat_basic_op_params)
    assert not di.audit(model).findings

    sharded = type(fuser)(list(model))  # while the modules hold shards
    model._module_groups = [sharded]
    (finding,) = di.audit(model).findings
    assert finding.code == "te-fuser-stale"
    assert "found 2 other(s), shards, which FSDP2 replaces" in finding.message
    model._module_groups = [early]
    (finding,) = di.audit(model).findings
    assert finding.code == "te-fuser-stale"


def test_fusers_are_built_on_gathered_parameters_and_those_on_shards_are_found(
    ranks: Ranks,
) -> None:
    ranks(2).run(_fusers)


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
    _shard(eager)
    late: Any = _holder(torch.empty(rows, 6, dtype=torch.bfloat16, device="meta"))
    _shard(late)
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
    _shard(model)
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
    _shard(model)
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
    with _belief() as te, te.quantized_model_init(recipe=Float8CurrentScaling()):
        if case == "joined":
            model: Any = te.ops.GroupedLinear(
                2, 8, 8, device="meta", single_grouped_weight=True
            )
        else:
            model = te.Linear(8, rows, device="meta")
    if case == "recipe":
        model.fp8_meta["recipe"] = te_recipe
    if case == "offload":
        _shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif case == "dim 1":
        _shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    elif case == "not FSDP2":
        from torch.distributed.tensor import distribute_module

        distribute_module(model, dist.init_device_mesh("cpu", (2,)))
    else:
        _shard(model)
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
