"""Checks of the caller's arguments, all before anything is looked at in depth."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from deferred_init.distributed.fsdp2 import split_ties
from deferred_init.errors import PlanError, listing
from deferred_init.handlers.protocol import Request
from deferred_init.loading.matching import WeightsRequest
from deferred_init.recipe import Recipe
from deferred_init.rng import BY_NAME, POLICIES
from deferred_init.slots import Inventory, ModuleSite, SlotKind
from deferred_init.sources.layout import LayoutRule, check_rule
from deferred_init.sources.opening import open_source

__all__ = ["as_optimizers", "check_verify", "make_request", "make_weights"]
__all__ += ["device_or_default", "resolve_device", "wrapper_problems"]

_VERIFY = ("fast", "full")
_MISSING = ("init", "error", "any")
_UNEXPECTED = ("ignore", "error")
_WRAP_AFTER = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "wrap it in DDP",
    "torch.nn.parallel.data_parallel.DataParallel": "wrap it in DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "wrap it in FSDP1"
    ),
    "torch.jit._script.RecursiveScriptModule": "script it",
}


def as_optimizers(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Return the optimizers as a tuple; one alone is accepted."""
    if hasattr(optimizers, "param_groups"):
        return (optimizers,)  # type: ignore[return-value]
    found = tuple(optimizers)
    wrong = [type(o).__name__ for o in found if not hasattr(o, "param_groups")]
    if wrong:
        raise TypeError(f"expected torch optimizers in `optimizers`, got {wrong}")
    return found


def make_request(
    device: torch.device | str | int,
    recipe: object,
    *,
    rng: str,
    verify: str,
    dtype: torch.dtype | None,
    seed: int | None = None,
    values_from: str | None = None,
    broadcast_from: int | None = None,
    rank_timeout_s: float = 300.0,
    must_exist: bool = True,
) -> Request:
    """Turn arguments into a request.

    Args:
        device: Where to; becomes a `torch.device` with an index.
        recipe: Whatever `Recipe.load` takes, or None.
        rng: Name of a policy.
        verify: `"fast"` or `"full"`.
        dtype: A floating-point dtype, or None.
        seed: Needed by every policy but `"eager"`.
        values_from: None or `"cpu"`.
        broadcast_from: A rank of the default process group, or None.
        rank_timeout_s: Seconds, more than 0.
        must_exist: Whether the device has to be there; False to plan elsewhere.

    Raises:
        ValueError: An unknown policy, or a device that does not exist.
        TypeError: `dtype` is not a floating-point `torch.dtype`.
        PlanError: A CUDA graph is being captured.
    """
    if rng not in POLICIES:
        raise ValueError(f"rng must be one of {POLICIES}, found {rng!r}")
    check_verify(verify)
    if values_from not in (None, "cpu"):
        raise ValueError(f"values_from must be None or 'cpu', found {values_from!r}")
    if not rank_timeout_s > 0:
        raise ValueError(f"rank_timeout_s must be positive, found {rank_timeout_s!r}")
    if broadcast_from is not None:
        _check_source(broadcast_from)
    if rng in BY_NAME and seed is None and must_exist:
        raise ValueError(f'rng="{rng}" needs a seed: pass seed=<int>')
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise TypeError(f"dtype must be a floating-point torch.dtype, found {dtype!r}")
    resolved = resolve_device(device, must_exist)
    _check_no_capture(resolved)
    return Request(
        device=resolved,
        recipe=None if recipe is None else Recipe.load(recipe),
        dtype=dtype,
        rng=rng,
        verify=verify,
        seed=seed,
        values_from=values_from,
        broadcast_from=broadcast_from,
        rank_timeout_s=rank_timeout_s,
    )


def check_verify(verify: str) -> None:
    """Check how thoroughly the audit shall look.

    Raises:
        ValueError: Neither `"fast"` nor `"full"`.
    """
    if verify not in _VERIFY:
        raise ValueError(f"verify must be one of {_VERIFY}, found {verify!r}")


def _check_source(rank: int) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"broadcast_from={rank} needs a process group: call "
            "torch.distributed.init_process_group first"
        )
    if rank not in range(dist.get_world_size()):
        raise ValueError(
            f"broadcast_from must be a rank of 0 to {dist.get_world_size() - 1}, "
            f"found {rank!r}"
        )


