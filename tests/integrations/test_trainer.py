"""The helpers for Hugging Face's Trainer and for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deferred_init as di
from deferred_init.integrations.lightning import configure_model
from deferred_init.integrations.trainer import model_init

RunScript = Callable[..., str]


def test_each_call_makes_the_model_anew_and_goes_on_with_the_generator() -> None:
    make = model_init(nn.Linear, 4, 2, device="cpu", bias=False)
    torch.manual_seed(0)
    first, second = make(), make()
    torch.manual_seed(0)
    assert torch.equal(first.weight, nn.Linear(4, 2, bias=False).weight)
    assert torch.equal(second.weight, nn.Linear(4, 2, bias=False).weight)
    assert make.report.ok  # type: ignore[attr-defined]


def test_options_are_those_of_materialize() -> None:
    weights = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    make = model_init(nn.Linear, 4, 2, device="cpu", options={"weights": weights})
    assert torch.equal(make().weight, weights["weight"])


@pytest.mark.hf
@pytest.mark.slow
def test_the_trainer_example_trains_fresh_and_from_weights(
    run_script: RunScript,
) -> None:
    pytest.importorskip("transformers")
    printed = run_script("examples/trainer.py")
    assert "Materialized: ready" in printed
    assert "mean loss from fresh values" in printed


def _module(model: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder.model = model
    holder.trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu"))
    )
    return holder


def test_configure_model_materializes_once_and_then_does_nothing() -> None:
    module = _module(di.deferred_init(nn.Linear, 4, 2))
    seen: list[bool] = []
    report = configure_model(
        module, "model", shard=lambda model: seen.append(model.weight.is_meta), seed=0
    )
    assert report is not None
    assert report.ok
    assert seen == [True]
    torch.manual_seed(0)
    assert torch.equal(module.model.weight, nn.Linear(4, 2).weight)
    assert configure_model(module, "model", seed=0) is None
    assert configure_model(module) is None


@pytest.mark.slow
def test_the_lightning_example_trains_or_says_that_it_needs_lightning(
    run_script: RunScript,
) -> None:
    if find_spec("lightning") is None:
        printed = run_script("examples/lightning_module.py", status=77)
        assert "needs lightning" in printed
    else:
        printed = run_script("examples/lightning_module.py")
        assert "Materialized: ready" in printed
        assert "ready: True" in printed
