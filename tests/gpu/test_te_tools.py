"""Transformer Engine's optimizers and CUDA graphs, with models made from meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from te_models import BF16, ROWS, WIDTH, assert_same_parameters
from torch import Tensor, nn

import deferred_init as di

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.te]
OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "FusedAdam": (BF16, lambda params: te.optimizers.FusedAdam(params, lr=1e-2)),
    "capturable": (
        BF16,
        lambda params: te.optimizers.FusedAdam(params, lr=1e-2, capturable=True),
    ),
    # It updates float32 and float16, and nothing else.
    "FusedSGD": (
        torch.float32,
        lambda params: te.optimizers.FusedSGD(params, lr=1e-2, momentum=0.9),
    ),
}


def _model(device: str, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(
        te.LayerNormLinear(WIDTH, WIDTH, device=device, params_dtype=dtype),
        te.Linear(WIDTH, WIDTH, device=device, params_dtype=dtype),
    )


def _train(model: Any, optimizer: Any, dtype: torch.dtype) -> list[Tensor]:
    outputs = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, WIDTH, generator=generator).to("cuda", dtype)
        optimizer.zero_grad()
        out = model(x.requires_grad_())
        outputs.append(out.detach().clone())
        (out * x.detach()).sum().backward()
        optimizer.step()
    return outputs


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_optimizers_built_on_meta_train_as_those_built_later(kind: str) -> None:
    dtype, make = OPTIMIZERS[kind]
    model = _model("meta", dtype)
    optimizer = make(model.parameters())
    di.materialize(model, "cuda", optimizers=[optimizer], seed=0, verify="full")
    torch.manual_seed(0)
    twin = _model("cuda", dtype)
    before = [param.detach().clone() for param in twin.parameters()]
    outputs = _train(model, optimizer, dtype)
    expected = _train(twin, make(twin.parameters()), dtype)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same_parameters(model, twin)
    changed = zip(model.parameters(), before, strict=True)
    assert not any(torch.equal(param, old) for param, old in changed)


def test_a_graph_captured_afterwards_replays_with_what_training_changed() -> None:
    model = _model("meta", BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    di.materialize(model, "cuda", optimizers=[optimizer], seed=0)
    pointers = [param.data_ptr() for param in model.parameters()]
    torch.manual_seed(0)
    twin = _model("cuda", BF16)
    for each in (model, twin):
        sample = torch.zeros(ROWS, WIDTH, device="cuda", dtype=BF16)
        te.make_graphed_callables(each, (sample.requires_grad_(),))
    # The captured graphs keep autograd's nodes of the parameters alive, and those stay
    # on the stream of the capture; so that is where the training has to be.
    stream = torch.cuda.graph.default_capture_stream
    assert stream is not None
    with torch.cuda.stream(stream):
        outputs = _train(model, optimizer, BF16)
        expected = _train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), BF16)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same_parameters(model, twin)
    assert [param.data_ptr() for param in model.parameters()] == pointers
