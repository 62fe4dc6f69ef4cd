"""A recorded model of which a part was put on meta afterwards, as adapters do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di
from deferred_init.record.tensor import value_of

META = torch.device("meta")


class _Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = nn.Linear(4, 3)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class _Resets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = nn.Linear(4, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.children():
            nn.init.orthogonal_(module.weight)


def _llama() -> Any:
    hf = pytest.importorskip("transformers", reason="needs transformers")
    config = hf.LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
    )
    return hf.LlamaForCausalLM(config)


def _add(model: Any) -> None:
    with META:
        if hasattr(model, "model"):
            model.model.layers[0].self_attn.q_proj.adapter = nn.Linear(8, 2)
        else:
            model.adapter = nn.Linear(2, 2)


def _values(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().clone() for n, t in named if "adapter" not in n}


@pytest.mark.parametrize("rng", ["eager", "by_name"])
@pytest.mark.parametrize("build", [_Applies, _Resets, _llama])
def test_what_was_recorded_keeps_its_values(build: Callable[[], Any], rng: str) -> None:
    torch.manual_seed(0)
    expected = _values(build())
    torch.manual_seed(0)
    model = di.deferred_init(build)
    if rng == "by_name":
        whole = di.deferred_init(build)
        di.materialize(whole, "cpu", rng=rng, seed=0)
        expected = _values(whole)
    _add(model)
    di.materialize(model, "cpu", rng=rng, seed=0, verify="full")
    found = _values(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("build", [_Applies, _Resets, _llama])
def test_a_plan_adds_nothing_to_the_recording(build: Callable[[], Any]) -> None:
    model = di.deferred_init(build)
    _add(model)
    nodes = value_of(next(iter(model.parameters()))).recording.nodes
    length = len(nodes)
    di.plan(model, "cpu")
    assert len(nodes) == length
