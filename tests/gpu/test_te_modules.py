"""Transformer Engine modules on a GPU, against their eager twins."""

from __future__ import annotations

import gc

import pytest
import torch
from te_models import (
    BF16,
    RECIPES,
    WIDTH,
    assert_same_parameters,
    build,
    module_model,
    train,
)
from torch.optim import AdamW

import deferred_init as di

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [pytest.mark.gpu, pytest.mark.te]
KINDS = ("TransformerLayer", "MultiheadAttention", "LayerNormMLP", "GroupedLinear")
SEQUENCES = ("TransformerLayer", "MultiheadAttention")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_modules_train_as_if_built_on_the_gpu(
    kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bit-equality is judged where Transformer Engine itself is deterministic.
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    te_recipe = RECIPES[recipe]()
    model = build(lambda: module_model(kind, "meta"), te_recipe)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    di.materialize(model, "cuda", optimizers=[optimizer], seed=0, verify="full")
    state_after = torch.cuda.get_rng_state()

    torch.manual_seed(0)
    twin = build(lambda: module_model(kind, "cuda"), te_recipe)
    assert torch.equal(torch.cuda.get_rng_state(), state_after)
    assert_same_parameters(model, twin)
    sequence = kind in SEQUENCES
    outputs = train(model, optimizer, te_recipe, sequence=sequence)
    expected = train(
        twin, AdamW(twin.parameters(), lr=1e-2), te_recipe, sequence=sequence
    )
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same_parameters(model, twin)


@pytest.mark.parametrize("device", [torch.device("meta"), "meta", "cuda", None])
def test_on_meta_takes_no_memory_however_the_device_is_spelt(device: object) -> None:
    from deferred_init.te.on_meta import on_meta

    spelt = {} if device is None else {"device": device}
    gc.collect()
    before = torch.cuda.memory_allocated()
    with on_meta():
        model = torch.nn.Sequential(
            te.TransformerLayer(
                WIDTH,
                2 * WIDTH,
                2,
                fuse_qkv_params=False,
                params_dtype=BF16,
                softmax_type="learnable",
                **spelt,
            ),
            te.ops.Linear(WIDTH, WIDTH, **spelt),
            te.LayerNorm(WIDTH, **spelt),
        )
    assert all(param.is_meta for param in model.parameters())
    assert torch.cuda.memory_allocated() == before


def test_unfused_attention_built_on_meta_equals_eager() -> None:
    from deferred_init.te.on_meta import on_meta

    def make() -> torch.nn.Module:
        return te.MultiheadAttention(
            WIDTH, 2, fuse_qkv_params=False, softmax_type="learnable", params_dtype=BF16
        )

    with on_meta():
        model = make()
    di.materialize(model, "cuda", seed=3, verify="full")
    state_after = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    twin = make()
    assert torch.equal(torch.cuda.get_rng_state(), state_after)
    assert_same_parameters(model, twin)
    storages = {p.untyped_storage().data_ptr() for p in list(model.parameters())[:3]}
    expected = {p.untyped_storage().data_ptr() for p in list(twin.parameters())[:3]}
    assert len(storages) == len(expected) == 1


@pytest.mark.parametrize("percent", [1.0, 0.3])
def test_rotary_frequencies_equal_eager(percent: float) -> None:
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

    from deferred_init.te.on_meta import on_meta

    with on_meta():
        model = RotaryPositionEmbedding(64, percent)
    assert model.inv_freq.is_meta
    di.materialize(model, "cuda")
    assert torch.equal(model.inv_freq, RotaryPositionEmbedding(64, percent).inv_freq)
