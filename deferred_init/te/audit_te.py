"""What the audit knows about Transformer Engine.

Looks at the model as it is; shares nothing with the handlers but the knowledge of
which modules hold row-wise weights on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.ops.fuser import OperationFuser
from transformer_engine.pytorch.ops.op import BasicOperation, FusedOperation

from deferred_init.audit.kinds import register_cache
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.distributed.fsdp2 import fsdp_params
from deferred_init.report import Finding
from deferred_init.te.constructed import is_rowwise_only
from deferred_init.te.probe import fp8_state_manager, is_quantized

__all__: list[str] = []

# Registering here keeps the general detectors out of what a fuser caches.
_CACHES = ("_basic_op_params", "_flat_basic_op_params", "_fused_ops_cache")
register_cache(OperationFuser, (*_CACHES, "_forward_ops", "_backward_ops"))


@register_detector
def stale_fusers(scene: Scene) -> Iterator[Finding]:
    """Find fusers whose lists are not the parameters of their ops, by identity."""
    managed = {
        id(param.sharded_param): param
        for param in fsdp_params(found.module for found in scene.graph.modules)
    }
    for fqn, fuser in scene.graph.caches:
        if not isinstance(fuser, OperationFuser):
            continue
        by_op = vars(fuser).get("_basic_op_params")  # releases have one, both, or none
        flat = vars(fuser).get("_flat_basic_op_params")
        lists = [] if by_op is None else [[p for params in by_op for p in params]]
        lists += [] if flat is None else [list(flat)]
        held = [param for op in fuser._basic_ops for param in op.parameters()]
        # Between steps a module holds its shard; a fuser computes with the whole.
        actual = [_gathered(param, managed) for param in held]
        wrong = max((_num_different(each, actual) for each in lists), default=0)
        if not wrong:
            continue
        remedy = (
            "set `_module_groups = None`"
            if "_module_groups" in fqn
            else "build the fuser again, or pass its holder in `holders=`"
        )
        yield Finding(
            code="te-fuser-stale",
            fqn=fqn,
            message=f"expected the {len(actual)} parameters that its ops have now, "
            f"found {wrong} other(s), {_what_instead(lists, managed)}; {remedy}",
        )


def _gathered(param: Tensor, managed: Mapping[int, Any]) -> Tensor | None:
    """Return the object that computes in place of a parameter that FSDP2 shards.

    None before the first gathering.
    """
    found = managed.get(id(param))
    whole = None if found is None else getattr(found, "_unsharded_param", None)
    return param if found is None else whole


def _what_instead(lists: list[list[Tensor]], managed: Mapping[int, Any]) -> str:
    if any(id(param) in managed for cached in lists for param in cached):
        return "shards, which FSDP2 replaces by gathered parameters in the forward"
    return "of an earlier time"


@register_detector
def broken_aliases(scene: Scene) -> Iterator[Finding]:
    """Find parameters of fused ops that are not those of their basic ops."""
    for fqn, module, _ in scene.graph.modules:
        if not isinstance(module, FusedOperation):
            continue
        ops = tuple(module.basic_ops)
        for name, alias in module._parameters.items():
            if alias is None:
                continue
            held = [op._parameters.get(name) for op in ops]
            own = [param for param in held if param is not None]
            if len(own) == 1 and own[0] is not alias:
                yield Finding(
                    code="te-alias-broken",
                    fqn=_join(fqn, name),
                    message="expected the very parameter of its basic op, found "
                    f"another object; assign it anew: `module.{name} = "
                    f"basic_op.{name}`",
                )


@register_detector
def quantized_weights(scene: Scene) -> Iterator[Finding]:
    """Find quantized weights that training cannot use."""
    for fqn, module, _ in scene.graph.modules:
        for name, param in module._parameters.items():
            trained = param is not None and param.requires_grad
            # A shard is quantized in its local tensor.
            param = getattr(param, "_local_tensor", param)
            if param is None or not is_quantized(param):
                continue
            where = _join(fqn, name)
            if module.training and trained and not is_rowwise_only(module):
                yield from _columnwise(where, param, full=scene.full)
            yield from _quantizer(where, module, name, param)


@register_detector
def registered_twice(scene: Scene) -> Iterator[Finding]:
    """Find delayed-scaling buffers that the process reduces more than once."""
    te = (TransformerEngineBaseModule, BasicOperation)
    if not any(isinstance(module, te) for _, module, _ in scene.graph.modules):
        return
    manager = fp8_state_manager()
    state = getattr(manager, "quantization_state", manager)
    for key, buffers in getattr(state, "global_amax_buffer", {}).items():
        addresses = [buffer.data_ptr() for buffer in buffers]
        twice = len(addresses) - len(set(addresses))
        if twice:
            yield Finding(
                code="te-amax-registered-twice",
                fqn=str(key),
                message=f"expected every amax history once among the process's "
                f"{len(buffers)}, found {twice} of them again; call "
                "`FP8GlobalStateManager.reset()` before training starts",
            )


def _columnwise(where: str, param: Any, *, full: bool) -> Iterator[Finding]:
    attributes = vars(param)
    if "_columnwise_data" in attributes:
        rowwise, columnwise = param._rowwise_data, param._columnwise_data
        if columnwise is None:
            yield Finding(
                code="te-columnwise-missing",
                fqn=where,
                message=f"expected a {type(param).__name__} with column-wise data, "
                "which the backward pass reads, found none; it was quantized under "
                "`torch.no_grad()`: materialize with grad mode on, or say "
                "`inference = true` in the recipe",
            )
            return
        exact = bool(attributes.get("_is_2D_scaled", False))
    else:
        rowwise, columnwise = attributes.get("_data"), attributes.get("_transpose")
        if columnwise is None or attributes.get("_transpose_invalid", False):
            return  # it is made from the row-wise data when it is needed
        exact = True
    if not full or rowwise is None:
        return
    rows = rowwise.flatten(0, -2)
    columns = columnwise.flatten(1)
    if exact and rows.shape == columns.mT.shape and not torch.equal(rows, columns.mT):
        found = "other values"
    elif not columnwise.any() and rowwise.any():
        found = "only zeros"
    else:
        return
    yield Finding(
        code="te-columnwise-stale",
        fqn=where,
        message=f"expected column-wise data of the same values as the row-wise, found "
        f"{found}; quantize the weight again, both ways",
    )


def _quantizer(
    where: str, module: nn.Module, name: str, param: Any
) -> Iterator[Finding]:
    """Compare a weight's quantizer with the one of the module's recipe."""
    expected = None
    if isinstance(module, TransformerEngineBaseModule):
        meta = module.param_init_meta.get(name)
        place = None if meta is None else meta.fp8_meta_index
        known = module.quantizers.get("scaling_fwd") or []
        if place is not None and place < len(known):
            expected = known[place]
    elif isinstance(module, BasicOperation) and name.startswith("weight"):
        known = (getattr(module, "_quantizers", None) or {}).get("forward") or []
        digits = name.removeprefix("weight")
        place = 2 * int(digits or 0) + 1
        if place < len(known):
            expected = known[place]
    found = vars(param).get("_quantizer")
    if expected is None or found is None:
        return
    wanted, has = _way(expected), _way(found)
    if wanted == has:
        return
    yield Finding(
        code="te-quantizer-mismatch",
        fqn=where,
        message=f"expected a weight quantized by the module's recipe ({wanted}), found "
        f"one made by {has}; materialize with the recipe that the module trains with",
    )


def _way(quantizer: Any) -> str:
    """Name a quantizer with what decides how its bits are to be read."""
    found = type(quantizer).__name__
    number = getattr(quantizer, "dtype", None)
    if number is not None:
        found += f", {getattr(number, 'name', number)}"
    dim = getattr(quantizer, "block_scaling_dim", None)
    return found if dim is None else f"{found}, blocks of {dim}D"


def _num_different(cached: Sequence[Tensor], actual: Sequence[Tensor | None]) -> int:
    pairs = zip(cached, actual, strict=False)
    different = sum(one is not other for one, other in pairs)
    return different + abs(len(cached) - len(actual))


def _join(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
