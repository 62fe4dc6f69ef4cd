"""Conversion of torch's layers to Transformer Engine's, without a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.integrations import te_conversion
from deferred_init.integrations.te_conversion import convert_to_te
from deferred_init.te.on_meta import te_on_meta
from tests.integrations.te_conversion_models import build, needs_te, te

pytestmark = pytest.mark.te


@needs_te
def test_what_builds_on_meta_is_set_up_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each layer it would take more than ten times as long as the layer itself."""
    entered = []

    def counting() -> Any:
        entered.append(1)
        return te_on_meta()

    monkeypatch.setattr(te_conversion, "te_on_meta", counting)
    assert len(convert_to_te(build("recorded")).converted) == 5
    assert len(entered) == 1


@needs_te
@pytest.mark.parametrize("kind", ["recorded", "meta", "real"])
def test_layers_change_class_and_parameters_stay_the_same_objects(kind: str) -> None:
    model = build(kind)
    model.down.weight.requires_grad_(False)
    model.up.weight.main_grad = "mine"
    model.up.note = "kept"
    model.eval()
    before = dict(model.named_parameters(remove_duplicate=False))
    report = convert_to_te(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert model.head.weight is model.embed.weight
    assert not model.down.weight.requires_grad
    assert model.up.weight.main_grad == "mine"
    assert model.up.note == "kept"
    assert not model.up.training
    assert [(item.fqn, item.after) for item in report.converted] == [
        ("norm", "te.LayerNorm"),
        ("rms", "te.RMSNorm"),
        ("up", "te.Linear"),
        ("down", "te.Linear"),
        ("head", "te.Linear"),
    ]
    assert isinstance(model.up, te.Linear)
    assert isinstance(model.norm, te.LayerNorm)
    assert isinstance(model.rms, te.RMSNorm)
    assert model.rms.eps == 1e-5


@needs_te
def test_a_converted_recording_has_the_values_of_eager_construction() -> None:
    model = build("recorded")
    convert_to_te(model)
    report = di.materialize(model, "cpu", seed=0)
    assert report.ok
    assert not report.assumptions
    eager = dict(build("real").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, eager[name]), name


@needs_te
def test_real_values_stay_where_they_are_and_the_audit_finds_nothing() -> None:
    model = build("real")
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    convert_to_te(model)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert di.audit(model).ok


@needs_te
def test_shared_layers_survive() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleList([shared, nn.ReLU(), shared])
    convert_to_te(model)
    assert isinstance(model[0], te.Linear)
    assert model[0] is model[2]


@needs_te
def test_hooks_of_every_kind_survive_and_their_handles_still_remove_them() -> None:
    called: list[str] = []

    def hook(name: str) -> Any:
        return lambda *_: called.append(name)

    old: Any = nn.LayerNorm(16)
    handles = [
        old.register_forward_hook(hook("forward")),
        old.register_forward_pre_hook(hook("forward_pre")),
        old.register_full_backward_hook(hook("backward")),
        old.register_full_backward_pre_hook(hook("backward_pre")),
        old.register_state_dict_pre_hook(hook("state_dict_pre")),
        old.register_state_dict_post_hook(hook("state_dict")),
        old.register_load_state_dict_pre_hook(hook("load_pre")),
        old.register_load_state_dict_post_hook(hook("load_post")),
    ]
    model = nn.Sequential(old)
    convert_to_te(model)
    new: Any = model[0]
    # What it computes is not the question, and needs a GPU.
    vars(new)["forward"] = lambda x: x * new.weight

    def use() -> None:
        x = torch.ones(2, 16, requires_grad=True)
        new(x).sum().backward()
        model.load_state_dict(model.state_dict())

    use()
    assert called == [
        *("forward_pre", "forward", "backward_pre", "backward"),
        *("state_dict_pre", "state_dict", "load_pre", "load_post"),
    ]
    for handle in handles:
        handle.remove()
    called.clear()
    use()
    assert called == []


@needs_te
def test_how_hooks_are_called_survives_as_well() -> None:
    seen: list[Any] = []
    old: Any = nn.LayerNorm(16)
    old.register_forward_pre_hook(lambda *args: seen.append(args[2]), with_kwargs=True)
    old.register_forward_hook(lambda *args: seen.append(args[2]), with_kwargs=True)
    old.register_forward_hook(lambda *_: seen.append("always"), always_call=True)
    model = nn.Sequential(old)
    convert_to_te(model)
    new: Any = model[0]
    # What it computes is not the question, and needs a GPU.
    vars(new)["forward"] = lambda x, by: x / by
    new(6, by=2)
    assert seen == [{"by": 2}, {"by": 2}, "always"]
    seen.clear()
    with pytest.raises(ZeroDivisionError):
        new(6, by=0)
    assert seen == [{"by": 0}, "always"]


@needs_te
def test_a_loading_hook_is_handed_the_converted_layer() -> None:
    seen: list[Any] = []
    old: Any = nn.Linear(16, 16)
    old.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    model = nn.Sequential(old)
    del old
    convert_to_te(model)
    model.load_state_dict(model.state_dict(), strict=False)
    assert seen == [model[0]]


@needs_te
def test_layers_on_meta_without_a_recording_are_named() -> None:
    report = convert_to_te(build("meta"))
    assert report.unrecorded == ("norm", "rms", "up", "down", "head")
    assert "5 layers are on meta without a recording" in str(report)
    assert convert_to_te(build("recorded")).unrecorded == ()
    assert convert_to_te(build("real")).unrecorded == ()


@needs_te
def test_accelerate_prepares_a_model_that_computes_with_the_recipe() -> None:
    accelerate = pytest.importorskip("accelerate")
    from deferred_init.integrations.accelerate_plugin import (
        Accelerator,
        DeferredInitPlugin,
    )

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = DeferredInitPlugin(recipe="fp8_current", seed=0)
    accelerator = Accelerator(cpu=True, deferred_init=plugin)
    model = build("recorded")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model.up, te.Linear)
    assert accelerator.fp8_backend == "NO"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in model.parameters()]
    eager = dict(build("real").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, eager[name]), name
    forward = model.forward
    assert accelerator.prepare(model) is model
    assert model.forward == forward


@needs_te
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TE's autocast asks CUDA")
def test_the_forward_runs_inside_the_recipe_while_training() -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    from deferred_init.integrations.te_forward import compute_with

    seen: list[Any] = []

    class Probe(nn.Module):
        def forward(self, x: int) -> int:
            state = te.quantization.FP8GlobalStateManager
            seen.append(state.is_fp8_enabled() and state.get_fp8_recipe())
            return x

    probe, te_recipe = Probe(), Float8CurrentScaling()
    compute_with(probe, Float8CurrentScaling())
    compute_with(probe, te_recipe)
    assert probe(3) == 3
    probe.eval()
    probe(3)
    assert seen == [te_recipe, False]


def test_without_transformer_engine_the_error_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['transformer_engine'] = None\n"
        "import torch\n"
        "from deferred_init.integrations.te_conversion import convert_to_te\n"
        "try:\n    convert_to_te(torch.nn.Sequential(torch.nn.Linear(16, 16)))\n"
        "except Exception as error:\n    sys.stdout.write(str(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(
        "conversion to Transformer Engine needs transformer_engine, which could not be "
        "imported"
    )
    assert "`convert=False`" in done.stdout
