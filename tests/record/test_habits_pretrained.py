"""Constructors that build on meta themselves and fill in what they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deferred_init.record import is_deferred

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("quiet_transformers")]


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=99,
    )
    torch.manual_seed(3)
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def _around(path: Path):
    def body(self):
        self.before = nn.Linear(3, 3)
        self.bert = transformers.BertModel.from_pretrained(path)
        self.after = nn.Linear(3, 3)

    return body


def test_from_pretrained_of_a_local_folder(assert_eager_equals_deferred, pretrained):
    model = assert_eager_equals_deferred(
        _around(pretrained),
        lambda m: (
            None
            if not is_deferred(m)
            else (_assert_real(m.bert), _assert_deferred(m.before))
        ),
    )
    assert not is_deferred(model)


def _assert_real(module: nn.Module) -> None:
    assert not any(is_deferred(p) for p in module.parameters())


def _assert_deferred(module: nn.Module) -> None:
    assert all(is_deferred(p) for p in module.parameters())


def test_weights_that_the_folder_lacks_are_drawn_in_eagers_order(
    assert_eager_equals_deferred, pretrained
):
    from safetensors.torch import load_file, save_file

    path = pretrained / "model.safetensors"
    state = load_file(path)
    for name in ("pooler.dense.weight", "encoder.layer.0.attention.self.query.weight"):
        del state[name]
    save_file(state, path, metadata={"format": "pt"})
    assert_eager_equals_deferred(_around(pretrained))


def test_skip_init_then_own_initialization(assert_eager_equals_deferred):
    def body(self):
        self.linear = nn.utils.skip_init(nn.Linear, 3, 3)
        nn.init.normal_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    assert_eager_equals_deferred(body)


def test_to_empty_then_own_initialization(assert_eager_equals_deferred):
    def body(self):
        self.linear = nn.Linear(3, 3).to_empty(device="cpu")
        nn.init.ones_(self.linear.weight)
        nn.init.ones_(self.linear.bias)

    assert_eager_equals_deferred(body)


def test_conversions_by_swapping(assert_eager_equals_deferred):
    def body(self):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            self.linear = nn.Linear(3, 3).half().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    assert_eager_equals_deferred(body)
