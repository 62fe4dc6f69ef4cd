"""Releases up to 2.9 forget how to make a parameter that is registered again.

There `register_parameter` keeps a new record, of the defaults, each time: the second
`reset_parameters` draws everything from N(0, 0.023), quantizes nothing, and leaves the
named generators alone. `reset_parameters` itself registers, so the first is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from te_capabilities import CpuForCuda, te_needs
from te_kinds import MODULES
from torch import nn

import deferred_init as di
from deferred_init.te.on_meta import on_meta

pytestmark = pytest.mark.te
KINDS = [
    kind
    for kind in MODULES
    if not kind.startswith("ops.") and kind not in ("LayerNorm", "RMSNorm")
]


def _cases() -> list[Any]:
    """All kinds; those that make an offset ask for a release that fills it."""
    needs = te_needs("initialized softmax_offset")
    with_offset = ("DotProductAttention", "TransformerLayer")
    return [
        pytest.param(kind, marks=needs if kind in with_offset else ()) for kind in KINDS
    ]


@pytest.fixture(autouse=True)
def _up_to_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    base = pytest.importorskip("transformer_engine.pytorch.module.base")

    def register_parameter(self: Any, name: str, param: Any, **kwargs: Any) -> None:
        nn.Module.register_parameter(self, name, param)
        if hasattr(self, "param_init_meta"):
            self.param_init_meta[name] = base._ParameterInitMeta(**kwargs)

    monkeypatch.setattr(
        base.TransformerEngineBaseModule, "register_parameter", register_parameter
    )


def _records(model: nn.Module) -> dict[str, Any]:
    return {
        f"{prefix}.{name}": record
        for prefix, module in model.named_modules()
        for name, record in vars(module).get("param_init_meta", {}).items()
    }


def test_without_materialize_a_second_reset_draws_norms_too(te: Any) -> None:
    model = te.LayerNormLinear(8, 8, device="cpu")
    assert torch.equal(model.layer_norm_weight, torch.ones(8))
    model.reset_parameters()
    assert not torch.equal(model.layer_norm_weight, torch.ones(8))


@pytest.mark.parametrize("kind", _cases())
def test_values_are_eagers_and_the_records_stay(te: Any, kind: str) -> None:
    with on_meta():
        model = MODULES[kind](te)
    before = _records(model)
    held = [id(param) for param in model.parameters()]
    assert di.materialize(model, "cpu", seed=0, verify="full").ok
    state = torch.get_rng_state()
    assert [id(param) for param in model.parameters()] == held
    assert _records(model) == before
    torch.manual_seed(0)
    twin = _eager(te, kind)
    assert torch.equal(torch.get_rng_state(), state)
    others = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, others[name]), name


def _eager(te: Any, kind: str) -> nn.Module:
    """Build on the CPU, also classes that take no `device`."""
    with CpuForCuda():
        return MODULES[kind](te)


def test_a_parameter_that_was_registered_again_is_made_by_its_first_record(
    te: Any,
) -> None:
    """As `fully_shard` does, or a user who sets it."""
    with on_meta():
        model = te.LayerNormLinear(8, 8)
    _register_again(model)
    assert di.materialize(model, "cpu", seed=0).ok
    torch.manual_seed(0)
    twin = te.LayerNormLinear(8, 8, device="cpu")
    for name, param in twin.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], param), name


def test_a_parameter_whose_record_is_lost_is_refused_by_name(te: Any) -> None:
    model = te.LayerNormLinear(8, 8, device="meta")
    _register_again(model)
    with pytest.raises(di.PlanError, match=r"`layer_norm_weight` \(param"):
        di.plan(model, "cpu")


def _register_again(model: nn.Module) -> None:
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(torch.empty_like(param)))


def test_what_is_loaded_in_part_is_not_drawn_again(te: Any) -> None:
    model = te.LayerNormLinear(8, 8, device="meta")
    model.weight = loaded = nn.Parameter(torch.full((8, 8), 2.0))
    di.materialize(model, "cpu", seed=0)
    assert model.weight is loaded
    assert bool((loaded == 2).all())
    assert torch.equal(model.layer_norm_weight, torch.ones(8))
    assert torch.equal(model.bias, torch.zeros(8))
