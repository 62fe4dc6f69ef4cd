"""What users of other systems reported about loading, each as a test of ours.

The letters and numbers are those of the survey in `docs/`: A meta left behind,
B ties, C buffers, D wrong values.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deferred_init as di


class Rope(nn.Module):
    """Rotary frequencies that are not saved, and positions that are integers."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)
        self.register_buffer("position_ids", torch.arange(6), persistent=False)

    def _frequencies(self) -> Tensor:
        return 1.0 / 10000 ** (torch.arange(0, self.dim, 2).float() / self.dim)


class Model(nn.Module):
    """A tied language model in miniature."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.register_buffer("embed_scale", torch.tensor(8**0.5), persistent=False)
        self.rope = Rope()
        self.norm = nn.BatchNorm1d(8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = dict(Model().state_dict())
    del state["lm_head.weight"]
    state["norm.num_batches_tracked"] += 7
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def recorded(*, tied: bool = True) -> Model:
    model: Model = di.deferred_init(Model, tied=tied)
    return model


def test_a1_after_loading_no_buffer_is_left_without_memory(saved: Path) -> None:
    model = recorded()
    di.materialize(model, "cpu", weights=saved)
    model.to("cpu").double()
    assert not any(tensor.is_meta for tensor in model.buffers())


def test_a2_what_the_checkpoint_lacks_is_named_before_anything_moves() -> None:
    model = recorded()
    weights = {"embed.weight": torch.zeros(10, 8)}
    with pytest.raises(di.PlanError, match=r"lacks 5 of 6 tensors: `norm\.weight`"):
        di.materialize(model, "cpu", weights=weights, missing="error")
    assert not di.audit(model).ok


def test_a4_biases_are_handled_like_weights() -> None:
    model = nn.Linear(3, 2, device="meta")
    weights = {"weight": torch.ones(2, 3).half(), "bias": torch.ones(2).half()}
    di.materialize(model, "cpu", weights=weights, dtype=torch.bfloat16)
    assert model.bias.dtype == model.weight.dtype == torch.bfloat16


def test_b16_b17_b19_ties_are_the_same_object_after_loading(saved: Path) -> None:
    model = recorded()
    weight = model.embed.weight
    di.materialize(model, "cpu", weights=saved)
    assert model.embed.weight is weight
    assert model.lm_head.weight is weight


def test_b26_the_side_of_a_tie_that_is_stored_is_the_one_that_counts() -> None:
    weight = torch.randn(10, 8)
    model = recorded()
    di.materialize(model, "cpu", weights={"lm_head.weight": weight}, missing="any")
    assert torch.equal(model.embed.weight, weight)


def test_b28_parameters_on_meta_are_no_ties_of_each_other(saved: Path) -> None:
    """On meta every tensor has the address 0."""
    model = recorded(tied=False)
    state = dict(Model(tied=False).state_dict())
    di.materialize(model, "cpu", weights=state)
    assert not torch.equal(model.embed.weight, model.lm_head.weight)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def test_c31_c32_c38_c40_c41_buffers_that_are_not_saved_are_made_again(
    saved: Path,
) -> None:
    """Not left as they were allocated, not zeroed, not in another dtype."""
    eager = Model()
    for verify in ("fast", "full"):
        model = recorded()
        di.materialize(model, "cpu", weights=saved, verify=verify)
        assert torch.equal(model.rope.inv_freq, eager.rope.inv_freq)
        assert torch.equal(model.rope.position_ids, torch.arange(6))
        assert model.rope.position_ids.dtype == torch.int64
        assert model.embed_scale == eager.embed_scale


def test_c32_a_buffer_that_nobody_can_make_is_an_error_and_not_garbage(
    saved: Path,
) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(di.PlanError, match=r"no initializer: .*`rope\.inv_freq`"):
        di.materialize(model, "cpu", weights=saved)


def test_c44_a_counter_is_loaded_and_an_empty_checkpoint_does_not_reset_it(
    saved: Path,
) -> None:
    model = recorded()
    di.materialize(model, "cpu", weights=saved)
    assert model.norm.num_batches_tracked == 7
    di.materialize(model, "cpu", weights={"other": torch.ones(1)})
    assert model.norm.num_batches_tracked == 7


class Decay(nn.Module):
    """Computes its parameter in place at the end, as linear attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.arange(1.0, 5.0))
        self.extra = nn.Parameter(torch.randn(3))
        with torch.no_grad():
            self.A_log.log_()


@pytest.mark.parametrize("absent", [(), ("extra",)])
def test_d57_d58_d59_what_is_loaded_is_never_initialized_again(
    absent: tuple[str, ...],
) -> None:
    state = {"A_log": torch.full((4,), math.pi), "extra": torch.ones(3)}
    weights = {key: value for key, value in state.items() if key not in absent}
    model = di.deferred_init(Decay)
    di.materialize(model, "cpu", weights=weights, missing="any")
    assert torch.equal(model.A_log, torch.full((4,), math.pi))


def test_d60_d62_what_is_missing_is_never_uninitialized_memory(saved: Path) -> None:
    torch.manual_seed(0)
    eager = Model(tied=False)
    model = recorded(tied=False)
    di.materialize(model, "cpu", weights=saved, seed=0, verify="full")
    assert torch.equal(model.lm_head.weight, eager.lm_head.weight)


def test_d61_a_trunk_under_other_names_is_an_error_and_not_a_warning() -> None:
    state = {f"transformer.{k}": v for k, v in Model().state_dict().items()}
    with pytest.raises(di.PlanError, match="most of the model"):
        di.materialize(recorded(), "cpu", weights=state)


def test_d64_the_dtype_of_the_model_counts_and_not_that_of_the_file(
    saved: Path,
) -> None:
    model = di.deferred_init(lambda: Model().half())
    di.materialize(model, "cpu", weights=saved)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
