"""The audit is silent on healthy models, with and without a snapshot."""

from __future__ import annotations

import copy

import pytest
import torch

from deferred_init.audit import run_audit, take_snapshot
from tests.behaviour.hf_models import builder
from tests.unit.healthy_models import HEALTHY, Case

HF = ("gpt2", "bert", "t5", "llama", "wav2vec2")


def _codes(case: Case, verify: str, *, snapshot: bool) -> list[str]:
    expected = None
    if snapshot:
        expected = take_snapshot(
            case.models, optimizers=case.optimizers, holders=case.holders
        )
    found = run_audit(
        case.models,
        optimizers=case.optimizers,
        holders=case.holders,
        verify=verify,
        expected=expected,
        device=torch.device("cpu") if snapshot else None,
    )
    return [str(finding) for finding in found]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("verify", ["fast", "full"])
@pytest.mark.parametrize("snapshot", [False, True], ids=["alone", "snapshot"])
def test_nothing_is_found_in_a_healthy_model(
    name: str, verify: str, snapshot: bool
) -> None:
    assert _codes(HEALTHY[name](), verify, snapshot=snapshot) == []


@pytest.mark.hf
@pytest.mark.parametrize("name", HF)
def test_nothing_is_found_in_a_hugging_face_model(name: str) -> None:
    model = builder(name)()
    optimizer = torch.optim.AdamW(model.parameters())
    case = Case(model, copy.deepcopy(model), optimizers=[optimizer])
    for snapshot in (False, True):
        assert _codes(case, "full", snapshot=snapshot) == []


def test_looking_changes_nothing() -> None:
    case = HEALTHY["hooks of each kind"]()
    (model,) = case.models
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    hooks = list(model.weight._backward_hooks.items())
    state = torch.get_rng_state()
    _codes(case, "full", snapshot=True)
    after = {name: (id(p), p._version) for name, p in model.named_parameters()}
    assert after == before
    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert list(model.weight._backward_hooks.items()) == hooks
    assert torch.equal(torch.get_rng_state(), state)
