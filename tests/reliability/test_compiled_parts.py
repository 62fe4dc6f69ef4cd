"""Models of which a part was scripted or traced: it hides its tables from Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di


class _Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", ["scripted", "traced"])
def test_a_model_with_a_compiled_part_is_materialized_and_audited(made: str) -> None:
    part = (
        torch.jit.script(_Doubles())
        if made == "scripted"
        else torch.jit.trace(_Doubles(), torch.zeros(1, 2))
    )
    model = nn.Sequential(part, di.deferred_init(nn.Linear, 2, 2))
    before = [p.detach().clone() for p in part.parameters()]
    di.materialize(model, "cpu", verify="full")
    assert di.audit(model, verify="full").ok
    for parameter, value in zip(part.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_of_a_deferred_model_is_refused() -> None:
    with torch.device("meta"):
        scripted = torch.jit.script(_Doubles())
    with pytest.raises(di.PlanError, match="bare model first, then script it"):
        di.materialize(scripted, "cpu")
