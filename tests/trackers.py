"""A tracker of named generators, as Megatron and Transformer Engine keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Tracker", "assert_alike"]

_SEEDS = {"model-parallel-rng": 7, "experts": 9, "rest": 2}


class Tracker:
    """Keeps a state for each name, and puts one into the default generator for a while.

    Args:
        device: Whose default generator: `"cpu"` or `"cuda"`.
        **seeds: A seed for each name; by default for three of them.
    """

    def __init__(self, device: str = "cpu", **seeds: int) -> None:
        on_cpu = device == "cpu"
        self._torch: Any = torch if on_cpu else torch.cuda
        self._seed: Any = (
            torch.default_generator if on_cpu else torch.cuda
        ).manual_seed
        self.states: dict[str, Tensor] = {}
        for name, seed in (seeds or _SEEDS).items():
            self.add(name, seed)

    def add(self, name: str, seed: int) -> None:
        before = self._torch.get_rng_state()
        self._seed(seed)
        self.states[name] = self._torch.get_rng_state()
        self._torch.set_rng_state(before)

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = dict(states)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = self._torch.get_rng_state()
        self._torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._torch.get_rng_state()
            self._torch.set_rng_state(outer)


def _states(tracker: Any) -> dict[str, Tensor]:
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }


def assert_alike(
    eager: nn.Module | None, model: nn.Module | None, theirs: Any, own: Any
) -> None:
    """Assert equal parameters, on equal devices, and equal states of two trackers."""
    if eager is not None and model is not None:
        pairs = zip(eager.named_parameters(), model.named_parameters(), strict=True)
        for (name, one), (_, other) in pairs:
            assert one.device == other.device, name
            assert torch.equal(one, other), name
    expected, found = _states(theirs), _states(own)
    assert expected.keys() == found.keys()
    for name, state in expected.items():
        assert torch.equal(state, found[name]), name
