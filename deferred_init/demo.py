"""The main job on a real model: GPT-2 from nothing to trained steps.

The model is built without memory, AdamW is built on it while it has none, it is
materialized, compared tensor by tensor with eager construction under the same seed,
and trained. Nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from deferred_init.aliases import dense_bytes
from deferred_init.api import materialize
from deferred_init.comparison import Comparison, compare, named_tensors
from deferred_init.errors import PlanError, listing
from deferred_init.target import build_deferred

__all__ = ["DemoOptions", "run_demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How much the demo does, and where.

    Args:
        device: None picks a GPU when there is one.
        seed: Seeds construction, here and in the eager twin.
        num_steps: Training steps.
        batch_size: Sequences in the batch of random tokens.
        sequence_length: Tokens per sequence.
        config: Overrides of `GPT2Config`, for a smaller model.
    """

    device: str | None = None
    seed: int = 0
    num_steps: int = 3
    batch_size: int = 1
    sequence_length: int = 64
    config: tuple[tuple[str, int], ...] = ()


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the demo.

    Args:
        options: How much to do, and where.
        say: Receives lines of text for a person.

    Returns:
        What happened, as plain data; `ok` is False if anything was wrong.

    Raises:
        PlanError: transformers is not installed, or the device does not exist.
    """
    device = _device(options.device)
    build = _constructor(options)
    say(f"GPT-2 from nothing to training, on {device}, torch {torch.__version__}\n")
    started = time.perf_counter()
    model = build_deferred(build)
    build_s = time.perf_counter() - started
    say(f"1. built without memory in {build_s:.2f} s: {_size_text(model)}")
    optimizer = AdamW(model.parameters(), lr=1e-4)
    say("2. built AdamW on parameters that have no memory yet")
    report = materialize(model, device, optimizers=[optimizer], seed=options.seed)
    say("3. materialized\n")
    say(f"{report}\n")
    state = _generator_state(device)
    comparison, generator_equal = _compare_with_eager(
        model, build, device, options.seed, state
    )
    say(f"4. {_comparison_text(comparison, generator_equal, options.seed)}")
    losses, untrained = _train(model, optimizer, device, options)
    say(f"5. {_training_text(losses, untrained)}")
    ok = (
        report.ok
        and comparison.ok
        and generator_equal
        and not untrained
        and losses[-1] < losses[0] < float("inf")
    )
    say(f"\n{'OK' if ok else 'NOT OK: see the lines above'}")
    return {
        "ok": ok,
        "device": str(device),
        "build_s": build_s,
        "report": report.to_dict(),
        "comparison": asdict(comparison),
        "generator_equal": generator_equal,
        "losses": losses,
        "untrained": untrained,
    }


def _device(name: str | None) -> torch.device:
    if name is not None:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _constructor(options: DemoOptions) -> Callable[[], nn.Module]:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise PlanError(
            f"the demo needs transformers, which could not be imported ({error}); "
            'install it with pip install "deferred-init[hf]"'
        ) from error
    config = GPT2Config(**dict(options.config))
    return lambda: GPT2LMHeadModel(config)


def _compare_with_eager(
    model: nn.Module,
    build: Callable[[], nn.Module],
    device: torch.device,
    seed: int,
    state: Tensor,
) -> tuple[Comparison, bool]:
    """Build the eager twin, compare, and free it again."""
    torch.manual_seed(seed)
    with device:
        eager = build()
    generator_equal = torch.equal(state, _generator_state(device))
    return compare(model, eager), generator_equal


def _train(
    model: nn.Module, optimizer: Optimizer, device: torch.device, options: DemoOptions
) -> tuple[list[float], list[str]]:
    """Train on one batch of random tokens, so that the loss has to fall.

    Returns:
        The losses, and the names of parameters that no step changed.
    """
    shape = (options.batch_size, options.sequence_length)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    tokens = torch.randint(vocabulary, shape, device=device)
    before = {name: _checksum(p) for name, p in model.named_parameters()}
    model.train()
    losses = []
    for _ in range(options.num_steps):
        optimizer.zero_grad()
        loss = _next_token_loss(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(_next_token_loss(model, tokens).item())
    untrained = [n for n, p in model.named_parameters() if _checksum(p) == before[n]]
    return losses, untrained


def _next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _checksum(tensor: Tensor) -> float:
    return tensor.detach().abs().sum(dtype=torch.float64).item()


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = getattr(torch, device.type).get_rng_state(device)
    return state


def _size_text(model: nn.Module) -> str:
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    real = [t for _, t in named_tensors(model) if t.device.type != "meta"]
    held = sum(dense_bytes(t) for t in real)
    return f"{count / 1e6:.1f} M parameters in {len(parameters)} tensors, {held} bytes"


def _comparison_text(found: Comparison, generator_equal: bool, seed: int) -> str:
    differing = (*found.unequal, *found.misshapen)
    text = (
        f"compared with eager construction, seed {seed}: "
        f"{found.num_tensors - len(differing)} of {found.num_tensors} tensors bit-equal"
        f", generator state {'equal' if generator_equal else 'DIFFERENT'}"
    )
    for what, names in (
        ("other values", found.unequal),
        ("other dtype, shape, strides, device or flag", found.misshapen),
        ("ties not kept", found.broken_ties),
    ):
        if names:
            text += f"\n   {what}: {listing(names)}"
    return text


def _training_text(losses: list[float], untrained: list[str]) -> str:
    path = " -> ".join(f"{loss:.3f}" for loss in losses)
    text = f"trained {len(losses) - 1} steps on one batch of random tokens: loss {path}"
    if untrained:
        text += f"\n   never changed: {listing(untrained)}"
    return text
