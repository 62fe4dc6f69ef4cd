"""Weights for Transformer Engine's modules that FSDP2 sharded, by gloo on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from te_capabilities import te_needs
from te_ranks import Ranks

import deferred_init as di

pytestmark = [pytest.mark.te, pytest.mark.distributed]


def _refused(_rank: int) -> str:
    import warnings
    from unittest import mock

    warnings.simplefilter("ignore")
    import transformer_engine.pytorch as te
    from torch.distributed.fsdp import fully_shard
    from transformer_engine.common.recipe import Float8CurrentScaling

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        te.quantized_model_init(recipe=Float8CurrentScaling()),
    ):
        model = te.Linear(8, 16, device="meta")
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    weights = {"weight": torch.ones(16, 8), "bias": torch.ones(16)}
    with pytest.raises(di.PlanError) as caught:
        di.plan(model, "cuda", gpu="h200", weights=weights)
    return str(caught.value)


@te_needs("records of registered parameters")
def test_weights_for_quantized_shards_are_refused_in_the_plan(
    ranks: Ranks,
) -> None:
    for text in ranks(2).run(_refused):
        assert "1 tensors are stored quantized and are sharded already" in text, text
        assert "`weight`. Load the weights before `fully_shard`" in text
