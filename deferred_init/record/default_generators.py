"""The default generators of torch, by device."""

from __future__ import annotations

from typing import Any

import torch

from deferred_init.record.paused import index_of

__all__ = ["default_generator", "full_device"]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if device.type == "cuda":
        torch.cuda.init()
    generator: torch.Generator = module.default_generators[full_device(device).index]
    return generator


def full_device(device: torch.device) -> torch.device:
    """Return a device with its index; the CPU, which is one, without."""
    if device.type == "cpu":
        return torch.device("cpu")
    if index_of(device) is not None:
        return device
    module: Any = torch.get_device_module(device)
    return torch.device(device.type, module.current_device())
