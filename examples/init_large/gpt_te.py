r"""GPT-style models of Transformer Engine's `TransformerLayer`, up to GPT-3's 175 B.

The plan, in seconds and without memory or a GPU:

    python examples/init_large/gpt_te.py --size 175b --recipe fp8_current --plan \
        --gpu h200 --world-size 64

A small one for real, on CPUs as well, and a seed checkpoint that any number of ranks
can load; with weights that are stored in FP8 on a GPU only:

    python examples/init_large/gpt_te.py --size tiny --save /tmp/seed
    torchrun --nproc-per-node 2 examples/init_large/gpt_te.py --size tiny
    python examples/init_large/gpt_te.py --size tiny --recipe fp8_current

Needs Transformer Engine; exits with 77 where that cannot be imported.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.init_large.run import NEEDS_OTHER_HARDWARE, run

try:
    import transformer_engine.pytorch as te
except (ImportError, OSError) as error:
    print(f"Transformer Engine cannot be imported: {error}")
    sys.exit(NEEDS_OTHER_HARDWARE)

# hidden, layers, heads, vocabulary (padded for FP8), positions
SHAPES = {
    "tiny": (128, 2, 4, 512, 128),
    "1.3b": (2048, 24, 16, 50304, 2048),
    "13b": (5120, 40, 40, 50304, 2048),
    "175b": (12288, 96, 96, 50304, 2048),
}


class GPT(nn.Module):
    """A decoder of fused layers, whose head is tied to its embedding."""

    def __init__(
        self, hidden: int, layers: int, heads: int, vocabulary: int, positions: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16)
        self.positions = nn.Embedding(positions, hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                heads,
                layer_number=number + 1,
                self_attn_mask_type="causal",
                params_dtype=torch.bfloat16,
                fuse_qkv_params=True,
            )
            for number in range(layers)
        )
        self.norm = te.LayerNorm(hidden, dtype=torch.bfloat16)
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token; tokens are (sequence, batch)."""
        places = torch.arange(tokens.shape[0], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)[:, None]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt(size: str) -> nn.Module:
    """Return a GPT of a size, in BF16."""
    return GPT(*SHAPES[size])


gpt_tiny = partial(gpt, "tiny")
gpt_175b = partial(gpt, "175b")


if __name__ == "__main__":
    sizes = {size: partial(gpt, size) for size in SHAPES}
    sys.exit(run(sizes, "layers", convert=False))
