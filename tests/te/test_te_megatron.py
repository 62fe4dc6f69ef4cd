"""Models of megatron-core, which builds on Transformer Engine, recorded and made.

`use_cpu_initialization` lets its constructors run without a GPU: they draw each master
weight on the CPU and keep the part of the tensor parallel rank. On a GPU they draw the
part from a generator of their own, see `tests/gpu/test_megatron.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from te_equality import assert_same_parameters
from torch import nn

import deferred_init as di

pytest.importorskip("transformer_engine.pytorch", reason="needs TE")
pytest.importorskip("megatron", reason="needs megatron-core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it would like to have besides
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

local = specs.get_gpt_layer_local_spec
of_te = specs.get_gpt_layer_with_transformer_engine_spec
pytestmark = pytest.mark.filterwarnings("ignore")  # of megatron's own

Build = Callable[[], nn.Module]
MOE: dict[str, Any] = {"num_moe_experts": 4, "add_bias_linear": False}


@pytest.fixture(scope="module", params=[1, 2], ids="tp{}".format)
def tensor_parallel(request: pytest.FixtureRequest) -> Iterator[int]:
    """The last rank of a world that is one tensor parallel group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size: int = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    parallel_state.initialize_model_parallel(size, 1)
    yield size
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config(**options: Any) -> TransformerConfig:
    size = parallel_state.get_tensor_model_parallel_world_size()
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": size,
    }
    return TransformerConfig(**{**sizes, **options})


def gpt(spec: Any, how: TransformerConfig, **options: Any) -> GPTModel:
    kwargs: dict[str, Any] = {"vocab_size": 128, "max_sequence_length": 64, **options}
    return GPTModel(config=how, transformer_layer_spec=spec, **kwargs)


def in_16_bits() -> nn.Module:
    """What Megatron-LM's `get_model` does to a model."""
    how = config()
    return Float16Module(how, gpt(of_te(), how))


tied = {"share_embeddings_and_output_weights": True}
MODELS: dict[str, Build] = {
    "local": lambda: gpt(local(), config()),
    "local, tied": lambda: gpt(local(), config(), **tied),
    "local experts": lambda: gpt(
        local(num_experts=4, moe_grouped_gemm=False), config(**MOE)
    ),
    "TE": lambda: gpt(of_te(), config(normalization="RMSNorm", gated_linear_unit=True)),
    "TE, rotary, grouped queries": lambda: gpt(
        of_te(qk_layernorm=True),
        config(num_query_groups=2, qk_layernorm=True),
        position_embedding_type="rope",
    ),
    "TE, tied": lambda: gpt(of_te(), config(), **tied),
    "TE experts in one module": lambda: gpt(
        of_te(num_experts=4, moe_grouped_gemm=True),
        config(moe_grouped_gemm=True, **MOE),
    ),
    "last stage": lambda: gpt(of_te(), config(), pre_process=False),
    "16 bits": in_16_bits,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.usefixtures("te", "tensor_parallel")
def test_a_model_of_megatron_equals_an_eager_one(build: Build) -> None:
    torch.manual_seed(5)
    eager = build()
    after = torch.get_rng_state()
    model = di.deferred_init(build)
    assert all(parameter.is_meta for parameter in model.parameters())
    di.materialize(model, "cpu", seed=5)
    assert torch.equal(torch.get_rng_state(), after)
    assert_same_parameters(eager, model)
    made = dict(model.named_buffers())
    for name, buffer in eager.named_buffers():
        assert torch.equal(buffer, made[name]), name


@pytest.mark.usefixtures("te", "tensor_parallel")
def test_what_megatron_has_no_method_for_is_refused_on_meta() -> None:
    """Its own layers draw in their constructors, and have nothing to call again."""
    with torch.device("meta"):
        model = gpt(local(), config())
    with pytest.raises(di.PlanError, match="VocabParallelEmbedding") as error:
        di.materialize(model, "cpu")
    assert "deferred_init(...)" in str(error.value)
