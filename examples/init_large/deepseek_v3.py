r"""A mixture of experts of DeepSeek-V3's shape, 671 billion parameters.

The plan, in seconds and without memory:

    python examples/init_large/deepseek_v3.py --size 671b --plan \
        --gpu h200 --world-size 256

A small one for real, on CPUs as well:

    python examples/init_large/deepseek_v3.py --size tiny --save /tmp/seed
    torchrun --nproc-per-node 2 examples/init_large/deepseek_v3.py --size tiny

Needs transformers.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.init_large.run import run

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# The library's defaults are the published shape.
SHAPES: dict[str, dict[str, int]] = {"tiny": TINY, "671b": {}}


def deepseek_v3(size: str) -> nn.Module:
    """Return a DeepSeek-V3 of a size, in BF16, as its constructor makes it."""
    config = DeepseekV3Config(**SHAPES[size])
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


deepseek_v3_tiny = partial(deepseek_v3, "tiny")
deepseek_v3_671b = partial(deepseek_v3, "671b")


if __name__ == "__main__":
    sizes = {size: partial(deepseek_v3, size) for size in SHAPES}
    sys.exit(run(sizes, "model.layers"))
