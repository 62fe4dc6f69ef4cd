"""Releases of Transformer Engine other than the installed one, piece by piece.

Each test takes from the installed release what another one lacks, or renames what
another one calls differently, and expects the same result.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import nn

import deferred_init as di
from deferred_init.handlers.ecosystems import load_handlers
from deferred_init.te import probe

pytestmark = pytest.mark.te


@pytest.fixture(autouse=True)
def _look_again() -> Iterator[None]:
    probe.capabilities.cache_clear()
    yield
    probe.capabilities.cache_clear()


def _make(te: Any, device: str) -> nn.Module:
    return nn.Sequential(
        te.Linear(8, 8, device=device),
        te.ops.Sequential(
            te.ops.LayerNorm(8, device=device),
            te.ops.Linear(8, 8, device=device),
            te.ops.Bias(8, device=device),
        ),
        te.RMSNorm(8, device=device),
    )


def _assert_as_eager(te: Any) -> None:
    model = _make(te, "meta")
    held = list(model.parameters())
    report = di.materialize(model, "cpu", seed=0, verify="full")
    assert report.ok
    torch.manual_seed(0)
    twin = _make(te, "cpu")
    for param, mine, other in zip(
        held, model.parameters(), twin.parameters(), strict=True
    ):
        assert param is mine
        assert torch.equal(mine, other)


def test_an_unknown_newer_release_is_tried_and_audited(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformer_engine

    monkeypatch.setattr(transformer_engine, "__version__", "99.1.0")
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "99.1.0" if "transformer" in name else version(name),
    )
    _assert_as_eager(te)
    from deferred_init.te.doctor import report

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report()["version"] == "99.1.0"


def test_what_a_newer_release_does_otherwise_is_found_by_the_audit(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fused op whose alias is not its basic op's parameter."""

    class Newer(te.ops.Linear):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._parameters["weight"] = nn.Parameter(torch.ones(8, 8))

    model = te.ops.Sequential(Newer(8, 8, device="cpu"))
    assert {f.code for f in di.audit(model).findings} == {"te-alias-broken"}


@pytest.mark.parametrize("renamed", [None, "pre_first_forward", "prepare_parameters"])
def test_ops_whose_hook_has_another_name_are_made_by_their_reset_method(
    te: Any, monkeypatch: pytest.MonkeyPatch, renamed: str | None
) -> None:
    from deferred_init.handlers.te_ops import _method

    for cls in _op_classes(te):
        hook = vars(cls).get("pre_first_fuser_forward")
        if hook is not None:
            if renamed:
                monkeypatch.setattr(cls, renamed, hook, raising=False)
            monkeypatch.delattr(cls, "pre_first_fuser_forward")
    assert not probe.capabilities().op_hook
    op = te.ops.BasicLinear(8, 8, device="meta")
    assert _method(op, torch.device("cuda", 0)) == "reset_parameters"
    _assert_as_eager(te)


def _op_classes(te: Any) -> list[Any]:
    found, pending = [], [te.ops.op.FusibleOperation]
    while pending:
        cls = pending.pop()
        found.append(cls)
        pending += cls.__subclasses__()
    return found


