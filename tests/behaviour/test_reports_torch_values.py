"""Reports about other systems on torch models: values, and what carries them.

The number in each id is the row of `reports.md`: a symptom that users of some other
system met. Here each of them is right, or refused by name before anything is done.
"""

from __future__ import annotations

import copy
import re
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import deferred_init as di
from tests.behaviour.equal_models import assert_same, on_meta
from tests.behaviour.report_rows import Rows, Tied, eager, made, refused

ROWS = Rows()
row = ROWS.add


class LayerScale(nn.Module):
    def __init__(self, init_values: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(4))


@row(46, "attention has no public reset method")
def _() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))

    assert_same(made(build), eager(build))


@row(49, "a scale computed in the constructor is refused, not zero")
def _() -> None:
    refused(on_meta(LayerScale), r"`gamma` \(parameter of `LayerScale`\)")
    model = di.deferred_init(LayerScale)
    di.materialize(model, "cpu")
    assert model.gamma.eq(1e-5).all()


@row(50, "a reset method that the constructor does not call is reported, or not used")
def _() -> None:
    class Reset(LayerScale):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.gamma)

    report = di.materialize(on_meta(Reset), "cpu")
    assert any("though it does not call it" in text for text in report.assumptions)
    model = di.deferred_init(Reset)
    assert di.materialize(model, "cpu").ok
    assert torch.equal(model.gamma, Reset().gamma)


@row(53, "values, not only statistics, are those of eager construction")
def _() -> None:
    def build() -> nn.Module:
        return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    assert_same(made(build), eager(build))


@row(55, "nested units are initialized once each")
def _() -> None:
    calls: list[int] = []

    class Unit(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))
            self.inner = inner

        def reset_parameters(self) -> None:
            if self.weight.device.type != "meta":
                calls.append(id(self))
            nn.init.normal_(self.weight)

    made(lambda: Unit(Unit(Unit())))
    assert len(calls) == len(set(calls)) == 3


@row(62, "torch.empty in a constructor never becomes a value")
def _() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    refused(on_meta(Empty), r"`weight` \(parameter of `Empty`\)")


@row(64, "the dtype is the one at the time of materialization")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3)).half()
    di.materialize(model, "cpu", seed=6)
    assert model.weight.dtype is torch.float16


@row(67, "a padding row that is not zero is found")
def _() -> None:
    assert made(Tied).wte.weight[1].eq(0).all()
    model = made(lambda: nn.Embedding(4, 3, padding_idx=1))
    assert di.audit(model, verify="full").findings == ()
    with torch.no_grad():
        model.weight.normal_()
    (finding,) = di.audit(model, verify="full").findings
    assert "`weight` [padding-row] expected row 1" in str(finding)


@row(77, "Python attributes of Parameters survive")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    model.weight.tensor_model_parallel = True
    di.materialize(model, "cpu", seed=6)
    assert model.weight.tensor_model_parallel is True


@row(79, "frozen parameters stay frozen")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3).requires_grad_(False))
    di.materialize(model, "cpu", seed=6)
    assert not model.weight.requires_grad


@row(80, "a partly loaded frozen model stays frozen")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3).requires_grad_(False))
    model.load_state_dict({"bias": torch.ones(3)}, strict=False, assign=True)
    di.materialize(model, "cpu", seed=6)
    assert not model.weight.requires_grad
    assert not model.bias.requires_grad


@row(82, "an optimizer holds the tied parameter that is trained")
def _() -> None:
    model = on_meta(Tied)
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", optimizers=optimizer, seed=6)
    assert optimizer.param_groups[0]["params"] == [model.head.weight]
    assert optimizer.param_groups[0]["params"][0] is model.head.weight


@row(83, "a compiled wrapper does not change what is made by name")
def _() -> None:
    plain = on_meta(lambda: nn.Sequential(nn.Linear(3, 3)))
    wrapped = nn.Sequential()
    wrapped.add_module("_orig_mod", on_meta(lambda: nn.Sequential(nn.Linear(3, 3))))
    di.materialize(plain, "cpu", seed=6, rng="by_name")
    di.materialize(wrapped, "cpu", seed=6, rng="by_name")
    assert torch.equal(plain[0].weight, wrapped[0][0].weight)


@row(85, "weak references to parameters stop nothing")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    reference = weakref.ref(model.weight)
    di.materialize(model, "cpu", seed=6)
    assert reference() is model.weight
    assert not model.weight.is_meta


@row(86, "an average made before is a copy afterwards")
def _() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    average = AveragedModel(model, device="meta")
    di.materialize([model, average], "cpu", seed=6)
    assert torch.equal(average.module.weight, model.weight)
    twin = copy.deepcopy(average)
    assert torch.equal(twin.module.weight, model.weight)


@row(91, "values read on meta: the recorder gives them early")
def _() -> None:
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
            self.lin = nn.Linear(3, 3)

    with pytest.raises(RuntimeError, match=re.escape("item()")):
        on_meta(DropPath)
    model = di.deferred_init(DropPath)
    di.materialize(model, "cpu", seed=6)
    assert_same(model, eager(DropPath))


@row(92, "a stray real tensor from numpy is left as it is")
def _() -> None:
    class Stray(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)
            table = torch.from_numpy(numpy.arange(3.0))
            self.register_buffer("table", table)

    model = on_meta(Stray)
    table = model.table
    di.materialize(model, "cpu", seed=6)
    assert model.table is table
    assert_same(model, eager(Stray))


@row(94, "weight norm on meta")
def _() -> None:
    def build() -> nn.Module:
        return parametrizations.weight_norm(nn.Conv1d(3, 4, 2))

    assert_same(made(build), eager(build))


@row(95, "init functions without kernels on meta in old torch")
def _() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("trunc", "orthogonal", "sparse"):
                setattr(self, name, nn.Parameter(torch.empty(4, 4)))
            self.dirac = nn.Parameter(torch.empty(4, 4, 3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.trunc_normal_(self.trunc)
            nn.init.orthogonal_(self.orthogonal)
            nn.init.sparse_(self.sparse, 0.5)
            nn.init.dirac_(self.dirac)

    assert_same(made(Unusual), eager(Unusual))


@row(98, "no lazy object leaks: plain tensors of the old classes are left")
def _() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {type(b) for b in model.buffers()} == {torch.Tensor}
    loss = model(torch.ones(2, 3)).sum()
    assert type(loss) is torch.Tensor
    assert loss.isfinite()


@pytest.mark.parametrize("name", ROWS)
def test_a_report_about_another_system_is_right_or_refused_here(name: str) -> None:
    ROWS[name]()
