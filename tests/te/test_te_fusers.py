"""Fusers, the TE detectors of the audit, the lazy trigger and the doctor."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from te_capabilities import te_needs
from torch import nn

import deferred_init as di
from deferred_init.lazy import materialize_on_first_forward

pytestmark = pytest.mark.te


def _ops(te: Any, device: str = "meta") -> nn.Module:
    return te.ops.Sequential(
        te.ops.BasicLinear(4, 4, device=device),
        te.ops.Bias(4, device=device),
        te.ops.Linear(4, 4, device=device),
    )


def _lists_are_right(fuser: Any) -> bool:
    actual = [param for op in fuser._basic_ops for param in op.parameters()]
    cached = [param for params in fuser._basic_op_params for param in params]
    flat = fuser._flat_basic_op_params
    counts = [len(list(op.parameters())) for op in fuser._basic_ops]
    return [id(p) for p in flat] == [id(p) for p in actual] == [
        id(p) for p in cached
    ] and fuser._basic_op_num_params == counts


def _codes(model: Any, **options: Any) -> set[str]:
    return {finding.code for finding in di.audit(model, **options).findings}


def test_a_sequential_builds_its_fusers_anew(te: Any) -> None:
    model = _ops(te)
    model._module_groups = model._make_module_groups(model._modules.values())
    fuser = model._module_groups[0]
    di.materialize(model, "cpu", seed=0)
    assert model._module_groups is None
    assert _lists_are_right(fuser)
    assert not any(param.is_meta for param in fuser._flat_basic_op_params)


class _Slotted:
    """Somebody's object that has no `__dict__`."""

    __slots__ = ("__weakref__", "fuser", "unset")

    def __init__(self, fuser: Any) -> None:
        self.fuser = fuser


@te_needs("ops.GroupedLinear")
@pytest.mark.parametrize(
    "where",
    [
        *("attribute", "list", "dict", "deque", "slots"),
        *("closure", "default", "wrapped", "partial"),
    ],
)
def test_fusers_that_somebody_holds_are_put_right(te: Any, where: str) -> None:
    model = te.ops.Sequential(
        te.ops.GroupedLinear(2, 4, 4, device="meta", single_grouped_weight=True)
    )
    fuser = te.ops.fuser.OperationFuser(list(model))
    fuser.recipe_type = type(None)
    fuser._fused_ops_cache["key"] = ([], [])
    holders: list[Any] = []
    if where == "attribute":
        model.__dict__["mine"] = fuser
    elif where == "list":
        holders = [[fuser]]
    elif where == "dict":
        holders = [{"fuser": fuser}]
    elif where == "deque":
        holders = [collections.deque([fuser])]
    elif where == "slots":
        holders = [_Slotted(fuser)]
    elif where == "closure":
        holders = [lambda x: fuser(x)]
    elif where == "default":
        holders = [lambda x, mine=fuser: mine(x)]
    elif where == "wrapped":
        wrapper = functools.wraps(lambda x: fuser(x))(lambda x: None)
        holders = [wrapper]
    else:
        holders = [functools.partial(fuser)]
    assert di.materialize(model, "cpu", seed=0, holders=holders).ok
    assert _lists_are_right(fuser)
    assert fuser.recipe_type is None
    assert fuser._fused_ops_cache == {}


def test_a_fuser_that_tracks_versions_comes_out_the_same(te: Any) -> None:
    class Tracking(te.ops.fuser.OperationFuser):  # type: ignore[misc,name-defined]
        """As in pull request 3327: the lists are made when a version changes."""

        def __init__(self, ops: Any) -> None:
            super().__init__(ops)
            self._param_version = 5

        def _cache_parameters(self) -> None:
            self._basic_op_params = [list(op.parameters()) for op in self._basic_ops]

    model = _ops(te)
    fuser = Tracking(list(model))
    di.materialize(model, "cpu", seed=0, holders=[fuser])
    assert fuser._param_version == -1
    assert _lists_are_right(fuser)
    torch.manual_seed(0)
    twin = _ops(te, "cpu")
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("subclass", [False, True])
def test_what_a_failed_first_step_left_in_a_fuser_is_taken_back(
    te: Any, subclass: bool
) -> None:
    class Own(te.ops.fuser.OperationFuser):  # type: ignore[misc,name-defined]
        pass

    model = _ops(te)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model[0].weight
    model._module_groups = model._make_module_groups(model._modules.values())
    if subclass:
        model._module_groups = [Own(list(model))]
    made = nn.Parameter(torch.ones(4, 4))
    model[0].weight = made  # what the hook does inside the first forward
    later = torch.optim.SGD([made], lr=0.1)
    report = di.materialize(model, "cpu", seed=0, optimizers=[optimizer, later])
    assert report.ok
    assert model[0].weight is old
    assert torch.equal(old, torch.ones(4, 4))
    assert later.param_groups[0]["params"][0] is old


