"""Transformer Engine's modules inside a constructor stay its own deferred modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deferred_init.record import DeferredTensor, deferred_init, recording_of

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = pytest.mark.te


def test_operations_come_out_on_meta_with_marks_in_creation_order():
    def build():
        return nn.Sequential(
            nn.Linear(32, 32),
            te.ops.Linear(32, 32),
            nn.Linear(32, 32),
            te.ops.Sequential(te.ops.RMSNorm(32), te.ops.BasicLinear(32, 32)),
        )

    model = deferred_init(build, device="cuda")
    recording = recording_of(model)
    assert type(model[1].weight) is nn.Parameter
    assert model[1].weight.is_meta
    assert isinstance(model[0].weight, DeferredTensor)
    kinds = [type(mark.payload).__name__ for mark in recording.marks]
    assert kinds == ["BasicLinear", "Bias", "RMSNorm", "BasicLinear"]
    places = [mark.index for mark in recording.marks]
    fills = [node.index for node in recording.nodes if node.stream is not None]
    assert fills[1] < places[0] < places[1] < fills[2] < fills[3] < places[2]


def test_an_operation_asked_for_on_the_cpu_is_recorded():
    def build():
        return nn.Sequential(nn.Linear(4, 4), te.ops.RMSNorm(32, device="cpu"))

    model = deferred_init(build)
    assert isinstance(model[1].weight, DeferredTensor)
    assert not recording_of(model).marks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_modules_come_out_on_meta_and_draw_at_their_place():
    def build():
        return nn.Sequential(nn.Linear(32, 32), te.Linear(32, 32), nn.Linear(32, 32))

    model = deferred_init(build, device="cuda")
    assert model[1].weight.is_meta
    (mark,) = recording_of(model).marks
    assert mark.payload is model[1]
