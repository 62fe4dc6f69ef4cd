"""Hugging Face's `Trainer` with a model that was built without memory.

    python examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py

Runs on CPUs or GPUs. Exits with 77 where transformers or accelerate is missing.
"""

from __future__ import annotations

import sys
import tempfile

import torch

from deferred_init.integrations.trainer import model_init

try:
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError as error:
    print(f"needs transformers and accelerate: {error}")
    sys.exit(77)


def main() -> None:
    """Train a small Llama for a few steps, once fresh and once from its weights."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    data = [{"input_ids": row, "labels": row} for row in _tokens()]
    cpu = not torch.cuda.is_available()
    state = PartialState(cpu=cpu)
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # that of the first rank
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=cpu,
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        make = model_init(LlamaForCausalLM, config)
        trainer = Trainer(model_init=make, args=arguments, train_dataset=data)
        fresh = trainer.train().training_loss
        state.print(make.report)  # type: ignore[attr-defined]
        trainer.save_model(f"{folder}/trained")
        state.wait_for_everyone()

        again = model_init(
            LlamaForCausalLM, config, options={"weights": f"{folder}/trained"}
        )
        trainer = Trainer(model_init=again, args=arguments, train_dataset=data)
        loaded = trainer.train().training_loss
        state.wait_for_everyone()
    state.print(
        f"mean loss from fresh values {fresh:.4f}, from trained ones {loaded:.4f}"
    )
    assert loaded < fresh
    del trainer  # DDP has to go before its process group does
    state.destroy_process_group()


def _tokens() -> torch.Tensor:
    return torch.arange(64)[:, None].add(torch.arange(16)).remainder(100)


if __name__ == "__main__":
    main()