def test_weight_workspaces_are_dropped(te: Any) -> None:
    model = te.Linear(4, 4, device="meta")
    workspaces = model._fp8_workspaces
    workspaces["weight"] = torch.zeros(1)
    di.materialize(model, "cpu", seed=0)
    assert model._fp8_workspaces == {}


def test_the_audit_finds_a_fuser_built_on_old_parameters(te: Any) -> None:
    model = _ops(te, "cpu")
    model._module_groups = model._make_module_groups(model._modules.values())
    assert _codes(model) == set()
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    assert _codes(model) == {"te-fuser-stale"}
    finding = di.audit(model).findings[0]
    assert "set `_module_groups = None`" in finding.message


def test_the_audit_finds_a_stale_fuser_in_a_closure(te: Any) -> None:
    model = _ops(te, "cpu")
    fuser = te.ops.fuser.OperationFuser(list(model))
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    assert "te-fuser-stale" in _codes(model, holders=[lambda x: fuser(x)])


def test_the_audit_finds_an_alias_that_is_not_its_op_s_parameter(te: Any) -> None:
    model = te.ops.Linear(4, 4, device="cpu")
    assert _codes(model) == set()
    model._parameters["weight"] = nn.Parameter(torch.ones(4, 4))
    assert "te-alias-broken" in _codes(model)


def test_the_audit_finds_delayed_scaling_buffers_registered_twice(te: Any) -> None:
    from deferred_init.te.probe import fp8_state_manager

    manager = fp8_state_manager()
    state = getattr(manager, "quantization_state", manager)
    history = torch.zeros(4)
    state.global_amax_buffer["forward_1"] = [history, torch.zeros(4)]
    model = _ops(te, "cpu")
    try:
        assert _codes(model) == set()
        state.global_amax_buffer["forward_1"].append(history)
        assert _codes(model) == {"te-amax-registered-twice"}
    finally:
        state.global_amax_buffer.clear()


def test_a_model_is_made_by_its_first_forward_and_only_then(te: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    handle = materialize_on_first_forward(model, "cpu", seed=0)
    assert model[0].weight.is_meta
    out = model(torch.ones(1, 4))
    assert handle.report is not None
    assert not handle.pending
    report = handle.report
    assert torch.equal(model(torch.ones(1, 4)), out)
    assert handle.report is report
    torch.manual_seed(0)
    assert torch.equal(model[0].weight, nn.Linear(4, 4).weight)


def test_a_first_forward_that_fails_tries_again(te: Any) -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    model = Strange()
    handle = materialize_on_first_forward(model, "cpu")
    with pytest.raises(di.PlanError):
        model(torch.ones(2))
    assert handle.pending
    model.weight = nn.Parameter(torch.ones(2))
    assert torch.equal(model(torch.ones(2)), torch.ones(2))
    assert not handle.pending


def test_a_lazy_materialization_can_be_called_off(te: Any) -> None:
    model = nn.Linear(2, 2, device="meta")
    handle = materialize_on_first_forward(model, "cpu")
    handle.remove()
    assert not handle.pending
    assert model(torch.ones(1, 2, device="meta")).is_meta


def test_the_doctor_reports_versions_capabilities_and_known_bugs(te: Any) -> None:
    from deferred_init.te.doctor import WORKED_AROUND, report

    found = report() if not torch.cuda.is_available() else None
    if found is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            found = report()
    assert found["version"][0].isdigit()
    assert found["has"]["op_hook"] is True
    assert "Float8CurrentScaling" in found["recipes"]
    assert found["worked around"] == list(WORKED_AROUND)
