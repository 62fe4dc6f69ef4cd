"""Makes a plain module out of a parametrized one, and parametrizes it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations as parametrizations_of_torch
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deferred_init.reparametrized import is_parametrized, norm_hooks, original_type

__all__ = ["NotKnown", "again", "hook_slots", "parametrized_tensors"]
__all__ += ["plain_stand_in", "restored", "take_missing_buffers"]

_PARAMETRIZATIONS = "parametrizations"


class NotKnown(Exception):
    """How something was made cannot be read off the module; says what."""


def parametrized_tensors(module: nn.Module) -> list[str]:
    """Return the names of the tensors that are computed, in registration order."""
    if is_parametrized(module):
        return list(_lists(module))
    return [hook.name for hook in norm_hooks(module)]


def hook_slots(module: nn.Module) -> list[str]:
    """Return the names of the plain attributes that a norm hook computes."""
    return [hook.name for hook in norm_hooks(module)]


def plain_stand_in(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module of the original class with its tensors on a device.

    Its contents are undefined; children, and everything that is not a tensor or a
    table of the module, are shared.
    """
    kind = original_type(module)
    plain: nn.Module = object.__new__(kind)
    for name, value in vars(module).items():
        copied = value.copy() if isinstance(value, (dict, set)) else value
        vars(plain)[name] = copied
    plain._modules.pop(_PARAMETRIZATIONS, None)
    tensors = [
        (name, _weight_of(module, name)) for name in parametrized_tensors(module)
    ]
    for hook in norm_hooks(module):
        for suffix in ("_g", "_v", "_u", "_orig"):
            plain._parameters.pop(hook.name + suffix, None)
            plain._buffers.pop(hook.name + suffix, None)
        vars(plain).pop(hook.name, None)
    plain._forward_pre_hooks.clear()
    own = [(k, v) for k, v in plain._parameters.items() if v is not None]
    for name, like in [*tensors, *own]:
        if isinstance(like, nn.Parameter):
            data = _empty(like, device)
            made = nn.Parameter(data, requires_grad=like.requires_grad)
            plain._parameters[name] = made
        else:
            plain._buffers[name] = _empty(like, device)
    for name, buffer in list(plain._buffers.items()):
        if buffer is not None and buffer.device != device:
            plain._buffers[name] = _empty(buffer, device)
    _reorder(plain, [name for name, _ in tensors])
    return plain


def again(module: nn.Module, plain: nn.Module, *, check_only: bool = False) -> None:
    """Register on `plain` what is registered on `module`.

    Args:
        module: The parametrized module.
        plain: Its stand-in, initialized.
        check_only: Only see that all of it is known.

    Raises:
        NotKnown: If a parametrization holds tensors and is not one of torch's.
    """
    if is_parametrized(module):
        for name, listed in _lists(module).items():
            for one in listed:
                register = _registration(one, listed.unsafe, plain, name)
                if not check_only:
                    register()
    if check_only:
        return
    for hook in norm_hooks(module):
        if isinstance(hook, SpectralNorm):
            SpectralNorm.apply(
                plain, hook.name, hook.n_power_iterations, hook.dim, hook.eps
            )
        else:
            _apply_weight_norm(plain, hook)


def take_missing_buffers(module: nn.Module, plain: nn.Module) -> None:
    """Take over buffers that registration on meta could not make at all.

    `orthogonal` on meta leaves `base` as None: its `right_inverse` has no kernel there,
    and `ParametrizationList` goes on without it.
    """
    if not is_parametrized(module):
        return
    for name, listed in _lists(module).items():
        made = _lists(plain)[name]
        for one, other in zip(listed, made, strict=True):
            for key, buffer in other._buffers.items():
                if buffer is not None and one._buffers.get(key, buffer) is None:
                    one._buffers[key] = buffer


def restored(module: nn.Module, name: str) -> Tensor:
    """Compute the plain attribute that a norm hook left at registration."""
    hook = next(hook for hook in norm_hooks(module) if hook.name == name)
    if isinstance(hook, SpectralNorm):
        original = getattr(module, f"{name}_orig")
        assert isinstance(original, Tensor)
        return original.data
    with torch.enable_grad():
        computed = hook.compute_weight(module)
    assert isinstance(computed, Tensor)
    return computed


def _lists(module: nn.Module) -> Any:
    """Return the `ModuleDict` of parametrization lists."""
    return module.parametrizations


def _registration(
    one: nn.Module, unsafe: bool, plain: nn.Module, name: str
) -> Callable[[], object]:
    """Return what registers a parametrization again, by torch's own function.

    Raises:
        NotKnown: If it holds tensors and is not one of torch's.
    """
    torchs = parametrizations_of_torch
    if isinstance(one, torchs._WeightNorm):
        return partial(torchs.weight_norm, plain, name, one.dim)
    if isinstance(one, torchs._Orthogonal):
        kind, trivial = one.orthogonal_map.name, hasattr(one, "base")
        return partial(torchs.orthogonal, plain, name, kind, use_trivialization=trivial)
    if isinstance(one, torchs._SpectralNorm):
        times = getattr(one, "n_power_iterations", 1)
        return partial(torchs.spectral_norm, plain, name, times, one.eps, one.dim)
    if [*one.parameters(), *one.buffers()]:
        raise NotKnown(
            f"the parametrization `{type(one).__name__}` of `{name}` holds tensors "
            "of its own"
        )
    register = parametrize.register_parametrization
    return partial(register, plain, name, one, unsafe=unsafe)


def _apply_weight_norm(plain: nn.Module, hook: WeightNorm) -> None:
    """Do what `torch.nn.utils.weight_norm` does, which warns that it is deprecated."""
    weight = plain._parameters.pop(hook.name)
    assert weight is not None
    norm = torch.norm_except_dim(weight, 2, hook.dim)
    plain.register_parameter(f"{hook.name}_g", nn.Parameter(norm.data))
    plain.register_parameter(f"{hook.name}_v", nn.Parameter(weight.data))


def _weight_of(module: nn.Module, name: str) -> Tensor:
    """Return a tensor with the geometry of the one that was parametrized."""
    if is_parametrized(module):
        listed = _lists(module)[name]
        if listed.is_tensor:
            original: Tensor = listed.original
            return original
        if isinstance(listed[0], parametrizations_of_torch._WeightNorm):
            direction: Tensor = listed.original1
            return direction
        raise NotKnown(
            f"the parametrization `{type(listed[0]).__name__}` makes several tensors "
            f"of `{name}`"
        )
    found = getattr(module, f"{name}_orig", None)
    if found is None:
        found = getattr(module, f"{name}_v")
    assert isinstance(found, Tensor)
    return found


def _empty(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        like.size(), like.stride(), dtype=like.dtype, device=device
    )


def _reorder(plain: nn.Module, first: list[str]) -> None:
    """Put the restored parameters first, as a weight stands before its bias."""
    table = plain._parameters
    names = [n for n in first if n in table] + [n for n in table if n not in first]
    items = [(name, table[name]) for name in names]
    table.clear()
    table.update(items)
