"""Train a stack of `te.ops` MLP blocks that was built on meta, in FP8.

On plain Transformer Engine (2.5 to 2.20) the first backward fails, because the
operation fuser cached the parameters that had no memory:

    python examples/te_ops_fp8.py --plain

One added line makes it train:

    python examples/te_ops_fp8.py

Needs a GPU with FP8 (Ada or newer) and Transformer Engine.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.optim import AdamW

import deferred_init as di


def build(num_blocks: int, width: int) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    options = {"device": "meta", "dtype": torch.bfloat16}
    ops = []
    for _ in range(num_blocks):
        ops += [
            te.ops.RMSNorm(width, **options),
            te.ops.Linear(width, 4 * width, **options),
            te.ops.GELU(),
            te.ops.Linear(4 * width, width, **options),
        ]
    return te.ops.Sequential(*ops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="leave the line out")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this example needs a CUDA device; torch finds none")
        return 77  # as a test runner's "skipped"
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    model = build(options.blocks, options.width)
    optimizer = AdamW(model.parameters(), lr=options.lr)
    if not options.plain:
        print(
            di.materialize(model, "cuda", "fp8_current", optimizers=[optimizer], seed=0)
        )

    x = torch.randn(256, options.width, device="cuda", dtype=torch.bfloat16)
    target = torch.tanh(x)
    for step in range(options.steps):
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            out = model(x)
        loss = torch.nn.functional.mse_loss(out.float(), target.float())
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
