"""Whatever is sent to an accelerator inside `on_meta` stays without memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "to a number": lambda t: t.to(0),
    "to a number, by name": lambda t: t.to(device=1),
    "to a number with a dtype": lambda t: t.to(0, torch.float64),
    "to a name": lambda t: t.to("cuda:0"),
    "cuda": lambda t: t.cuda(),
    "cuda with a number": lambda t: t.cuda(0),
    "made on a number": lambda t: torch.empty_like(t, device=0),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_is_sent_to_an_accelerator_is_on_meta(way: str) -> None:
    with di.on_meta():
        table = torch.ones(2, device="cpu")
        sent = WAYS[way](table)
    assert not table.is_meta
    assert sent.is_meta
    assert sent.dtype == (torch.float64 if "dtype" in way else torch.float32)


@pytest.mark.parametrize("send", [lambda m: m.to(0), lambda m: m.cuda(0)])
def test_a_module_that_is_sent_to_a_number_is_on_meta(
    send: Callable[[nn.Module], nn.Module],
) -> None:
    with di.on_meta():
        model = send(nn.Linear(2, 2, device="cpu"))
    assert all(param.is_meta for param in model.parameters())
