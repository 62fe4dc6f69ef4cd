"""Reports about other systems on torch models: loading, ties and buffers.

The number in each id is the row of `reports.md`: a symptom that users of some other
system met. Here each of them is right, or refused by name before anything is done.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deferred_init as di
from tests.behaviour.equal_models import assert_same, on_meta
from tests.behaviour.report_rows import Rows, Tied, eager, made, refused

ROWS = Rows()
row = ROWS.add


class Rotary(nn.Module):
    def __init__(self, *, recipe: bool = True) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(4), persistent=False)
        self.register_buffer("position_ids", torch.empty(4, dtype=torch.int64))
        self.register_buffer("embed_scale", torch.empty(()), persistent=False)
        if recipe:
            self._fill()

    def _fill(self) -> None:
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.cos(torch.arange(4.0), out=self.cos)
        self.position_ids.copy_(torch.arange(4))
        self.embed_scale.fill_(8.0)


class Constant(nn.Module):
    """No way to know its buffer from the module that it left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)


@row(5, "state of a model on meta copied into a real one")
def _() -> None:
    source = made(lambda: nn.Linear(3, 3))
    target = nn.Linear(3, 3)
    target.load_state_dict(source.state_dict())
    assert_same(target, source)


@row(7, "a layer that cannot be made is named before anything is moved")
def _() -> None:
    refused(on_meta(Constant), r"`scale` \(buffer of `Constant`\)")


@row(11, "ties are told by identity, never by values on meta")
def _() -> None:
    model = on_meta(Tied)
    assert di.plan(model, "cpu").final_bytes == 7 * 4 * 4


@row(13, "a Parameter set after construction counts, and is refused by name")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    model.magnitude = nn.Parameter(torch.empty(3, device="meta"))
    refused(model, r"`magnitude` \(parameter of `Linear`\)")
    model.magnitude = nn.Parameter(torch.ones(3))
    assert di.materialize(model, "cpu", seed=6).ok
    assert model.magnitude.eq(1).all()


@row(14, "every tensor that is left is listed with its path")
def _() -> None:
    names = [f"{i}.scale" for i in range(3)]
    model = on_meta(lambda: nn.Sequential(Constant(), Constant(), Constant()))
    model.load_state_dict(
        {f"{i}.lin.weight": torch.ones(2, 2) for i in range(3)},
        strict=False,
        assign=True,
    )
    refused(model, "3 tensors have no initializer: `" + ".*".join(names))
    report = di.audit(model)
    assert all(any(name in str(f) for f in report.findings) for name in names)


@row(16, "embedding and head stay one object")
def _() -> None:
    model = made(Tied)
    assert model.wte.weight is model.head.weight
    assert_same(model, eager(Tied))


@row(17, "a tie made by assigning on meta is kept")
def _() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4)))
    model[1].weight = model[0].weight
    di.materialize(model, "cpu", seed=6)
    assert model[0].weight is model[1].weight


@row(20, "a tied weight gets its whole gradient")
def _() -> None:
    model, expected = made(Tied), eager(Tied)
    for one in (model, expected):
        one.head(one.wte(torch.tensor([2, 3]))).pow(2).sum().backward()
    assert torch.equal(model.wte.weight.grad, expected.wte.weight.grad)


@row(28, "equal shapes on meta are no tie")
def _() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert model[0].weight is not model[1].weight
    assert model[0].weight.data_ptr() != model[1].weight.data_ptr()
    assert not torch.equal(model[0].weight, model[1].weight)


@row(29, "two Parameters over one storage are found by the audit")
def _() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert di.audit(model).ok
    model[1].weight = nn.Parameter(model[0].weight.data)
    findings = " ".join(str(finding) for finding in di.audit(model).findings)
    assert "0.weight" in findings
    assert "1.weight" in findings


@row(32, "a buffer that nobody can rebuild is refused, never left as it is")
def _() -> None:
    model = on_meta(Constant)
    weights = {"lin.weight": torch.ones(2, 2), "lin.bias": torch.ones(2)}
    model.load_state_dict(weights, strict=False, assign=True)
    refused(model, r"^1 tensor has no initializer: `scale` \(buffer of `Constant`\)")


@row(34, "a cast changes each floating tensor alone and no other")
def _() -> None:
    model = made(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Rotary()),
        dtype=torch.bfloat16,
    )
    assert model[0].weight.dtype is torch.bfloat16
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert model[2].position_ids.dtype is torch.int64


@row(37, "buffers of a rotary embedding are computed, not zeroed")
def _() -> None:
    model = made(Rotary)
    assert torch.equal(model.cos, torch.arange(4.0).cos())


@row(38, "a buffer need not be persistent to survive")
def _() -> None:
    model = made(Rotary)
    assert "cos" in model._non_persistent_buffers_set
    assert list(model.state_dict()) == ["position_ids"]


@row(40, "a constant buffer keeps its value")
def _() -> None:
    assert made(Rotary).embed_scale == 8


@row(41, "integer buffers keep their dtype and values")
def _() -> None:
    model = made(Rotary)
    assert model.position_ids.tolist() == [0, 1, 2, 3]
    assert model.position_ids.dtype is torch.int64


@row(44, "a loaded counter of batches is kept")
def _() -> None:
    model = on_meta(lambda: nn.BatchNorm1d(3))
    model.load_state_dict(
        {"num_batches_tracked": torch.tensor(5)}, strict=False, assign=True
    )
    di.materialize(model, "cpu", seed=6)
    assert model.num_batches_tracked == 5
    assert model.running_var.eq(1).all()


@pytest.mark.parametrize("name", ROWS)
def test_a_report_about_another_system_is_right_or_refused_here(name: str) -> None:
    ROWS[name]()
