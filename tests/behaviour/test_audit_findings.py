"""Faults that need a model of their own, and what the audit says of them."""

from __future__ import annotations

import collections

import torch
from torch import nn

import deferred_init as di
from deferred_init.audit import run_audit, take_snapshot
from tests.behaviour.audit_situation import healthy_situation, new_parameter


def test_a_real_tensor_that_was_written_or_moved_is_found() -> None:
    for change in (
        lambda w: w.detach().zero_(),
        lambda w: setattr(w, "data", torch.zeros(2, 2)),
    ):
        model = nn.Linear(2, 2)
        expected = take_snapshot((model,))
        change(model.weight)
        found = run_audit((model,), expected=expected)
        assert [finding.code for finding in found] == ["touched-real-tensor"]


def test_a_dtype_that_was_asked_for_and_not_given_is_found() -> None:
    model = nn.Linear(2, 2, device="meta")
    expected = take_snapshot((model,))
    di.materialize(model, "cpu")
    found = run_audit(
        (model,), expected=expected, dtypes=[torch.bfloat16], dtype_forced=True
    )
    assert [finding.code for finding in found] == ["wrong-dtype"] * 2


def test_a_holder_that_lost_the_model_is_found() -> None:
    model = nn.Linear(2, 2)
    held = collections.OrderedDict(model.named_parameters())
    expected = take_snapshot((model,), holders=[held])
    held["weight"] = new_parameter(model.weight)
    found = run_audit((model,), holders=[held], expected=expected)
    assert [(f.code, f.fqn) for f in found] == [
        ("holder-stale", "holders[0]['weight']")
    ]


class Elsewhere(nn.Parameter):
    """A parameter that is on another device than the rest, as far as one can ask."""

    device = torch.device("cuda:0")


def test_parameters_of_one_module_on_two_devices_are_found() -> None:
    model = nn.Linear(2, 2)
    model.bias = Elsewhere(torch.zeros(2))
    found = run_audit((model,))
    assert [(f.code, f.fqn) for f in found] == [("mixed-devices", "bias")]


def test_state_and_gradients_on_another_device_are_found() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.zeros(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    model.weight = weight = Elsewhere(model.weight.detach())
    weight.grad = torch.zeros(2, 2)
    optimizer.param_groups[0]["params"][0] = weight
    optimizer.state[weight] = optimizer.state.pop(next(iter(optimizer.state)))
    found = run_audit((model,), optimizers=(optimizer,))
    assert [finding.code for finding in found] == [
        "optimizer-state-device",
        "optimizer-state-device",
        "gradient-device",
    ]


def test_messages_say_expected_found_and_what_to_do() -> None:
    situation = healthy_situation()
    situation.model.head.weight = nn.Parameter(situation.model.emb.weight.data)
    report = di.audit(situation.model)
    assert not report.ok
    assert str(report.findings[0]) == (
        "`head.weight` [duplicate-storage] expected memory of its own, or the very "
        "Parameter object `emb.weight`, found another Parameter over the same memory: "
        "gradients are split and both are updated; assign one to the other"
    )
