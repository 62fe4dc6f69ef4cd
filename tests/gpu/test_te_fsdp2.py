"""Transformer Engine under FSDP2 on one GPU, against eager models that are sharded.

One rank of NCCL: a shard is the whole, cut and gathered by the same code as on many.
What Transformer Engine cannot do with an eager model that is sharded, it must not do
here either, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_rank import one_rank, shard
from te_models import (
    BF16,
    RECIPES,
    WIDTH,
    build,
    forward_backward,
    module_model,
    ops_model,
    same,
)
from torch import Tensor, nn
from torch.optim import AdamW

import deferred_init as di
from deferred_init.te.probe import fp8_state_manager

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.te,
    pytest.mark.distributed,
    # TE warns at the line that called it, which is torch's, that a view is not used.
    pytest.mark.filterwarnings("ignore"),
]
SEQUENCES = ("TransformerLayer",)


def _stack(device: str) -> nn.Module:
    shared: dict[str, Any] = {"device": device, "params_dtype": BF16}
    return nn.Sequential(
        te.LayerNormMLP(WIDTH, 2 * WIDTH, **shared),
        te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **shared),
        te.Linear(WIDTH, WIDTH, bias=False, **shared),
    )


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "TransformerLayer": lambda device: module_model("TransformerLayer", device),
    "modules": _stack,
    "ops": lambda device: ops_model("nested", device),
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank("nccl"):
        yield


def _local(param: Any) -> Tensor:
    found: Tensor = param._local_tensor
    return found


def _different(one: nn.Module, other: nn.Module) -> list[str]:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(first) == list(second)
    return [
        name
        for name, param in first.items()
        if type(param) is not type(second[name])
        or param.requires_grad != second[name].requires_grad
        or not same(_local(param), _local(second[name]))
    ]


def _outcome(model: nn.Module, te_recipe: Any, *, sequence: bool) -> Any:
    """Take three steps of AdamW; return everything seen, or how TE refused."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    try:
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            seen.append(forward_backward(model, te_recipe, step, sequence=sequence))
            for param in model.parameters():
                assert param.grad is not None
                seen.append(_local(param.grad).detach().clone())
            optimizer.step()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return type(error).__name__, str(error).splitlines()[0]
    finally:
        fp8_state_manager().reset()
    return seen


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("order", ["shard first", "shard last"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_shards_train_as_those_of_a_model_built_on_the_gpu(
    kind: str,
    recipe: str,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    te_recipe = RECIPES[recipe]()
    model = build(lambda: MODELS[kind]("meta"), te_recipe)
    if order == "shard first":
        shard(model)
    held = dict(model.named_parameters())
    report = di.materialize(model, "cuda", seed=0, verify="full")
    assert all(param is held[name] for name, param in model.named_parameters())
    state = torch.cuda.get_rng_state()
    if order == "shard last":
        shard(model)

    torch.manual_seed(0)
    twin = build(lambda: MODELS[kind]("cuda"), te_recipe)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    shard(twin)
    assert not _different(model, twin)
    sequence = kind in SEQUENCES
    expected = _outcome(twin, te_recipe, sequence=sequence)
    kept = sorted({type(_local(p)).__name__ for p in twin.parameters()})
    how = "trains" if isinstance(expected, list) else f"eager fails: {expected}"
    record_property("eager", f"shards are {kept}; {how}; {report.notes}")
    outputs = _outcome(model, te_recipe, sequence=sequence)
    assert _equal(outputs, expected), (outputs, expected)
    if isinstance(expected, list):
        assert not _different(model, twin)
        assert not di.audit(model).findings


def test_values_from_before_quantization_are_kept_on_the_shard() -> None:
    recipe = di.Recipe(
        name="test",
        te_recipe=di.Recipe.load("fp8_current").te_recipe,
        quantize_weights=True,
        keep_high_precision_init=True,
    )
    model = _stack("meta")
    shard(model)
    di.materialize(model, "cuda", recipe, seed=0)
    torch.manual_seed(0)
    twin = _stack("cuda")
    local = _local(model[2].weight)
    assert torch.equal(local.get_high_precision_init_val(), twin[2].weight.cpu())
    local.clear_high_precision_init_val()
    assert not hasattr(local, "_high_precision_init_val")


def test_a_shard_of_current_scaling_knows_over_whom_its_maximum_is_taken() -> None:
    model = build(lambda: _stack("meta"), RECIPES["current"]())
    shard(model)
    di.materialize(model, "cuda", seed=0)
    weight: Any = model[2].weight
    local: Any = _local(weight)
    assert local.amax_reduction_group == weight.device_mesh.get_group()
    scale = local._scale_inv.clone()
    with torch.no_grad():
        local.copy_(local.dequantize() / 2)
    assert torch.allclose(local._scale_inv * 2, scale, rtol=1e-2)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_the_peak_is_the_shards_and_one_module_in_full(recipe: str) -> None:
    te_recipe = RECIPES[recipe]()
    width = 2048
    model = build(
        lambda: nn.Sequential(
            *(
                te.Linear(width, width, device="meta", params_dtype=BF16)
                for _ in range(4)
            )
        ),
        te_recipe,
    )
    shard(model)
    report = di.materialize(model, "cuda", seed=0)
    assert report.peak_bytes is not None
    extra = report.peak_bytes - report.final_bytes
    allowed = 2 * width * width * (1 if recipe == "bf16" else 2)
    assert extra <= 1.1 * allowed, (report.peak_bytes, report.final_bytes)
