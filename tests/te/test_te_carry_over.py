"""What `reset_parameters` and the hooks of Transformer Engine lose stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from te_kinds import MODULES, kinds
from torch import nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta
from tests.trackers import Tracker

pytestmark = pytest.mark.te


def _deferred(te: Any, kind: str) -> nn.Module:
    with on_meta():
        model = MODULES[kind](te)
    assert all(param.is_meta for param in model.parameters())
    return model


@pytest.mark.parametrize("kind", kinds())
def test_every_parameter_keeps_what_it_carried(te: Any, kind: str) -> None:
    model = _deferred(te, kind)
    params = dict(model.named_parameters())
    assert params
    calls: list[str] = []
    for number, (name, param) in enumerate(params.items()):
        param.mine = number
        param.main_grad = torch.full(param.shape, 0.5)
        param.register_post_accumulate_grad_hook(lambda p, n=name: calls.append(n))
        param.register_hook(lambda grad: grad * 2)
        param.requires_grad_(number % 2 == 0)
    assert di.materialize(model, "cpu", seed=0).ok
    after = dict(model.named_parameters())
    assert list(after) == list(params)
    for number, (name, param) in enumerate(params.items()):
        assert after[name] is param, name
        assert not param.is_meta
        assert param.requires_grad is (number % 2 == 0), name
        assert (param.mine, float(param.main_grad.sum())) == (
            number,
            0.5 * param.numel(),
        )
    trained = [name for name, param in params.items() if param.requires_grad]
    sum(params[name].sum() for name in trained).backward()
    assert sorted(calls) == sorted(trained)
    assert all(bool((params[name].grad == 2).all()) for name in trained)


@pytest.mark.parametrize("kind", kinds())
def test_what_has_memory_is_never_made_again(
    te: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `reset_parameters` draws again, or fails."""
    model = _deferred(te, kind)
    di.materialize(model, "cpu", seed=0)
    params = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        for method in ("reset_parameters", "pre_first_fuser_forward"):
            if method in vars(type(module)):
                monkeypatch.setattr(module, method, _must_not_run)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert di.materialize(model, "cpu").ok
    assert torch.equal(torch.get_rng_state(), state)
    for name, param in model.named_parameters():
        assert param is params[name][0]
        assert torch.equal(param, params[name][1])


def _must_not_run(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("initialized again")


@pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"]
)
def test_every_module_that_delays_weight_gradients_keeps_its_marks(
    te: Any, kind: str
) -> None:
    def make(device: str) -> nn.Module:
        sizes = (2, 8, 8) if kind == "GroupedLinear" else (8, 8)
        found: nn.Module = getattr(te, kind)(
            *sizes, device=device, delay_wgrad_compute=True
        )
        return found

    model, twin = make("meta"), make("cpu")
    di.materialize(model, "cpu", seed=0)
    marks = [
        {name for name, p in each.named_parameters() if _is_marked(p)}
        for each in (model, twin)
    ]
    assert marks[0] == marks[1] != set()


def _is_marked(param: Any) -> bool:
    return bool(getattr(param, "skip_backward_post_hook", False))


@te_needs("records of registered parameters")
def test_dtypes_are_kept_per_parameter(te: Any) -> None:
    model = te.LayerNormLinear(8, 8, device="meta", params_dtype=torch.bfloat16)
    norm = nn.Parameter(model.layer_norm_weight.detach().float())
    model.layer_norm_weight = norm
    di.materialize(model, "cpu", seed=0)
    torch.manual_seed(0)
    twin = te.LayerNormLinear(8, 8, device="cpu", params_dtype=torch.bfloat16)
    assert model.layer_norm_weight is norm
    assert norm.dtype == torch.float32
    assert torch.equal(norm, torch.ones(8))
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, twin.weight)


def test_the_placeholder_of_a_missing_bias_gets_memory_too(te: Any) -> None:
    model = te.Linear(8, 8, bias=False, device="meta")
    assert model.bias.is_meta
    assert di.materialize(model, "cpu", seed=0).ok
    assert (model.bias.device.type, model.bias.numel()) == ("cpu", 0)