@te_needs("ops built without recipe state")
def test_ops_without_recipe_state_are_made_in_high_precision_and_refused_in_fp8(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in _op_classes(te):
        if "reset_recipe_state" in vars(cls):
            monkeypatch.delattr(cls, "reset_recipe_state")
    assert not probe.capabilities().recipe_state_hook
    _assert_as_eager(te)
    op = te.ops.BasicLinear(32, 32, device="meta")
    with pytest.raises(di.PlanError, match="have no `reset_recipe_state`"):
        di.plan(op, "cuda", "fp8_current", gpu="h200")


@pytest.mark.parametrize(
    "lists",
    [
        ("_flat_basic_op_params", "_fused_ops_cache"),
        ("_basic_op_params", "_flat_basic_op_params", "_fused_ops_cache"),
        ("_fused_ops_cache", "backward_override", "_last_amax_history_len"),
    ],
)
def test_a_fuser_without_some_of_its_lists_is_put_right(
    te: Any, lists: tuple[str, ...]
) -> None:
    ops = te.ops.Sequential(
        te.ops.BasicLinear(8, 8, device="meta"), te.ops.Bias(8, device="meta")
    )
    fuser = te.ops.fuser.OperationFuser(list(ops))
    for name in lists:
        vars(fuser).pop(name, None)  # an older release may lack it already
    fuser._basic_op_num_params = [7, 7]
    assert di.materialize(ops, "cpu", seed=0, holders=[fuser]).ok
    assert not any(hasattr(fuser, name) for name in lists)
    assert fuser._basic_op_num_params == [1, 1]


def test_a_sequential_without_a_cache_of_groups_is_made(
    te: Any,
) -> None:
    """As one that flattens its ops on every call."""

    class Uncached(te.ops.Sequential):  # type: ignore[misc,name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            if name != "_module_groups":
                super().__setattr__(name, value)

    model = Uncached.__new__(Uncached)
    nn.Module.__init__(model)
    nn.Module.add_module(model, "0", te.ops.BasicLinear(8, 8, device="meta"))
    vars(model).pop("_module_groups", None)
    assert di.materialize(model, "cpu", seed=0).ok
    assert "_module_groups" not in vars(model)


def test_a_release_without_grouped_ops_is_served(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(te.ops, "GroupedLinear", raising=False)
    load_handlers()
    found = probe.capabilities()
    assert (found.grouped_op, found.grouped_tensor) == (False, False)
    _assert_as_eager(te)


def test_linear_ops_without_aliases_are_served(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.7 `ops.Linear` registered nothing itself."""
    model, twin = _make(te, "meta"), _make(te, "cpu")
    for each in (model, twin):
        each[1][1]._parameters.clear()
    assert di.materialize(model, "cpu", seed=0).ok
    torch.manual_seed(0)
    for mine, other in zip(
        model.parameters(), _make(te, "cpu").parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    assert len(list(model.parameters())) == len(list(twin.parameters()))


def test_the_old_names_of_contexts_and_places_are_found(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    monkeypatch.delattr(te, "quantized_model_init")
    monkeypatch.delattr(te, "autocast")
    found = probe.capabilities()
    assert (found.quantized_model_init, found.autocast) == (False, False)
    with (
        pytest.warns(DeprecationWarning, match="fp8_model_init"),
        di.on_meta(),
        probe.quantized_init(Float8CurrentScaling()),
    ):
        model = te.Linear(32, 32)
    assert model.primary_weights_in_fp8
    there = importlib.import_module

    def old_place(name: str, *args: Any) -> Any:
        if name == "transformer_engine.pytorch.quantization":
            raise ModuleNotFoundError(name)
        return there(name, *args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this release still has the old place
        there("transformer_engine.pytorch.fp8")
    expected = probe.fp8_state_manager()
    monkeypatch.setattr(importlib, "import_module", old_place)
    assert probe.fp8_state_manager() is expected


def test_lists_of_delayed_scaling_are_read_in_either_place(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.15 they were attributes of the class."""
    model = _make(te, "cpu")
    manager = probe.fp8_state_manager()
    history = torch.zeros(4)
    monkeypatch.delattr(manager, "quantization_state", raising=False)
    monkeypatch.setattr(
        manager, "global_amax_buffer", {"forward_1": [history, history]}, raising=False
    )
    assert not probe.capabilities().extra_state_gate
    codes = {finding.code for finding in di.audit(model).findings}
    assert codes == {"te-amax-registered-twice"}


def test_quantized_tensors_are_told_wherever_their_base_class_lives() -> None:
    """Their module has moved (2.9)."""
    base = type(
        "QuantizedTensor",
        (torch.Tensor,),
        {"__module__": "transformer_engine.pytorch.tensor.quantized_tensor"},
    )
    assert probe.is_quantized(torch.ones(1).as_subclass(base))
    assert not probe.is_quantized(torch.ones(1))
