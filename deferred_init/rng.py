"""Random number policies: `eager` (the stream of eager construction) and `by_name`.

`eager` runs the steps in construction order on the target device's default
generator, so that values and the final state are those of eager construction.
`by_name` seeds the generator anew for each tensor, from the seed and the tensor's
qualified name, so that a tensor's values do not depend on which others are made;
the generators end as they began. `fast` (see `fast/policy.py`) is `by_name` with a
generator of our own for fills of whole tensors.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from deferred_init.aliases import storage_key
from deferred_init.dispatch import DispatchMode
from deferred_init.handlers.protocol import Step
from deferred_init.tensor_names import TensorNames

__all__ = ["BY_NAME", "POLICIES", "ByName", "Eager", "GeneratorSnapshot", "NamedDraws"]
__all__ += ["seed_all", "seed_for_name"]

_NOTHING = nullcontext()
POLICIES = ("eager", "by_name", "fast")
BY_NAME = frozenset({"by_name", "fast"})
"""Policies whose values depend on names and a seed, and on no order."""
_EMPTY_LIKE = torch.ops.aten.empty_like.default


class GeneratorSnapshot:
    """States of every generator that an init function may draw from.

    These are torch's default generators of the CPU and of the target device,
    Python's `random`, and numpy's global one where `numpy.random` is imported: numpy 2
    does so at its first use, which takes milliseconds, and nobody can have seeded it
    before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.random.get_rng_state()
        self._accelerator = _get_device_state(device)
        self._python = random.getstate()
        numpy_random = sys.modules.get("numpy.random")
        self._numpy: Any = None if numpy_random is None else numpy_random.get_state()

    def restore(self) -> None:
        """Put all generators back."""
        torch.random.set_rng_state(self._cpu)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(
                self._accelerator, self._device
            )
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def seed_all(seed: int, device: torch.device) -> None:
    """Do what `torch.manual_seed(seed)` does, for the CPU and one device only."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        with torch.get_device_module(device).device(device):
            torch.get_device_module(device).manual_seed(seed)


def seed_for_name(seed: int, name: str, ordinal: int) -> int:
    """Return the seed for the n-th random operation on the tensor of a name.

    The first 63 bits of SHA-256 over `"{seed}:{name}:{ordinal}"`, little-endian.
    """
    digest = hashlib.sha256(f"{seed}:{name}:{ordinal}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & 0x7FFF_FFFF_FFFF_FFFF


class Eager:
    """Leave the stream alone: the order of the steps is what makes it right."""

    name = "eager"

    def step(self, step: Step) -> AbstractContextManager[object]:
        """Run one step."""
        return _NOTHING


class ByName:
    """Seed before each random operation, from the seed and the tensor's name.

    See `seed_for_name`. Operations on temporaries (the QR input of
    `orthogonal_`) count for the module, under its name.

    Args:
        seed: The job's seed.
        device: The device whose generator is seeded.
        names: The names of tensors and modules.
    """

    name = "by_name"

    def __init__(self, seed: int, device: torch.device, names: TensorNames) -> None:
        self._seed = seed
        self._device = device
        self._names = names

    def step(self, step: Step) -> AbstractContextManager[object]:
        """Run one step with every random operation seeded by name."""
        return NamedDraws(self._seed, self._device, step, self._names)


class NamedDraws(DispatchMode):
    """Finds out which tensor a random operation is for, and seeds it by name.

    A tensor that is made like a claimed one without memory, to be filled in its place,
    goes by its name: so Transformer Engine makes weights that it will quantize.

    Args:
        seed: The job's seed.
        device: The device whose generator is seeded.
        step: The step that is run.
        names: The names of tensors and modules.
    """

    def __init__(
        self, seed: int, device: torch.device, step: Step, names: TensorNames
    ) -> None:
        super().__init__()
        self.seed = seed
        self._device = device
        self._names = names
        self._owner = names.of_module(step.site.module, step.site.fqn)
        self._step = step
        self._counts: dict[str, int] = {}
        self._made_like: tuple[Tensor, str] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, a random one with numbers of its own."""
        kwargs = kwargs or {}
        target = args[0] if args else None
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = self._name_of(target)
            ordinal = self._counts.get(name, 0)
            self._counts[name] = ordinal + 1
            self._made_like = None
            return self.draw(name, ordinal, func, args, kwargs)
        if func is _EMPTY_LIKE and target is not None and target.is_meta:
            self._made_like = None
            made, name = func(*args, **kwargs), self._name_of(target)
            if name != self._owner:
                self._made_like = made, name
            return made
        if self._made_like is not None and not func.is_view and self._is_made(target):
            self._made_like = None  # it may go, and its memory be another's
        return func(*args, **kwargs)

    def draw(
        self, name: str, ordinal: int, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run the n-th random operation on the tensor of a name."""
        seed_all(seed_for_name(self.seed, name, ordinal), self._device)
        return func(*args, **kwargs)

    def _is_made(self, target: object) -> bool:
        if self._made_like is None or not isinstance(target, Tensor):
            return False
        return storage_key(target) == storage_key(self._made_like[0])

    def _name_of(self, target: object) -> str:
        if not isinstance(target, Tensor):
            return self._owner
        if self._made_like is not None and self._is_made(target):
            return self._made_like[1]
        key = storage_key(target)
        claim = self._step.claim
        for slot in (*claim.slots, *claim.rewrites):
            # What stands there now: under staging that is a tensor of full size.
            if storage_key(slot.read()) == key:
                return self._names.of(slot)
        return self._owner


def _get_device_state(device: torch.device) -> Tensor | None:
    if device.type in ("cpu", "meta"):
        return None
    state = torch.get_device_module(device).get_rng_state(device)
    assert isinstance(state, Tensor)
    return state
