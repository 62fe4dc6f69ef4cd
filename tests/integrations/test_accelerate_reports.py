"""What users of accelerate reported (`docs/reports.md`), in one process.

The reports that need several ranks are cases of `test_accelerate_ranks.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.errors import PlanError

accelerate = pytest.importorskip("accelerate")

from accelerate import init_empty_weights  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402

from deferred_init.integrations.accelerate_plugin import (  # noqa: E402
    Accelerator,
    DeferredInitPlugin,
)
from deferred_init.integrations.tp_plan import split_by_plan  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fresh_accelerator_state")]


class Net(nn.Module):
    """A tie, a frozen weight, a marked Parameter, and a buffer that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.inner.weight.requires_grad_(False)
        self.inner.bias.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4) / 4, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.embed(tokens)) + self.table)
        return logits


def eager() -> Any:
    torch.manual_seed(0)
    return Net()


def prepared(model: nn.Module, **options: Any) -> Any:
    plugin = DeferredInitPlugin(seed=0, **options)
    return Accelerator(cpu=True, deferred_init=plugin).prepare(model)


def test_a_tie_that_accelerate_loses_in_its_context_is_kept() -> None:
    with init_empty_weights():
        theirs: Any = Net()
    assert theirs.head.weight is not theirs.embed.weight  # the report (B17, 48)
    model = prepared(di.deferred_init(Net))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, eager().head.weight)


def test_a_tie_that_was_lost_can_be_made_again_before_prepare() -> None:
    with init_empty_weights():
        theirs: Any = Net()
    theirs.head.weight = theirs.embed.weight
    model = prepared(theirs)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, eager().embed.weight)
    assert torch.equal(model.inner.bias, eager().inner.bias)


def test_frozen_flags_and_attributes_come_through_prepare() -> None:
    model = prepared(di.deferred_init(Net))
    frozen = {name: not p.requires_grad for name, p in model.named_parameters()}
    assert frozen == {"embed.weight": False, "inner.weight": True, "inner.bias": False}
    assert model.inner.bias.tensor_model_parallel
    # Accelerate's own context passes attributes to the constructor of the Parameter.
    with init_empty_weights(), pytest.raises(TypeError, match="tensor_model_parallel"):
        model.inner.register_parameter("bias", model.inner.bias)


def test_a_buffer_that_the_constructor_computed_is_not_garbage() -> None:
    with init_empty_weights(include_buffers=True):
        theirs = Net()
    with pytest.raises(PlanError, match="`table`"):
        prepared(theirs)
    assert torch.equal(prepared(di.deferred_init(Net)).table, eager().table)


def test_what_a_checkpoint_lacks_is_named_before_anything_moves() -> None:
    lacking = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(8, 4)}
    model = di.deferred_init(Net)
    with pytest.raises(PlanError) as caught:
        prepared(model, weights=lacking, missing="error")
    assert "inner.weight" in str(caught.value)
    assert "inner.bias" in str(caught.value)
    assert all(di.is_deferred(parameter) for parameter in model.parameters())


def test_a_model_without_a_plan_for_tensor_parallelism_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        split_by_plan(di.deferred_init(Net), None)
    assert str(caught.value) == (
        "Net has no tensor parallel plan; split it with torch's `parallelize_module` "
        "while it has no memory, before `prepare`"
    )


def test_what_torch_cannot_split_as_planned_is_refused_by_name() -> None:
    model = di.deferred_init(lambda: nn.ModuleList([Net(), Net()]))
    model._tp_plan = {  # type: ignore[assignment]
        "*.embed": "rowwise",
        "*.inner": "moe_experts",
        "*.head.weight": "packed_colwise",
    }
    before = list(model.parameters())
    with pytest.raises(PlanError) as caught:
        split_by_plan(model, None)
    assert len(caught.value.problems) == 4
    assert "0.inner: moe_experts of Linear" in caught.value.problems
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]


def test_tensor_parallelism_and_conversion_do_not_go_together() -> None:
    plugin = DeferredInitPlugin(recipe="fp8_current")
    accelerator = Accelerator(cpu=True, deferred_init=plugin)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    model = di.deferred_init(Net)
    with pytest.raises(PlanError, match="tensor parallelism splits torch's layers"):
        accelerator.prepare(model)
    assert type(model.inner) is nn.Linear
