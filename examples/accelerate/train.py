r"""Train with accelerate and the plugin: one GPU, DDP, FSDP, tensor parallelism, FP8.

    accelerate launch --config_file examples/accelerate/cpu.yaml \
        examples/accelerate/train.py

On two CPUs, with and without accelerate's launcher:

    ACCELERATE_USE_CPU=true accelerate launch \
        --config_file examples/accelerate/ddp.yaml examples/accelerate/train.py
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/accelerate/train.py

The other `.yaml` files of this folder begin with the commands for them. Needs
transformers and accelerate; FP8 recipes need Transformer Engine and a GPU as well.
"""

from __future__ import annotations

import argparse

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import deferred_init as di
from deferred_init.integrations.accelerate_plugin import (
    Accelerator,
    DeferredInitPlugin,
)


def main() -> None:
    """Train a small Llama for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tied", action="store_true", help="no head of its own")
    arguments = parser.parse_args()

    plugin = DeferredInitPlugin(recipe=arguments.recipe)
    accelerator = Accelerator(deferred_init=plugin)
    set_seed(0)  # the plugin goes on with the generators as it finds them
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=arguments.tied,
    )
    model = di.deferred_init(LlamaForCausalLM, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    tokens = torch.arange(64 * 32).reshape(64, 32) % 250
    loader = DataLoader(tokens, batch_size=4, shuffle=True)

    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    for report in accelerator.deferred_init_reports:
        accelerator.print(report)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"loss after {len(loader)} steps: {loss.item():.4f}")
    # DDP has to go before its process group does: torch may hang at exit otherwise.
    model, optimizer, loader, scheduler = accelerator.free_memory(
        model, optimizer, loader, scheduler
    )
    del loss, batch
    accelerator.end_training()


if __name__ == "__main__":
    main()
