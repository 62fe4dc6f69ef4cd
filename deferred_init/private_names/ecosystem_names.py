"""Private names of transformers and accelerate, and of the standard library."""

from __future__ import annotations

from deferred_init.private_names.entry import entries

__all__ = ["ECOSYSTEM_NAMES"]

ECOSYSTEM_NAMES = (
    *entries("copyreg", ("_slotnames", "compare slots of two classes", "`__slots__`")),
    *entries(
        "sys",
        (
            "_getframe",
            "say where in your code a tensor or a problem comes from",
            "`inspect.currentframe`, which is slower",
        ),
    ),
    *entries(
        "transformers.initialization",
        (
            "TORCH_INIT_FUNCTIONS",
            "run a model's own init on tensors that are real in part",
            "models that are loaded in part are refused",
        ),
    ),
    *entries(
        "transformers",
        (
            "PreTrainedModel._init_weights",
            "the values of Hugging Face models",
            "none: record the constructor instead",
        ),
        (
            "PreTrainedModel._tp_plan",
            "split a model as its tensor parallel plan says",
            "`parallelize_module` before `prepare`",
        ),
        (
            "PreTrainedModel._tp_size",
            "tell accelerate that a model is split",
            "`parallelize_module` and `config.distributed_config`",
        ),
    ),
    *entries(
        "transformers.modeling_utils",
        (
            "_is_hf_initialized",
            "know which tensors count as loaded, and mark ours",
            "none: record the constructor instead",
        ),
    ),
    *entries(
        "transformers.monkey_patching",
        (
            "apply_patches",
            "construct a model as `from_config` does",
            "construct without patches",
        ),
    ),
    *entries(
        "accelerate",
        (
            "Accelerator._models",
            "hand prepared models to the accelerator",
            "call `prepare` after `materialize`",
        ),
    ),
    *entries(
        "accelerate.accelerator",
        (
            "_is_accelerate_prepared",
            "leave alone what is prepared already",
            "preparing twice is refused by accelerate itself",
        ),
    ),
)
