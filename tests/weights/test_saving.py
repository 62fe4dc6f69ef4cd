"""The state dict of a loaded model loads elsewhere: torch, transformers, DCP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import deferred_init as di
from deferred_init.sources import open_source

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.hf


def config(*, tied: bool = True) -> Any:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        tie_word_embeddings=tied,
    )


def build(*, tied: bool = True) -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(config(tied=tied))
    return model


def on_meta(*, tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        return build(tied=tied)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        expected: Tensor = one.eval()(tokens).logits
        assert torch.equal(other.eval()(tokens).logits, expected)


@pytest.fixture(params=["one_file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    size = "10GB" if request.param == "one_file" else "20KB"
    build().save_pretrained(tmp_path / "saved", max_shard_size=size)
    return tmp_path / "saved"


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("how", ["meta", "recorded"])
def test_a_hugging_face_folder_loads_as_from_pretrained_loads_it(
    folder: Path, how: str, mmap: bool
) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = on_meta() if how == "meta" else di.deferred_init(build)
    report = di.materialize(
        model,
        "cpu",
        weights=open_source(folder, mmap=mmap),
        missing="error",
        unexpected="error",
    )
    assert report.ok
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(reference, model)


def test_what_was_loaded_is_saved_by_transformers_and_loaded_again(
    folder: Path, tmp_path: Path
) -> None:
    model = on_meta()
    di.materialize(model, "cpu", weights=folder)
    model.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert_equal(model, again)


def test_the_state_dict_loads_strictly_in_plain_torch(
    folder: Path, tmp_path: Path
) -> None:
    model = on_meta()
    di.materialize(model, "cpu", weights=folder)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    eager = build()
    eager.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(model, eager)


def test_the_state_dict_is_saved_and_loaded_by_dcp(
    folder: Path, tmp_path: Path
) -> None:
    model, eager = on_meta(), build()
    di.materialize(model, "cpu", weights=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a single process
        dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "dcp")
        state = dict(eager.state_dict())
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_equal(model, eager)

    once_more = on_meta()
    di.materialize(once_more, "cpu", weights=tmp_path / "dcp", missing="error")
    assert_equal(model, once_more)


def test_the_base_model_is_loaded_from_the_file_of_a_model_with_a_head(
    folder: Path,
) -> None:
    with torch.device("meta"):
        base = transformers.LlamaModel(config())
    with pytest.raises(
        di.PlanError, match=r"Without the prefix `model\.` 20 of 20 would match"
    ):
        di.materialize(base, "cpu", weights=folder)
    di.materialize(base, "cpu", weights=folder, names={r"^model\.": ""})
    whole = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(base.norm.weight, whole.model.norm.weight)


def test_a_complete_checkpoint_leaves_the_generators_alone(folder: Path) -> None:
    for model in (on_meta(), di.deferred_init(build)):
        before = torch.get_rng_state()
        di.materialize(model, "cpu", weights=folder)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_head_that_the_checkpoint_lacks_gets_eagers_values(folder: Path) -> None:
    torch.manual_seed(4)
    eager = transformers.LlamaForSequenceClassification(config())
    with torch.device("meta"):
        model = transformers.LlamaForSequenceClassification(config())
    report = di.materialize(model, "cpu", weights=folder, seed=4)
    assert torch.equal(model.score.weight, eager.score.weight)
    assert any("`score.weight`" in note for note in report.notes)
    whole = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(model.model.norm.weight, whole.model.norm.weight)
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight,
        whole.model.layers[1].mlp.up_proj.weight,
    )
