"""What each code of a finding means: its usual cause, and the cure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["EXPLANATIONS", "Explanation"]


class Explanation(NamedTuple):
    """One kind of fault.

    Attributes:
        cause: How models usually come to it.
        cure: What to do.
    """

    cause: str
    cure: str


_STALE = (
    "It was built before its parameters were replaced by new objects: by `to_empty`, "
    "`load_state_dict(assign=True)`, a wrapper, or an assignment."
)
_REBUILD = "Build it after the replacement, or replace contents and keep the objects."
_LOST = "An initialization replaced the object and did not carry this over."

_TABLE: dict[str, tuple[str, str]] = {
    "deferred-tensor": (
        "The tensor was built on meta and nobody made it: it is held where "
        "`named_parameters()` does not look, or a checkpoint lacked it.",
        "Materialize the whole model; for a checkpoint, name what it lacks.",
    ),
    "deferred-in-optimizer": (_STALE, _REBUILD),
    "deferred-in-holder": (_STALE, _REBUILD),
    "optimizer-foreign": (
        "It was built from another model, or from a copy of this one.",
        "Build it from `model.parameters()` of this model.",
    ),
    "optimizer-stale": (_STALE, _REBUILD),
    "optimizer-order": (
        "A group's list of parameters was rebuilt in another order.",
        "Keep the order: saved optimizer states go by position.",
    ),
    "holder-stale": (_STALE, _REBUILD),
    "optimizer-orphan-state": (_STALE, _REBUILD),
    "optimizer-state-deferred": (
        "A step ran while the model had no memory.",
        "`optimizer.state.clear()` before the first real step.",
    ),
    "optimizer-state-shape": (
        "State was loaded for another model, or parameters were sharded since.",
        "Load the state that belongs to this model.",
    ),
    "optimizer-state-device": (
        "The model was moved after a step, or state was loaded to another device.",
        "Move the model first, then build the optimizer or load its state.",
    ),
    "broken-tie": (
        "A tie is one object under two names; `to_empty`, casts and assignments of one "
        "of the names make two of it, which train apart.",
        "Assign one name to the other, or call the model's `tie_weights()`.",
    ),
    "broken-view": (
        "Two tensors shared memory, and one was given memory of its own.",
        "Make the one a view of the other again.",
    ),
    "duplicate-storage": (
        "A tie was restored by `.data`, or a tensor was wrapped in a second Parameter; "
        "autograd and optimizers see two parameters.",
        "Assign the Parameter object itself.",
    ),
    "replaced-object": (
        "An initialization assigned a new Parameter instead of filling the old one.",
        "Fill in place; pass every holder of the old one as `holders=`.",
    ),
    "touched-real-tensor": (
        "An initialization wrote a tensor that had been loaded already.",
        "Load it again; report the initializer.",
    ),
    "lost-tensor": (_LOST, "Register it again."),
    "lost-module": (_LOST, "Put the module back."),
    "replaced-module": (_LOST, "Put the module back."),
    "module-class-changed": (
        "The module was parametrized, converted or fused in between.",
        "Do that before or after.",
    ),
    "requires-grad-changed": (_LOST, "Call `requires_grad_` with the old value."),
    "geometry-changed": (
        "An initialization assigned a tensor of another size or memory format.",
        "Fill the tensor that is given.",
    ),
    "wrong-dtype": (
        "All of a model was cast at once, or a value was computed in another dtype.",
        "Build it with the right dtype, or pass `dtype=`.",
    ),
    "wrong-device": (
        "An initialization ignored the device that it was given.",
        "Create tensors on the device of the tensor that is filled.",
    ),
    "mixed-devices": (
        "A part of a module was moved, or made, apart from the rest.",
        "Move the module as a whole.",
    ),
    "gradient-device": (
        "A backward pass ran before the parameter was moved or materialized.",
        "`zero_grad(set_to_none=True)`.",
    ),
    "lost-attribute": (_LOST, "Set the attribute again."),
    "lost-module-attribute": (_LOST, "Set the attribute again."),
    "lost-hook": (
        "Hooks are registered with the tensor in C++, not with the Python object "
        "alone; a swap of contents separates them.",
        "Register the hooks again.",
    ),
    "lost-module-hook": (_LOST, "Register the hooks again."),
    "mode-changed": (
        "An initialization called `train()` or `eval()`.",
        "Call the other one.",
    ),
    "persistence-changed": (
        "A buffer was registered again without its `persistent=`.",
        "Register it with the old value: it decides what `state_dict()` saves.",
    ),
    "not-a-parameter": (
        "`_parameters` was written directly with a plain tensor.",
        "Assign an `nn.Parameter`.",
    ),
    "integer-buffer-cast": (
        "All tensors were cast, instead of the floating-point ones.",
        "Cast with `Module.to(dtype)`, which leaves integers alone.",
    ),
    "rnn-flat-weights": (
        "Parameters were replaced in `_parameters`, past the RNN's `__setattr__`.",
        "Assign them with `setattr`, which also updates `_flat_weights`.",
    ),
    "parametrization-broken": (
        "A parameter was registered under the name of a parametrized one.",
        "Assign to the property, or parametrize again.",
    ),
    "padding-row": (
        "An initialization overwrote the row of `padding_idx`, as many models' own do; "
        "or the row was trained.",
        "Zero the row after initializing, if padding shall contribute nothing.",
    ),
    "poison-left": (
        "An initializer left a part of a tensor as it found it.",
        "Register an initializer that fills all of it.",
    ),
    "not-finite": (
        "Memory that nobody wrote, bytes read in another dtype, or an initialization "
        "that overflows.",
        "Find the writer: `verify='full'` tells unwritten memory apart.",
    ),
    "te-fuser-stale": (
        "Transformer Engine's operation fuser lists parameters once, at its first use; "
        "they were replaced since.",
        "Let the next forward build the fuser again.",
    ),
    "te-alias-broken": (
        "A fused operation shows its basic operation's parameter under a second name, "
        "and one of the two was replaced.",
        "Assign the basic operation's parameter to the fused one.",
    ),
    "te-columnwise-missing": (
        "The weight was quantized under `torch.no_grad()` or for inference; backward "
        "reads the column-wise copy.",
        "Materialize with grad mode on.",
    ),
    "te-columnwise-stale": (
        "One copy of a quantized weight was written without the other.",
        "Quantize the weight again, both ways.",
    ),
    "te-quantizer-mismatch": (
        "Weights were quantized by one recipe, the module trains with another.",
        "Materialize with the recipe of the training.",
    ),
    "te-amax-registered-twice": (
        "Modules were set up twice for delayed scaling.",
        "`FP8GlobalStateManager.reset()` before training starts.",
    ),
    "wrapper-stale": (
        "A parameter was replaced after `fully_shard`, which keeps records of its own.",
        "Replace contents and keep the objects, or shard afterwards.",
    ),
    "tie-across-groups": (
        "Two modules share a parameter and were sharded in two calls.",
        "Shard them in one call: `fully_shard([embedding, head])`.",
    ),
    "replicas-differ": (
        "Ranks drew from other seeds, or loaded other files.",
        "Materialize on all ranks with one seed.",
    ),
    "shards-alike": (
        "Each rank initialized its own shard, all with the same seed.",
        "Materialize, which slices what one device would have made.",
    ),
    "other-ranks": (
        "The audit of another rank found something that is right on this one.",
        "Read the report of that rank.",
    ),
    "ranks-missing": (
        "`audit(verify='full')` of a sharded model was not called on every rank.",
        "Call it on all of them.",
    ),
}

EXPLANATIONS: Final[Mapping[str, Explanation]] = MappingProxyType(
    {code: Explanation(*texts) for code, texts in _TABLE.items()}
)
"""Every code that the built-in detectors use, with its usual cause and the cure."""
