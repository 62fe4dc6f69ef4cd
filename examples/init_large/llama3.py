r"""Llama 3.1 with 8, 70 and 405 billion parameters: plan on a laptop, make on GPUs.

The plan, in seconds and without memory:

    python examples/init_large/llama3.py --size 405b --recipe bf16 --plan \
        --gpu h200 --world-size 512

A small one for real, on CPUs as well, and a seed checkpoint that any number of ranks
can load, with the same values whatever number wrote it:

    python examples/init_large/llama3.py --size tiny --save /tmp/seed
    torchrun --nproc-per-node 2 examples/init_large/llama3.py --size tiny

Needs transformers. With an FP8 recipe (`--recipe fp8_current`) the layers become those
of Transformer Engine, which has to be installed too. `deferred-init plan
examples.init_large.llama3:llama3_405b` does the same from the command line.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.init_large.run import run

# hidden, intermediate, layers, heads, key-value heads, vocabulary; the published ones.
SHAPES = {
    "tiny": (64, 192, 2, 4, 2, 512),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
    "405b": (16384, 53248, 126, 128, 8, 128256),
}
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3(size: str) -> nn.Module:
    """Return a Llama 3.1 of a size, in BF16, as its constructor makes it."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        rope_parameters=dict(SCALED_ROPE),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


llama3_tiny = partial(llama3, "tiny")
llama3_8b = partial(llama3, "8b")
llama3_70b = partial(llama3, "70b")
llama3_405b = partial(llama3, "405b")


if __name__ == "__main__":
    sizes = {size: partial(llama3, size) for size in SHAPES}
    sys.exit(run(sizes, "model.layers"))