@te_needs("workspace of products")
def test_the_workspace_of_products_is_asked_for_once_the_weight_has_memory(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First asked for inside a captured graph, it would be freed with the graph."""
    seen: list[str] = []
    monkeypatch.setattr(
        te.Linear,
        "_prealloc_cublas_workspace",
        lambda self: seen.append(self.weight.device.type),
    )
    model = te.Linear(8, 8, device="meta")
    assert set(seen) <= {"meta"}
    di.materialize(model, "cpu", seed=0)
    assert seen[-1] == "cpu"


def test_what_fsdp2_made_a_module_believe_is_forgotten(te: Any) -> None:
    model = te.Linear(8, 8, device="meta")
    model._is_fsdp2 = False  # read before `fully_shard` was called
    di.materialize(model, "cpu", seed=0)
    assert "_is_fsdp2" not in vars(model)


def _tracked(te: Any, device: str, tracker: Tracker) -> nn.Module:
    here: dict[str, Any] = {"device": device}
    return nn.Sequential(
        te.Linear(8, 8, get_rng_state_tracker=lambda: tracker, **here),
        te.Linear(
            8,
            8,
            get_rng_state_tracker=lambda: tracker,
            rng_tracker_name="experts",
            **here,
        ),
        te.ops.BasicLinear(8, 8, rng_state_tracker_function=lambda: tracker, **here),
        te.Linear(8, 8, **here),
    )


def test_weights_come_from_the_named_generators_of_a_tracker(te: Any) -> None:
    seeds = {"model-parallel-rng": 7, "experts": 9}
    trackers = Tracker(**seeds), Tracker(**seeds)
    model = _tracked(te, "meta", trackers[0])
    di.materialize(model, "cpu", seed=0)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin = _tracked(te, "cpu", trackers[1])
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    for name in seeds:
        assert torch.equal(trackers[0].states[name], trackers[1].states[name])


def test_a_tracker_goes_back_if_a_later_module_fails(te: Any) -> None:
    tracker = Tracker(**{"model-parallel-rng": 7})  # and none named "experts"
    before = tracker.states["model-parallel-rng"].clone()
    model = _tracked(te, "meta", tracker)
    with pytest.raises(di.MaterializeError, match=r"step 2 of 4.*KeyError"):
        di.materialize(model, "cpu", seed=0)
    assert torch.equal(tracker.states["model-parallel-rng"], before)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_a_tracker_that_parameters_alone_know_goes_back_too(te: Any, kind: str) -> None:
    tracker = Tracker(**{"model-parallel-rng": 7})
    before = tracker.states["model-parallel-rng"].clone()
    kwargs: dict[str, Any] = {
        "get_rng_state_tracker": lambda: tracker,
        "device": "meta",
    }
    failing = te.Linear(8, 8, rng_tracker_name="experts", **kwargs)
    model = nn.Sequential(getattr(te, kind)(8, 16, **kwargs), failing)
    with pytest.raises(di.MaterializeError, match=r"step 2 of 2.*KeyError"):
        di.materialize(model, "cpu", seed=0)
    assert torch.equal(tracker.states["model-parallel-rng"], before)


class _Capturable(torch.optim.AdamW):
    """Moves its learning rate to the parameters, as Transformer Engine's does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=torch.tensor(lr), capturable=True)
        for group in self.param_groups:
            group["lr"] = group["lr"].to(group["params"][0].device)


def test_a_learning_rate_that_went_to_meta_gets_its_value_back(te: Any) -> None:
    model = te.Linear(8, 8, device="meta")
    optimizer = _Capturable(model.parameters(), 0.25)
    assert optimizer.param_groups[0]["lr"].is_meta
    report = di.materialize(model, "cpu", seed=0, optimizers=[optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert any("_Capturable's 'lr', of its defaults" in text for text in report.notes)


def test_learning_rates_of_several_groups_that_went_to_meta_are_refused(
    te: Any,
) -> None:
    model = te.Linear(8, 8, device="meta")
    optimizer = _Capturable([{"params": [p]} for p in model.parameters()], 0.25)
    with pytest.raises(di.PlanError, match=r"2 options without memory \(\['lr', 'lr'"):
        di.materialize(model, "cpu", optimizers=[optimizer])
    di.materialize(model, "cpu", seed=0)
    codes = {f.code for f in di.audit(model, optimizers=[optimizer]).findings}
    assert codes == {"deferred-in-optimizer"}
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.25)
    assert di.audit(model, optimizers=[optimizer]).ok


@pytest.mark.parametrize("rng", ["by_name", "eager"])
@pytest.mark.parametrize("parallel_mode", ["column", None])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_parts_of_a_weight_drawn_by_name_are_named(
    te: Any, rng: str, parallel_mode: str | None, tp_size: int
) -> None:
    layer = te.Linear(
        8, 16, parallel_mode=parallel_mode, tp_size=tp_size, device="meta"
    )
    report = di.materialize(layer, "cpu", seed=1, rng=rng)
    said = [text for text in report.assumptions if "the same part" in text]
    alike = rng == "by_name" and parallel_mode == "column" and tp_size == 2
    assert len(said) == alike
