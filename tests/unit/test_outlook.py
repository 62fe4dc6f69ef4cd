"""Plans for hardware that is not here: a GPU by name, and a number of ranks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.hardware import GPUS, find_gpu


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embed.weight
        self.tall = nn.Parameter(torch.randn(1, 5))
        self.register_buffer("table", torch.arange(7.0))


def _by_name(plan: di.Plan) -> dict[str, tuple[int, int]]:
    tensors = plan.forecast().tensors
    return {tensor.fqn: (tensor.num_bytes, tensor.rank_bytes) for tensor in tensors}


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_bytes_per_rank_are_those_that_fsdp2_allocates(world_size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    planned = di.plan(di.deferred_init(_Uneven), "cpu", world_size=world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
    try:
        mesh = dist.init_device_mesh("cpu", (world_size,))
        model = fully_shard(_Uneven(), mesh=mesh)
        group = model._get_fsdp_state()._fsdp_param_group
        kept = sum(p._sharded_param_data.nbytes for p in group.fsdp_params)
    finally:
        dist.destroy_process_group()
    assert planned.forecast().rank_bytes == kept + model.table.nbytes


def test_a_tie_is_counted_once_and_buffers_are_whole_on_every_rank() -> None:
    planned = di.plan(di.deferred_init(_Uneven), "cpu", world_size=4)
    assert _by_name(planned) == {
        "embed.weight": (10 * 6 * 4, 3 * 6 * 4),
        "head.bias": (10 * 4, 3 * 4),
        "tall": (5 * 4, 5 * 4),
        "table": (7 * 4, 7 * 4),
    }


def test_the_peak_of_a_rank_is_its_part_and_the_largest_full_tensor() -> None:
    found = di.plan(di.deferred_init(_Uneven), "cpu", world_size=4).forecast()
    assert found.peak_bytes == found.rank_bytes + 10 * 6 * 4
    assert found.peak_reason == (
        "the tensors themselves, and 240 bytes more while `embed.weight` is made, of "
        "which each rank keeps its part"
    )


def test_what_is_cast_exists_in_its_own_dtype_first() -> None:
    model = di.deferred_init(nn.Linear, 8, 4)
    planned = di.plan(model, "cuda", "bf16")
    assert planned.final_bytes == 2 * 36
    assert planned.peak_bytes == planned.forecast().peak_bytes == 2 * 36 + 4 * 32
    assert "128 bytes more while `weight` is made" in planned.forecast().peak_reason


def test_a_forecast_stays_what_it_was_when_the_model_has_been_made() -> None:
    model = nn.Linear(8, 4, device="meta")
    planned = di.plan(model, "cpu", "bf16")
    before = di.plan(model, "cpu", "bf16").forecast()
    di.materialize(model, "cpu", "bf16")
    assert planned.forecast() == before


def test_who_makes_each_tensor_and_whether_it_draws_is_told() -> None:
    tensors = di.plan(di.deferred_init(_Uneven), "cuda").forecast().tensors
    draws = {tensor.fqn: tensor.draws for tensor in tensors}
    assert draws == {
        "embed.weight": True,
        "head.bias": True,
        "tall": True,
        "table": False,
    }
    assert {tensor.initializer for tensor in tensors} == {"recorded"}


def test_a_model_fits_where_its_peak_does() -> None:
    with torch.device("meta"):
        model = nn.Linear(200_000, 100_000, bias=False, dtype=torch.float32)
    answers = {
        (gpu, ranks): di.plan(model, "cuda", gpu=gpu, world_size=ranks).forecast().fits
        for gpu, ranks in [("h100", 1), ("h200", 1), ("a100", 2)]
    }
    # Half of the 80 GB stays on each of two ranks, and all of it is made on both.
    assert answers == {("h100", 1): True, ("h200", 1): True, ("a100", 2): False}
    assert di.plan(model, "cuda").forecast().fits is None


@pytest.mark.parametrize(
    ("recipe", "gpu", "refused"),
    [
        ("mxfp8", "h100", True),
        ("nvfp4", "h200", True),
        ("fp8_current", "a100", True),
        ("fp8_block", "l40s", True),
        ("mxfp8", "b200", False),
        ("nvfp4", "b200", False),
        ("fp8_block", "h100", False),
        ("fp8_delayed", "l40s", False),
    ],
)
def test_what_the_hardware_cannot_run_is_refused(
    recipe: str, gpu: str, refused: bool
) -> None:
    model = nn.Linear(4, 4, device="meta")
    if not refused:
        assert di.plan(model, "cuda", recipe, gpu=gpu).final_bytes == 80
        return
    with pytest.raises(di.PlanError) as caught:
        di.plan(model, "cuda", recipe, gpu=gpu)
    assert f"the recipe `{recipe}` cannot run on {gpu.upper()}: `" in str(caught.value)
    assert "needs compute capability" in str(caught.value)


def test_what_fsdp2_refuses_is_named() -> None:
    class _Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    model = di.deferred_init(_Scalar)
    assert di.plan(model, "cpu").final_bytes == 4
    with pytest.raises(
        di.PlanError, match="no dimension to shard, which FSDP2 refuses"
    ):
        di.plan(model, "cpu", world_size=2)


def test_a_model_that_is_sharded_already_is_not_sharded_again() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        model = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
        with pytest.raises(di.PlanError, match="2 tensors are sharded already"):
            di.plan(model, "cpu", world_size=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "2"])
def test_a_world_size_is_a_positive_integer(world_size: object) -> None:
    with pytest.raises(ValueError, match="world_size must be a positive integer"):
        di.plan(nn.Linear(2, 2, device="meta"), "cpu", world_size=world_size)


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="no GPU is called 'h20'; did you mean `h2"):
        di.plan(nn.Linear(2, 2, device="meta"), "cuda", gpu="h20")
    assert find_gpu("H100") is GPUS["h100"]


def test_a_gpu_for_a_model_on_the_cpu_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="gpu='h100' needs device='cuda'"):
        di.plan(nn.Linear(2, 2, device="meta"), "cpu", gpu="h100")


def test_the_text_tells_fit_ranks_and_formats_within_100_columns() -> None:
    model = di.deferred_init(_Uneven)
    text = str(di.plan(model, "cuda", "bf16", gpu="h100", world_size=4))
    assert max(map(len, text.splitlines())) <= 100
    assert "each of 4 ranks keeps" in text
    assert "fits: the peak is 0.0 % of the 80.00 GB of one H100" in text
    assert "3 tensors of bfloat16: " in text


def test_the_plan_is_json() -> None:
    planned = di.plan(di.deferred_init(_Uneven), "cuda", gpu="b200", world_size=2)
    data = json.loads(json.dumps(planned.to_dict()))
    assert data["fits"] is True
    assert data["gpu"]["name"] == "b200"
    assert data["world_size"] == 2
    assert data["tensors"][0]["shape"] == [10, 6]


def test_a_recipe_that_quantizes_nothing_here_is_told() -> None:
    planned = di.plan(di.deferred_init(nn.Linear, 2, 2), "cuda", "fp8_current")
    assert planned.notes == (
        "the recipe `fp8_current` stores weights of Transformer Engine's modules "
        "quantized, and there is none among what is made",
    )
    assert di.plan(di.deferred_init(nn.Linear, 2, 2), "cuda", "bf16").notes == ()


def test_intermediate_results_of_a_replay_are_part_of_the_peak() -> None:
    class _Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(10))
            self.weight = nn.Parameter(torch.randn(1000) * 0.5 + 1.0)
            self.last = nn.Parameter(torch.zeros(10))

    planned = di.plan(di.deferred_init(_Scaled), "cuda")
    assert planned.final_bytes == 4 * 1020
    # `first`, and two of `randn`, its product and the sum.
    assert planned.forecast().peak_bytes == 4 * 2010


def test_scratch_of_an_early_tensor_is_not_added_to_what_comes_after() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(100, 1, bias=False), nn.Linear(300, 1))

    planned = di.plan(di.deferred_init(build), "cuda", "bf16")
    assert planned.peak_bytes == 2 * 401 + 4 * 300
    first = di.plan(
        di.deferred_init(
            lambda: nn.Sequential(nn.Linear(300, 1, bias=False), nn.Linear(290, 1))
        ),
        "cuda",
        "bf16",
    )
    assert first.peak_bytes == 2 * 591 + 4 * 290
