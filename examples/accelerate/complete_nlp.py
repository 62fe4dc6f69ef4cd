r"""A classifier trained with accelerate as its users write it, without this library.

    accelerate launch --config_file examples/accelerate/cpu.yaml \
        examples/accelerate/complete_nlp.py

With gradient accumulation, checkpoints, resumption and evaluation over all processes.
The data are made up, so that nothing has to be downloaded. `docs/accelerate.md` shows
the three lines that change. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

VOCABULARY = 64
BATCH = {"train": 4, "eval": 8}


class Sentences(Dataset):
    """Rows of tokens; the label says whether the first token occurs again."""

    def __init__(self, count: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, VOCABULARY, (count, length), generator=generator)
        self.tokens[::2, -1] = self.tokens[::2, 0]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the inputs of a row and its label."""
        row = self.tokens[index]
        label = (row[1:] == row[0]).any().long()
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": label,
        }


def get_dataloaders() -> dict[str, DataLoader]:
    return {
        "train": DataLoader(Sentences(96, 12, 0), BATCH["train"], shuffle=True),
        "eval": DataLoader(Sentences(32, 12, 1), BATCH["eval"]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16", "fp8"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--checkpointing_steps", type=int)
    parser.add_argument("--resume_from_checkpoint", type=Path)
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def evaluate(accelerator: Accelerator, model: torch.nn.Module, data: DataLoader) -> str:
    model.eval()
    right = count = 0
    for batch in data:
        with torch.no_grad():
            guesses = model(**batch).logits.argmax(dim=-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += int((guesses == labels).sum())
        count += len(labels)
    return f"{right} of {count} right"


def train(arguments: argparse.Namespace) -> None:
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        project_dir=arguments.output_dir,
    )
    set_seed(42)
    data = get_dataloaders()
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=arguments.lr)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=4,
        num_training_steps=len(data["train"]) * arguments.num_epochs,
    )
    model, optimizer, data["train"], data["eval"], scheduler = accelerator.prepare(
        model, optimizer, data["train"], data["eval"], scheduler
    )
    accelerator.register_for_checkpointing(scheduler)

    overall_step = starting_epoch = skipped = 0
    if arguments.resume_from_checkpoint is not None:
        accelerator.load_state(arguments.resume_from_checkpoint)
        overall_step = int(arguments.resume_from_checkpoint.name.split("_")[-1])
        starting_epoch, skipped = divmod(overall_step, len(data["train"]))

    for epoch in range(starting_epoch, arguments.num_epochs):
        model.train()
        data["train"].set_epoch(epoch)
        batches = accelerator.skip_first_batches(data["train"], skipped)
        skipped = 0
        total_loss = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            overall_step += 1
            every = arguments.checkpointing_steps
            if every is not None and overall_step % every == 0:
                folder = arguments.output_dir / f"step_{overall_step}"
                accelerator.save_state(str(folder))
        metric = evaluate(accelerator, model, data["eval"])
        total = accelerator.reduce(total_loss).item()
        accelerator.print(f"epoch {epoch}: loss {total!r}, {metric}")

    if arguments.output_dir is not None:
        accelerator.save_model(model, arguments.output_dir / "final")
    # DDP has to go before its process group does: torch may hang at exit otherwise.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    train(parse())