def make_weights(
    weights: object, names: object, missing: str, unexpected: str
) -> WeightsRequest | None:
    """Open weights and check what goes with them.

    Args:
        weights: What `open_source` takes, or None.
        names: A mapping of pattern to template, or a sequence of such mappings and
            layout rules.
        missing: `"init"`, `"error"` or `"any"`.
        unexpected: `"ignore"` or `"error"`.

    Raises:
        ValueError: An unknown policy, an invalid pattern, or `names` without weights.
        TypeError: `weights` or something in `names` is of the wrong kind.
        PlanError: The weights cannot be opened.
    """
    if missing not in _MISSING:
        raise ValueError(f"missing must be one of {_MISSING}, found {missing!r}")
    if unexpected not in _UNEXPECTED:
        raise ValueError(
            f"unexpected must be one of {_UNEXPECTED}, found {unexpected!r}"
        )
    renames: list[tuple[str, str]] = []
    rules: list[LayoutRule] = []
    for item in (names,) if isinstance(names, Mapping) else _iterate(names):
        if isinstance(item, Mapping):
            renames += [(str(key), str(value)) for key, value in item.items()]
        elif isinstance(item, LayoutRule):
            rules.append(item)
        else:
            raise TypeError(
                "expected mappings of pattern to template and layout rules (Fuse, "
                "Split, Stack, Unstack, Transpose) in `names`, got "
                f"{type(item).__name__}"
            )
    for pattern, _ in renames:
        check_rule(pattern, 0)
    if weights is None:
        if renames or rules:
            raise ValueError("`names` says how weights are named: pass weights= too")
        return None
    return WeightsRequest(
        source=open_source(weights),
        renames=tuple(renames),
        rules=tuple(rules),
        missing=missing,
        unexpected=unexpected,
    )


def _iterate(names: object) -> tuple[object, ...]:
    if not isinstance(names, Iterable) or isinstance(names, str):
        raise TypeError(f"expected a mapping or a sequence as `names`, got {names!r}")
    return tuple(names)


@functools.lru_cache(maxsize=1024)
def _wrap_after(kind: Any) -> tuple[str, ...]:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return tuple(_WRAP_AFTER[name] for name in names if name in _WRAP_AFTER)


def _any_deferred(wrapper: ModuleSite) -> bool:
    """Whether deferred tensors are registered in a wrapper.

    FSDP1 also lists what it ignores, in attributes of each of its units.
    """
    sites = [wrapper]
    while sites:
        site = sites.pop()
        if any(s.deferred and s.kind is not SlotKind.ATTRIBUTE for s in site.slots):
            return True
        sites += [child for child in site.children if child.registered]
    return False


def wrapper_problems(inventory: Inventory) -> list[str]:
    """Name wrappers that keep copies of their own of what would be materialized."""
    problems = []
    for site in inventory.sites():
        kind: Any = type(site.module)
        for action in _wrap_after(kind):
            if _any_deferred(site):
                problems.append(
                    f"`{site.fqn or '(root)'}` is a `{type(site.module).__name__}` "
                    "around deferred parameters, of which it keeps its own records: "
                    f"materialize the bare model first, then {action}"
                )
    modules = [(site.fqn, site.module) for site in inventory.sites()]
    for names in split_ties(modules):
        problems.append(
            f"{listing(names)} are one parameter, which FSDP2 was told to manage in "
            "two groups: shard the modules that share it in one call, "
            "`fully_shard([first, second])`"
        )
    return problems


def device_or_default(device: torch.device | str | int | None) -> torch.device:
    """Return the device asked for; for None the current CUDA device, or the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_device(device: torch.device | str | int, must_exist: bool) -> torch.device:
    """Return a device with its number, if it can be used.

    Args:
        device: What the caller asked for.
        must_exist: Whether this machine has to have it.

    Raises:
        ValueError: It has no memory.
        PlanError: This machine does not have it.
    """
    resolved = torch.device(device)
    if resolved.type == "meta":
        raise ValueError("device must have memory; 'meta' is what models come from")
    if resolved.type == "cpu" or not must_exist:
        return torch.device(resolved.type) if resolved.type == "cpu" else resolved
    module = getattr(torch, resolved.type, None)
    if module is None or not module.is_available():
        raise PlanError(
            f"device {str(resolved)!r} was asked for, but torch {torch.__version__} "
            f"finds no {resolved.type} device on this machine. Use device='cpu', or "
            f"install a torch build with {resolved.type} support"
        )
    index = module.current_device() if resolved.index is None else resolved.index
    count = module.device_count()
    if index >= count:
        raise PlanError(
            f"device '{resolved.type}:{index}' was asked for, but this machine has "
            f"{count} {resolved.type} device(s), numbered 0 to {count - 1}"
        )
    return torch.device(resolved.type, index)


def _check_no_capture(device: torch.device) -> None:
    if (
        device.type == "cuda"
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    ):
        raise PlanError(
            f"device '{device}' was asked for while a CUDA graph is being captured on "
            "the current stream: memory made now would belong to the graph, and every "
            "replay would draw the values again. Materialize before the capture (a "
            "capture may use the model, since no tensor of it is replaced later). "
            "Nothing was done, and the capture can go on"
        )
