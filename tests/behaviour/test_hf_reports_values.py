"""Reports about other systems on Hugging Face models: the values that they get.

The number in each id is the row of `reports.md`: a symptom that users of some other
system met. Here each of them is right, or refused by name before anything is done.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import deferred_init as di
from tests.behaviour.equal_models import assert_same, on_meta, tensors
from tests.behaviour.hf_models import CONFIGS, builder, eager, loaded, materialized
from tests.behaviour.report_rows import Rows

pytestmark = pytest.mark.hf

ROWS = Rows()
row = ROWS.add


@row(49, "layer scales keep the value that the constructor gave them")
def _() -> None:
    expected, _ = eager(builder("dinov2"))
    model = materialized(builder("dinov2"))
    assert torch.equal(
        model.encoder.layer[0].layer_scale1.lambda1,
        expected.encoder.layer[0].layer_scale1.lambda1,
    )
    assert float(expected.encoder.layer[0].layer_scale1.lambda1[0].detach()) == 1.0


@row(53, "values are those of eager construction, not only their statistics")
@row(47, "no value is left as it was found in memory")
def _() -> None:
    for name in sorted(CONFIGS):
        expected, _ = eager(builder(name))
        assert_same(materialized(builder(name), verify="full"), expected)


@row(55, "tensors of nested models are initialized once")
@row(56, "tensors of nested models are initialized once, by one order")
def _() -> None:
    expected, state = eager(builder("llava"))
    model = on_meta(builder("llava"))
    the_plan = di.plan(model, "cpu")
    made = [id(slot.tensor) for step in the_plan.steps for slot in step.claim.slots]
    assert len(made) == len(set(made))
    di.materialize(model, "cpu", seed=5)
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


@row(58, "loaded tensors are not initialized again")
@row(59, "logarithms of loaded tensors are not taken twice")
def _() -> None:
    model, expected = loaded("mamba")
    real = dict(tensors(model))
    before = {name: id(tensor) for name, tensor in real.items()}
    di.materialize(model, "cpu")
    assert {name: id(tensor) for name, tensor in tensors(model)} == before
    assert_same(model, expected)


@row(62, "parameters of torch.empty get the values of initialize_weights")
def _() -> None:
    model = materialized(builder("mixtral"), verify="full")
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert abs(experts.std().item() - 0.02) < 0.002


@row(64, "casts after construction on meta are honoured")
def _() -> None:
    def build() -> nn.Module:
        return builder("llama")().half()

    expected, _ = eager(build)
    assert_same(materialized(build), expected)


@row(65, "the documented way gives the values of eager construction")
def _() -> None:
    expected, state = eager(builder("gpt2"))
    with torch.device("meta"):
        model = builder("gpt2")()
    optimizer = torch.optim.AdamW(model.parameters())
    di.materialize(model, "cpu", seed=5, optimizers=[optimizer])
    assert_same(model, expected)
    assert torch.equal(torch.get_rng_state(), state)


@row(67, "the padding row is zero wherever it is in eager construction")
def _() -> None:
    for rng in ("eager", "by_name"):
        model = materialized(builder("bert"), rng=rng, verify="full")
        assert not model.embeddings.word_embeddings.weight[0].any()


@pytest.mark.parametrize("name", ROWS)
def test_what_others_reported_is_right_or_refused(name: str) -> None:
    ROWS[name]()
