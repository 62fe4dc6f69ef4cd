"""Layers that the conversion to Transformer Engine leaves alone, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deferred_init.errors import PlanError
from deferred_init.integrations.conversion_report import Conversion
from deferred_init.integrations.te_conversion import convert_to_te
from tests.integrations.te_conversion_models import build, needs_te, te

pytestmark = pytest.mark.te


@needs_te
def test_a_layer_that_fp8_cannot_take_is_left_alone_and_its_siblings_are_not() -> None:
    model = build("meta")
    report = convert_to_te(model)
    assert type(model.odd) is nn.Linear
    assert [(item.fqn, item.reason) for item in report.left] == [
        ("odd", "(20, 16) are not multiples of 16, which the format needs")
    ]
    assert isinstance(model.up, te.Linear)
    assert "5 layers converted to Transformer Engine, 1 left alone" in str(report)


@needs_te
def test_patterns_include_and_exclude_layers_by_name() -> None:
    model = build("meta")
    report = convert_to_te(
        model, Conversion(include=("up", "down", "head"), exclude=("head",))
    )
    assert [item.fqn for item in report.converted] == ["up", "down"]
    reasons = {item.fqn: item.reason for item in report.left}
    assert reasons["head"] == "excluded"
    assert reasons["odd"] == reasons["norm"] == "not included"


@needs_te
def test_a_pattern_that_matches_nothing_is_refused_before_anything_changes() -> None:
    model = build("meta")
    with pytest.raises(PlanError) as caught:
        convert_to_te(model, Conversion(exclude=("lm_haed", "norm")))
    assert str(caught.value) == (
        "1 patterns match no module of Block: 'lm_haed'; `model.named_modules()` lists "
        "the names"
    )
    assert type(model.up) is nn.Linear


@needs_te
def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    model = nn.Sequential(gemma.GemmaRMSNorm(16), llama.LlamaRMSNorm(16, eps=1e-5))
    report = convert_to_te(model)
    assert isinstance(model[1], te.RMSNorm)
    assert model[1].eps == 1e-5
    assert [(item.fqn, item.reason) for item in report.left] == [
        ("0", "GemmaRMSNorm computes something else than a plain RMS norm")
    ]


@needs_te
def test_subclasses_and_norms_without_bias_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "special": Special(16, 16),
            "bare": nn.LayerNorm(16, bias=False),
            "fp64": nn.Linear(16, 16, dtype=torch.float64),
        }
    )
    reasons = {item.fqn: item.reason for item in convert_to_te(model).left}
    assert reasons == {
        "special": "a subclass of Linear, which may compute something else",
        "bare": "Transformer Engine's LayerNorm has a weight and a bias",
        "fp64": "its weight is torch.float64",
    }
