"""Detectors: what is inconsistent in itself, whatever was there before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from deferred_init.aliases import is_deferred
from deferred_init.audit.scene import Scene, register_detector
from deferred_init.reparametrized import parametrizations_of
from deferred_init.report import Finding

__all__: list[str] = []

# Not `position_ids`: some models hold them in floating point by right, and with a
# snapshot every changed dtype is found anyway.
_INTEGER_BUFFERS = frozenset(
    {"num_batches_tracked", "token_type_ids", "relative_position_index"}
)


@register_detector
def not_parameters(scene: Scene) -> Iterator[Finding]:
    """Find tensors registered as parameters that are not `nn.Parameter`."""
    for place in scene.graph.places:
        if place.kind == "parameter" and not isinstance(place.tensor, nn.Parameter):
            yield Finding(
                code="not-a-parameter",
                fqn=place.fqn,
                message="expected an `nn.Parameter`, found a "
                f"`{type(place.tensor).__name__}`; assign a Parameter to it",
            )


@register_detector
def float_counters(scene: Scene) -> Iterator[Finding]:
    """Find buffers that hold integers by nature and were cast to floating point."""
    for place in scene.graph.places:
        if (
            place.kind == "buffer"
            and place.name in _INTEGER_BUFFERS
            and place.tensor.is_floating_point()
            and not _was_floating(scene, place.fqn)
        ):
            yield Finding(
                code="integer-buffer-cast",
                fqn=place.fqn,
                message=f"expected integers, found {place.tensor.dtype}; cast only "
                "floating-point tensors, as `Module.to(dtype)` does",
            )


@register_detector
def mixed_devices(scene: Scene) -> Iterator[Finding]:
    """Find modules whose own parameters are on several devices."""
    first: dict[int, Tensor] = {}
    for place in scene.graph.places:
        tensor = place.tensor
        if place.kind != "parameter" or is_deferred(tensor):
            continue
        other = first.setdefault(id(place.owner), tensor)
        if other.device != tensor.device:
            yield Finding(
                code="mixed-devices",
                fqn=place.fqn,
                message=f"expected the device of the other parameters of its "
                f"`{type(place.owner).__name__}`, {other.device}, found "
                f"{tensor.device}; move the module as a whole",
            )


@register_detector
def rnn_weights(scene: Scene) -> Iterator[Finding]:
    """Find RNNs that compute with other tensors than their parameters."""
    for found in scene.graph.modules:
        module = found.module
        if not isinstance(module, nn.RNNBase):
            continue
        attributes = vars(module)
        flat = attributes.get("_flat_weights")
        names = attributes.get("_flat_weights_names")
        if flat is None or names is None or hasattr(module, "parametrizations"):
            continue
        for name, weight in zip(names, flat, strict=False):
            own = module._parameters.get(name)
            if own is not None and weight is not own:
                yield Finding(
                    code="rnn-flat-weights",
                    fqn=f"{found.fqn}.{name}" if found.fqn else name,
                    message="expected the RNN to compute with this parameter, found "
                    "another tensor in its `_flat_weights`; assign the parameter again "
                    f"with `setattr(module, {name!r}, parameter)`",
                )


@register_detector
def parametrizations(scene: Scene) -> Iterator[Finding]:
    """Find parametrized tensors that exist a second time, or lack their original."""
    for found in scene.graph.modules:
        table = parametrizations_of(found.module)
        if table is None:
            continue
        for name, chain in table.items():
            fqn = f"{found.fqn}.{name}" if found.fqn else name
            originals = [k for k in chain._parameters if k.startswith("original")]
            originals += [k for k in chain._buffers if k.startswith("original")]
            if name in found.module._parameters or name in found.module._buffers:
                wrong = "it as well, where nobody reads it"
            elif not originals:
                wrong = "no original to compute it from"
            elif not isinstance(getattr(type(found.module), name, None), property):
                wrong = "that its class does not compute it"
            else:
                continue
            yield Finding(
                code="parametrization-broken",
                fqn=fqn,
                message="expected a tensor computed from "
                f"`parametrizations.{name}.original`, found {wrong}; parametrize the "
                "module again",
            )


@register_detector
def declared_ties(scene: Scene) -> Iterator[Finding]:
    """Find ties that a Hugging Face model declares and does not have."""
    for found in scene.graph.modules:
        declared = vars(found.module).get("all_tied_weights_keys")
        if not isinstance(declared, Mapping):
            continue
        prefix = f"{found.fqn}." if found.fqn else ""
        for target, source in declared.items():
            one = scene.graph.by_fqn.get(f"{prefix}{target}")
            other = scene.graph.by_fqn.get(f"{prefix}{source}")
            if one is None or other is None or one.tensor is other.tensor:
                continue
            yield Finding(
                code="broken-tie",
                fqn=one.fqn,
                message=f"expected the same tensor object as `{other.fqn}`, as the "
                f"`{type(found.module).__name__}` declares, found another one; call "
                "`tie_weights()`",
            )


@register_detector
def misplaced_gradients(scene: Scene) -> Iterator[Finding]:
    """Find gradients on another device than their parameter."""
    by_fqn = scene.graph.by_fqn
    for place in scene.graph.places:
        if place.kind != "gradient" or is_deferred(place.tensor):
            continue
        owner = by_fqn.get(place.fqn.removesuffix(".grad"))
        if owner is None or owner.tensor.device == place.tensor.device:
            continue
        yield Finding(
            code="gradient-device",
            fqn=place.fqn,
            message=f"expected device {owner.tensor.device}, found "
            f"{place.tensor.device}; drop it with `zero_grad(set_to_none=True)`",
        )


def _was_floating(scene: Scene, fqn: str) -> bool:
    """Whether it was constructed so, as the `position_ids` of SAM 3 are."""
    before = scene.expected.tensors.get(fqn) if scene.expected is not None else None
    return before is not None and before.dtype.is_floating_point
