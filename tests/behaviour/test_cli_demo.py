"""The demo: right on a healthy library, and loud when anything is wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from deferred_init import demo
from deferred_init.cli import main
from deferred_init.comparison import compare
from deferred_init.demo import DemoOptions, run_demo
from deferred_init.errors import PlanError

pytestmark = pytest.mark.hf
transformers = pytest.importorskip("transformers", reason="needs transformers")

SMALL = DemoOptions(
    device="cpu",
    sequence_length=16,
    config=(
        ("n_layer", 2),
        ("n_embd", 32),
        ("n_head", 2),
        ("vocab_size", 101),
        ("n_positions", 16),
    ),
)


def test_a_small_model_goes_all_the_way_and_is_bit_equal_to_eager() -> None:
    lines: list[str] = []
    result = run_demo(SMALL, lines.append)
    text = "\n".join(lines)
    assert result["ok"], text
    assert result["comparison"]["unequal"] == ()
    assert result["generator_equal"]
    assert len(result["losses"]) == 4
    assert lines[-1] == "\nOK"
    assert json.loads(json.dumps(result))["ok"] is True


def test_an_initializer_that_is_wrong_makes_the_demo_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = demo.materialize

    def wrong(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        report = right(model, *args, **kwargs)
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1
        return report

    monkeypatch.setattr(demo, "materialize", wrong)
    lines: list[str] = []
    result = run_demo(SMALL, lines.append)
    assert not result["ok"]
    assert result["comparison"]["unequal"] == (
        "transformer.wte.weight",
        "lm_head.weight",
    )
    assert "other values: `transformer.wte.weight`, `lm_head.weight`" in "\n".join(
        lines
    )
    assert lines[-1] == "\nNOT OK: see the lines above"


def test_an_optimizer_that_trains_other_tensors_makes_the_demo_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def foreign(parameters: Any, lr: float) -> torch.optim.Optimizer:
        copies = [nn.Parameter(torch.empty_like(p, device="cpu")) for p in parameters]
        return torch.optim.AdamW(copies, lr=lr)

    monkeypatch.setattr(demo, "AdamW", foreign)
    with pytest.raises(Exception, match="optimizer"):
        run_demo(SMALL, lambda text: None)


def test_a_step_that_changes_nothing_makes_the_demo_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo.AdamW, "step", lambda self: None)
    lines: list[str] = []
    assert not run_demo(SMALL, lines.append)["ok"]
    assert "never changed: `transformer.wte.weight`" in "\n".join(lines)


def test_without_transformers_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--device", "cpu"]) == 1
    assert 'pip install "deferred-init[hf]"' in capsys.readouterr().err


def test_a_device_that_is_not_there_is_a_plan_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(PlanError, match="cuda"):
        run_demo(DemoOptions(device="cuda", config=SMALL.config), lambda text: None)


def _pair() -> tuple[nn.Module, nn.Module]:
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Module()
        model.first = nn.Linear(2, 2)
        model.second = nn.Linear(2, 2)
        model.register_buffer("scale", torch.tensor([0.0, float("nan")]))
        pair.append(model)
    return pair[0], pair[1]


def test_the_comparison_takes_equal_models_for_equal_nan_included() -> None:
    found = compare(*_pair())
    assert found.ok
    assert found.num_tensors == 5


def test_the_comparison_tells_zero_from_minus_zero() -> None:
    ours, eager = _pair()
    ours.scale[0] = -0.0
    assert compare(ours, eager).unequal == ("scale",)


def test_the_comparison_sees_flags_dtypes_and_missing_names() -> None:
    ours, eager = _pair()
    ours.first.weight.requires_grad_(False)
    ours.second.to(torch.bfloat16)
    ours.register_buffer("extra", torch.zeros(1))
    assert set(compare(ours, eager).misshapen) == {
        "extra",
        "first.weight",
        "second.weight",
        "second.bias",
    }


def test_the_comparison_sees_a_tie_that_was_not_kept() -> None:
    ours, eager = _pair()
    eager.second.weight = eager.first.weight
    with torch.no_grad():
        ours.second.weight.copy_(ours.first.weight)
    assert compare(ours, eager).broken_ties == ("first.weight", "second.weight")
