"""Replace torch's layers by Transformer Engine's, in place, without touching a value.

[Note: Parameters move, values stay]
Each new module is built on meta and then given the very Parameter objects of the old
one. So ties, `requires_grad`, Python attributes, recordings, optimizers and names need
no code at all, a model without memory stays without memory, and no GPU is needed. All
new modules are built before the first is put in its place.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from deferred_init.aliases import is_deferred
from deferred_init.audit.kinds import MODULE_HOOKS
from deferred_init.errors import PlanError
from deferred_init.integrations.conversion_report import (
    Conversion,
    ConversionReport,
    Converted,
    unrecorded_text,
)
from deferred_init.integrations.rms_norm import rms_norm_obstacle, rms_norm_of
from deferred_init.record import move_places, value_in_place
from deferred_init.te.on_meta import te_on_meta

__all__ = ["Conversion", "ConversionReport", "Converted", "convert_to_te"]

_logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HOOK_TABLES = (
    *MODULE_HOOKS,
    # How some of them are called.
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def convert_to_te(
    model: nn.Module, conversion: Conversion | None = None
) -> ConversionReport:
    """Replace torch's linear and norm layers by Transformer Engine's.

    The Parameter objects stay the same and so do their names; layers on meta,
    recorded and real are converted alike, on machines without a GPU too. Transformer
    Engine's modules add an `_extra_state` each to the state dict.

    Args:
        model: Changed in place; not its root if that is itself such a layer.
        conversion: What to convert; by default all that can be.

    Returns:
        What was converted, and what was not and why.

    Raises:
        PlanError: Transformer Engine cannot be imported, or a pattern matches no
            module; nothing was changed.

    Example:
        >>> import torch, deferred_init as di
        >>> from deferred_init.integrations.te_conversion import convert_to_te
        >>> model = di.deferred_init(
        ...     lambda: torch.nn.Sequential(torch.nn.Linear(16, 32))
        ... )
        >>> print(convert_to_te(model))  # doctest: +SKIP
        1 layers converted to Transformer Engine, 0 left alone
    """
    wanted = conversion or Conversion()
    _check_patterns(model, wanted)
    te = _transformer_engine()
    chosen, converted, left = _choose(model, wanted)
    with te_on_meta():  # entered once: that takes longer than to build ten layers
        made = {id(module): _build(te, module, kind) for module, kind in chosen}
    for parent, name, child in _places(model):
        if id(child) in made:
            parent._modules[name] = made[id(child)]
    new = {id(module) for module in made.values()}
    lost = tuple(
        fqn
        for fqn, module in model.named_modules()
        if id(module) in new and _needs_recording(module)
    )
    if lost:
        _logger.warning("%s", unrecorded_text(lost))
    return ConversionReport(
        converted=tuple(converted), left=tuple(left), unrecorded=lost
    )


def _choose(
    model: nn.Module, wanted: Conversion
) -> tuple[list[tuple[nn.Module, str]], list[Converted], list[Converted]]:
    """Return the layers to convert with their kinds, and lines for both halves."""
    chosen: list[tuple[nn.Module, str]] = []
    converted: list[Converted] = []
    left: list[Converted] = []
    for fqn, module in model.named_modules():
        kind = _kind(module, wanted)
        if kind is None or not fqn:
            continue
        before = type(module).__name__
        reason = _obstacle(fqn, module, kind, wanted)
        if reason:
            left.append(Converted(fqn=fqn, before=before, reason=reason))
            continue
        chosen.append((module, kind))
        converted.append(Converted(fqn=fqn, before=before, after=f"te.{kind}"))
    return chosen, converted, left


def _needs_recording(module: nn.Module) -> bool:
    return any(
        is_deferred(param) and value_in_place(module, name, param) is None
        for name, param in module.named_parameters(recurse=False)
    )


def _transformer_engine() -> Any:
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError) as error:
        raise PlanError(
            "conversion to Transformer Engine needs transformer_engine, which could "
            f"not be imported ({error}); `deferred-init doctor` says more. Pass "
            "`convert=False` to compute without it"
        ) from error
    return te


def _check_patterns(model: nn.Module, wanted: Conversion) -> None:
    names = [fqn for fqn, _ in model.named_modules()]
    idle = [
        pattern
        for pattern in (*wanted.include, *wanted.exclude)
        if not any(fnmatchcase(fqn, pattern) for fqn in names)
    ]
    if idle:
        raise PlanError(
            f"{len(idle)} patterns match no module of {type(model).__name__}: "
            f"{', '.join(map(repr, idle))}; `model.named_modules()` lists the names"
        )


def _kind(module: nn.Module, wanted: Conversion) -> str | None:
    """Return the name of the counterpart of a layer, if it is one."""
    if isinstance(module, nn.Linear):
        return "Linear" if wanted.linear else None
    if not wanted.norms:
        return None
    if isinstance(module, nn.LayerNorm):
        return "LayerNorm"
    return "RMSNorm" if rms_norm_of(module) is not None else None


def _obstacle(fqn: str, module: Any, kind: str, wanted: Conversion) -> str:
    """Say why a layer is left alone; empty if it can be converted."""
    if not any(fnmatchcase(fqn, pattern) for pattern in wanted.include):
        return "not included"
    if any(fnmatchcase(fqn, pattern) for pattern in wanted.exclude):
        return "excluded"
    if kind == "RMSNorm":
        return rms_norm_obstacle(module) or _tensor_obstacle(module)
    expected: Any = nn.Linear if kind == "Linear" else nn.LayerNorm
    if type(module) is not expected:
        return f"a subclass of {expected.__name__}, which may compute something else"
    if kind == "Linear":
        return _dims_obstacle(module, wanted.multiple_of) or _tensor_obstacle(module)
    if module.weight is None or module.bias is None:
        return "Transformer Engine's LayerNorm has a weight and a bias"
    return _tensor_obstacle(module)


def _dims_obstacle(module: Any, multiple_of: int) -> str:
    shape = tuple(module.weight.shape)
    if all(size % multiple_of == 0 for size in shape):
        return ""
    return f"{shape} are not multiples of {multiple_of}, which the format needs"


def _tensor_obstacle(module: nn.Module) -> str:
    for name, param in module.named_parameters(recurse=False):
        if param.dtype not in _DTYPES:
            return f"its {name} is {param.dtype}"
    if set(module._parameters) - {"weight", "bias"} or module._buffers:
        return "it has more tensors than its class"
    return ""


def _build(te: Any, module: nn.Module, kind: str) -> nn.Module:
    """Build the counterpart of a layer around its parameters, in `te_on_meta`."""
    weight: Any = module.weight
    if kind == "Linear":
        new = te.Linear(
            weight.shape[1],
            weight.shape[0],
            bias=module.bias is not None,
            params_dtype=weight.dtype,
            device="meta",
        )
    elif kind == "LayerNorm":
        shape: Any = module.normalized_shape
        new = te.LayerNorm(shape, eps=module.eps, dtype=weight.dtype, device="meta")
    else:
        eps = rms_norm_of(module)
        new = te.RMSNorm(
            tuple(weight.shape), eps=eps, dtype=weight.dtype, device="meta"
        )
    for name, param in module._parameters.items():
        if param is not None:
            new._parameters[name] = param
    move_places(module, new)
    _carry_over(module, new)
    device = torch.device("cpu") if is_deferred(weight) else weight.device
    _give_memory_to_placeholders(new, device)
    built: nn.Module = new
    return built


def _carry_over(old: nn.Module, new: nn.Module) -> None:
    """Keep the mode, the hooks, and what a user put on the module."""
    new.train(old.training)
    held = vars(new)
    for name in _HOOK_TABLES:
        # The very table, which the handles that remove its hooks point to.
        table = vars(old)[name]
        table.update(held[name])
        held[name] = table
    for hook in held["_load_state_dict_pre_hooks"].values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    held["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]
    for name, value in vars(old).items():
        if name not in held and not isinstance(value, torch.Tensor):
            held[name] = value


def _give_memory_to_placeholders(module: nn.Module, device: torch.device) -> None:
    """Make empty tensors that stand for an absent bias real.

    Nothing reads them. On meta they would count as something still to be initialized,
    for which Hugging Face's `initialize_weights` would run again.
    """
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor) and value.is_meta and not value.numel():
            vars(module)[name] = torch.empty(0, dtype=value.dtype, device=device)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield every place of a child, shared ones at each of theirs."""
    parents: Sequence[nn.Module] = list(model.modules())
    for parent in parents:
        for name, child in list(parent._modules.items()):
            if child is not None:
                yield parent, name, child
