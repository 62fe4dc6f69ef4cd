"""One forward and backward pass for models of unknown kind, on made-up inputs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

__all__ = ["train_step"]

_TOKENS, _FRAMES, _SAMPLES = 12, 128, 4000


def train_step(model: nn.Module, seed: int = 7) -> tuple[float | None, str]:
    """Run one pass and return the loss, or None and why no made-up input fits.

    The loss is the mean square of all outputs; it is NaN if a gradient is.
    """
    reason = "no input known for this forward signature"
    torch.manual_seed(seed)
    for inputs in _candidates(model):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        numpy.random.seed(seed)  # masks of speech models
        random.seed(seed)
        try:
            loss = _loss(model(**inputs))
            if loss is None:
                reason = "no output depends on a parameter"
                continue
            loss.backward()
        except Exception as error:  # noqa: BLE001 - these inputs do not fit
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        return (loss.item() if finite else float("nan")), ""
    return None, reason


def _loss(output: Any) -> Tensor | None:
    parts = [t.float().pow(2).mean() for t in _tensors(output)]
    return torch.stack(parts).mean() if parts else None


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.numel() and not value.is_complex():
            yield value
    elif depth < 4 and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth + 1)


def _candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    names = set(inspect.signature(model.forward).parameters)
    config: Any = model.config
    images = [
        {"pixel_values": torch.rand(1, channels, side, side)}
        for channels in (_field(config, "num_channels", 3), 3)
        for side in dict.fromkeys((_side(config), 224, 64))
    ]
    makers: dict[str, list[dict[str, Any]]] = {
        "input_ids": [{"input_ids": _tokens(config)}],
        "pixel_values": images,
        "pixel_values_videos": [{"pixel_values_videos": torch.rand(1, 16, 3, 32, 32)}],
        "input_features": [
            {"input_features": torch.rand(1, *shape)}
            for bins in (_field(config, "num_mel_bins", 80), 80, 128)
            for shape in ((bins, _FRAMES), (_FRAMES, bins), (bins, 3000))
        ],
        "input_values": [
            {"input_values": torch.rand(1, _SAMPLES)},
            {"input_values": torch.rand(1, 1, _SAMPLES)},
            {"input_values": torch.rand(1, 1024, 128)},
        ],
        "inputs_embeds": [
            {"inputs_embeds": torch.rand(1, _TOKENS, _field(config, "hidden_size", 64))}
        ],
        "hidden_states": [
            {"hidden_states": torch.rand(1, _TOKENS, _field(config, "hidden_size", 64))}
        ],
        "past_values": [
            {
                "past_values": torch.rand(
                    1,
                    _field(config, "context_length", 32),
                    _field(config, "num_input_channels", 1),
                )
            }
        ],
    }
    main = getattr(model, "main_input_name", "input_ids")
    order = sorted(makers, key=lambda name: name != main)
    for name in order:
        if name in names:
            for inputs in makers[name]:
                yield from _completed(inputs, names, config)
    for image in images:  # models of two towers
        if {"input_ids", "pixel_values"} <= names:
            yield from _completed(
                {**image, "input_ids": _tokens(config)}, names, config
            )


def _completed(
    inputs: dict[str, Any], names: set[str], config: Any
) -> Iterator[dict[str, Any]]:
    """The inputs as they are, and with the decoder's tokens."""
    if "decoder_input_ids" in names:
        yield {**inputs, "decoder_input_ids": _tokens(config)}
    yield inputs
    if "bbox" in names:
        yield {**inputs, "bbox": torch.zeros(1, _TOKENS, 4, dtype=torch.long)}


def _tokens(config: Any) -> Tensor:
    vocab = min(_field(config, "vocab_size", 100), 100)
    return torch.arange(_TOKENS)[None] % max(vocab - 6, 1) + 3


def _side(config: Any) -> int:
    side = _field(config, "image_size", 224)
    return side[0] if isinstance(side, (list, tuple)) else side


def _field(config: Any, name: str, default: Any) -> Any:
    """Look into a config and its sub-configs."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    for key in getattr(config, "sub_configs", {}):
        value = getattr(getattr(config, key, None), name, None)
        if value is not None:
            return value
    return default
