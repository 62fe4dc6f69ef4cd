"""Initializers for the modules of `torch.nn` that own parameters or buffers.

Their constructors end with a public or private reset method that fills every tensor
in place. Running that method on tensors of the same geometry draws the same random
numbers as the constructor did, so values and generator state equal eager ones.

Modules that wrap others (`nn.TransformerEncoder`), parametrized modules and user
modules have initializers of their own in the files beside this one.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.rnn import RNNCellBase

from deferred_init.errors import listing
from deferred_init.handlers.protocol import Claim, Request, Step, Workspace
from deferred_init.handlers.registry import add_initializer
from deferred_init.record.paused import without_default_device
from deferred_init.reparametrized import is_reparametrized
from deferred_init.slots import ModuleSite, Slot

__all__ = ["TORCH_NN_TYPES", "LazyModules", "MultiheadAttentionInit", "TorchNN"]

_WEIGHT = frozenset({"weight"})
_WEIGHT_BIAS = frozenset({"weight", "bias"})
_RUNNING = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_CELL = frozenset({"weight_ih", "weight_hh", "bias_ih", "bias_hh"})

# What the reset method of each class fills; of an RNN, all that it counts as flat.
_FILLED: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: _WEIGHT_BIAS,
    nn.Bilinear: _WEIGHT_BIAS,
    _ConvNd: _WEIGHT_BIAS,
    nn.Embedding: _WEIGHT,
    nn.EmbeddingBag: _WEIGHT,
    nn.LayerNorm: _WEIGHT_BIAS,
    nn.GroupNorm: _WEIGHT_BIAS,
    nn.RMSNorm: _WEIGHT,
    nn.PReLU: _WEIGHT,
    _NormBase: _WEIGHT_BIAS | _RUNNING,
    nn.RNNBase: frozenset(),
    RNNCellBase: _CELL,
}
_ATTENTION = frozenset(
    {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
    | {"in_proj_bias", "bias_k", "bias_v"}
)
TORCH_NN_TYPES: tuple[type[nn.Module], ...] = (*_FILLED, nn.MultiheadAttention)


class TorchNN:
    """Runs `reset_parameters` of a `torch.nn` class.

    A subclass that overrides the method is left to the rule for user modules.
    """

    name = "torch.nn"
    only_uses_torch = True
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim what the class's own method fills; with no slots for its draws."""
        module = site.module
        known = next(base for base in type(module).__mro__ if base in _FILLED)
        if is_reparametrized(module):
            return None
        if "reset_parameters" in vars(module):
            return _replaced(site, pending)
        if not _inherits(module, known, "reset_parameters"):
            return None
        names = _FILLED[known]
        if isinstance(module, nn.RNNBase):
            names = frozenset(module._flat_weights_names)
        made = tuple(slot for slot in pending if slot.name in names)
        shared = [
            slot.fqn
            for slot in site.slots
            if slot.deferred
            and slot.name in names
            and not any(slot.tensor is one.tensor for one in pending)
        ]
        if not made and not shared:
            return None
        return Claim(
            slots=made,
            source=f"{known.__name__.lstrip('_')}.reset_parameters",
            assumptions=tuple(_assumptions(module, known, shared)),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Fill in place; on CUDA, lay an RNN's weights out as its constructor does."""
        module = step.site.module
        with workspace.filling(step), without_default_device():
            getattr(module, "reset_parameters")()  # noqa: B009 - typed as a Tensor
        if isinstance(module, nn.RNNBase) and workspace.request.device.type == "cuda":
            module.flatten_parameters()


class MultiheadAttentionInit:
    """Runs `_reset_parameters`, which zeroes the bias of the output projection too."""

    name = "torch.nn"
    composite = True

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Claim its own tensors and rewrite the bias of `out_proj`."""
        module = site.module
        known = nn.MultiheadAttention
        inherited = _inherits(module, known, "_reset_parameters")
        if not inherited or is_reparametrized(module):
            return None
        projection = next(
            (c for c in site.children if c.module is module.out_proj), None
        )
        rewrites = tuple(
            slot
            for slot in (projection.slots if projection else ())
            if slot.name == "bias" and slot.deferred
        )
        made = tuple(slot for slot in pending if slot.name in _ATTENTION)
        if not made and not rewrites:
            return None
        return Claim(
            slots=made,
            rewrites=rewrites,
            source="MultiheadAttention._reset_parameters",
            assumptions=tuple(_assumptions(module, known, [])),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Fill in place, with a loaded bias of `out_proj` out of reach."""
        module = step.site.module
        assert isinstance(module, nn.MultiheadAttention)
        bias = module.out_proj.bias
        aside = bias is not None and not step.claim.rewrites
        if aside:
            module.out_proj._parameters["bias"] = nn.Parameter(bias.detach().clone())
        try:
            with workspace.filling(step):
                module._reset_parameters()
        finally:
            if aside:
                module.out_proj._parameters["bias"] = bias


class LazyModules:
    """Refuses modules whose shapes are not known yet."""

    name = "torch.nn lazy"
    composite = False

    def claim(
        self, site: ModuleSite, pending: tuple[Slot, ...], request: Request
    ) -> Claim | None:
        """Name the parameters without shape, and what to do."""
        lazy = [s for s in pending if nn.parameter.is_lazy(s.tensor)]
        if not lazy:
            return None
        kind = type(site.module).__name__
        return Claim(
            slots=pending,
            problems=(
                f"{len(lazy)} tensors of the lazy module `{site.fqn or kind}` "
                f"(`{kind}`) have no shape yet: {listing([s.fqn for s in lazy])}. Run "
                "a forward with a dummy input on the meta device first, or inside the "
                "function that `deferred_init` records, or give the sizes and use the "
                "class that is not lazy",
            ),
        )

    def run(self, step: Step, workspace: Workspace) -> None:
        """Never called, since every claim has a problem."""
        raise AssertionError("a claim with problems is never run")


def _replaced(site: ModuleSite, pending: tuple[Slot, ...]) -> Claim | None:
    """Refuse a module whose caller has a method of its own in mind, as litgpt's."""
    if not pending or not type(site.module).__module__.startswith("torch.nn."):
        return None
    kind = type(site.module).__name__
    return Claim(
        slots=pending,
        problems=(
            f"{listing([slot.fqn for slot in pending])}: `reset_parameters` of this "
            f"`{kind}` was replaced after it was constructed, and which values are "
            "wanted cannot be told. Give `deferred_init(...)` a function that "
            "constructs the model and calls the new methods, or load real values "
            "before",
        ),
    )


def _inherits(module: nn.Module, known: type, method: str) -> bool:
    """Whether a module's reset method is the known class's own code."""
    if method in vars(module):
        return False
    overridden = getattr(type(module), method) is not getattr(known, method)
    stats = getattr(known, "reset_running_stats", None)
    return not overridden and stats is getattr(
        type(module), "reset_running_stats", None
    )


def _assumptions(
    module: nn.Module, known: type[nn.Module], shared: list[str]
) -> list[str]:
    texts = []
    kind = type(module)
    if not kind.__module__.startswith("torch.") and kind.__init__ is not known.__init__:
        texts.append(
            f"the constructor of {kind.__qualname__} leaves the values that "
            f"{known.__name__.lstrip('_')} gives, and draws no random numbers"
        )
    if shared:
        texts.append(
            f"{listing(shared)}: shared with a module before it in the tree, "
            "whose initial values it keeps"
        )
    return texts


add_initializer(TorchNN(), *_FILLED)
add_initializer(MultiheadAttentionInit(), nn.MultiheadAttention)
add_initializer(LazyModules(), LazyModuleMixin)
