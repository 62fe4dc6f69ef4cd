"""Initializers for single modules of Hugging Face models.

Asked only inside models that cannot be constructed a second time as a whole; see
`hf_constructor.py` and `hf.py`.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from deferred_init.dry_run import WriteWatch
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.inventory import site_of
from deferred_init.own_attributes import own_attribute
from deferred_init.rng import GeneratorSnapshot
from deferred_init.slots import ModuleSite, Slot
from deferred_init.twin import difference, matching_slots

__all__ = ["HFConv1D", "HFLeaf"]


class HFConv1D:
    """`transformers.pytorch_utils.Conv1D`, whose constructor draws its weight."""

    name = "transformers Conv1D"
    only_uses_torch = True
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim the weight and the bias."""
        return Claim(slots=pending, source="Conv1D.__init__")

    def run(self, step: Step, workspace: Workspace) -> None:
        """Do what the constructor does."""
        module = step.site.module
        assert isinstance(module, Conv1D)
        with workspace.filling(step), torch.no_grad():
            module.bias.zero_()
            nn.init.normal_(module.weight, std=0.02)


class HFLeaf:
    """Modules without children that keep all arguments of their constructor.

    Rotary embeddings are of this kind: `type(module)(config)` makes the same buffers
    again. A constructor that takes anything which the module does not keep under the
    same name is left alone.
    """

    name = "transformers module"
    only_uses_torch = True
    composite = False
    self_contained = True

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim what a second construction on meta makes, and fills, as well."""
        arguments = _arguments(site.module) if pending and not site.children else None
        if arguments is None:
            return None
        generators = GeneratorSnapshot(torch.device("cpu"))
        try:
            with torch.device("meta"), WriteWatch() as watch:
                twin = type(site.module)(**copy.deepcopy(arguments))
        except Exception:  # noqa: BLE001 - then it is not made this way
            return None
        finally:
            generators.restore()
        copy_site = site_of(twin)
        if difference(site, copy_site) is not None:
            return None
        made = [
            slot
            for slot, tensor in matching_slots(site, pending, copy_site)
            if not watch.is_raw(tensor)
        ]
        if not made:
            return None
        names = ", ".join(arguments)
        return Claim(slots=tuple(made), source=f"{type(site.module).__name__}({names})")

    def run(self, step: Step, workspace: Workspace) -> None:
        """Construct the module once more and take its tensors over."""
        site = step.site
        arguments = _arguments(site.module)
        assert arguments is not None, "checked by the claim"
        twin = type(site.module)(**copy.deepcopy(arguments))
        for slot, tensor in matching_slots(site, step.claim.slots, site_of(twin)):
            workspace.adopt(slot, tensor)


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments, if the module keeps every one of them."""
    if not isinstance(own_attribute(module, "config"), PreTrainedConfig):
        return None
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name == "device":
            continue
        if parameter.kind not in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ) or name not in vars(module):
            return None
        found[name] = vars(module)[name]
    return found


add_initializer(HFConv1D(), Conv1D)
add_initializer(HFLeaf(), last=True)
