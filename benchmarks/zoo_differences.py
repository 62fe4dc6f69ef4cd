"""What differs between two models: names, values, ties, everything about a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and tensor attributes, duplicates kept."""
    found: dict[str, Tensor] = {}
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    found[f"{prefix}.{name}"] = tensor
        for name, item in vars(owner).items():
            if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
                continue
            items = item if isinstance(item, (list, tuple)) else [item]
            for index, part in enumerate(items):
                if isinstance(part, Tensor):
                    found[f"{prefix}.{name}[{index}]"] = part
    return found


def differences(eager: nn.Module, other: nn.Module) -> list[str]:
    """List what differs between two models, by name; empty if nothing does."""
    left, right = tensors_of(eager), tensors_of(other)
    if left.keys() != right.keys():
        return [f"names differ: {sorted(left.keys() ^ right.keys())[:5]}"]
    found = []
    for name, tensor in left.items():
        what = _difference(tensor, right[name])
        if what:
            found.append(f"{name}: {what}")
    if _sharing(left) != _sharing(right):
        found.append("ties or shared storages differ")
    state = {name: m.training for name, m in eager.named_modules()}
    if state != {name: m.training for name, m in other.named_modules()}:
        found.append("training flags differ")
    return found


def _difference(a: Tensor, b: Tensor) -> str:
    """Say in what two tensors differ; empty if in nothing."""
    for what in ("__class__", "shape", "dtype", "device", "requires_grad", "is_leaf"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(a, what)} != {getattr(b, what)}"
    if a.layout == torch.strided and a.stride() != b.stride():
        return f"stride {a.stride()} != {b.stride()}"
    if vars(a).keys() != vars(b).keys():
        return f"attributes {sorted(vars(a))} != {sorted(vars(b))}"
    if a.is_meta:
        return ""
    raw_a, raw_b = (t.detach().contiguous().flatten() for t in (a, b))
    if raw_a.is_complex():
        raw_a, raw_b = torch.view_as_real(raw_a), torch.view_as_real(raw_b)
    if torch.equal(raw_a.view(torch.uint8), raw_b.view(torch.uint8)):
        return ""
    return f"{int((raw_a != raw_b).sum())} of {a.numel()} values differ"


def _sharing(tensors: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Return for each tensor the first name of its object and of its storage."""
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    same_object, same_storage = [], []
    for name, tensor in tensors.items():
        same_object.append(objects.setdefault(id(tensor), name))
        if tensor.layout == torch.strided and tensor.numel():
            key = tensor.untyped_storage()._cdata
            same_storage.append(storages.setdefault(key, name))
    return same_object, same_storage
