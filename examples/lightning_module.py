"""Lightning with a model that was built without memory.

    python examples/lightning_module.py

Runs on a CPU or a GPU. Exits with 77 where Lightning (`pip install lightning`) is
missing.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import deferred_init as di
from deferred_init.integrations.lightning import configure_model

try:
    from lightning.pytorch import LightningModule, Trainer
except ImportError as error:
    print(f"needs lightning: {error}")
    sys.exit(77)


class Net(nn.Module):
    """A small language model whose head is tied to its embedding."""

    def __init__(self, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        logits: Tensor = self.head(self.inner(self.embed(tokens)))
        return logits


class Lit(LightningModule):  # type: ignore[misc]
    """Trains `Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = di.deferred_init(Net)

    def configure_model(self) -> None:
        """Give the model memory where the trainer wants it."""
        report = configure_model(self, "model", seed=0)
        if report is not None:
            print(report)

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        """Return the loss of a batch."""
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the parameters, which are real by now."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train a few steps."""
    tokens = torch.arange(32)[:, None].add(torch.arange(9)).remainder(64)
    module = Lit()
    trainer = Trainer(
        max_epochs=2,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tokens, batch_size=8))
    loss = module.training_step(tokens.to(module.device), 0).item()
    print(f"ready: {di.audit(module).ok}; loss {loss:.4f}")


if __name__ == "__main__":
    main()
