"""Private names of Transformer Engine.

Releases differ; what only some have is asked for in `te/probe.py`.
"""

from __future__ import annotations

from deferred_init.private_names.entry import entries

__all__ = ["TE_NAMES"]

_FUSER = "fusers that somebody holds are not refreshed; build them afterwards"
_QUANTIZED = "quantized weights are not compared with their column-wise copies"

TE_NAMES = (
    *entries(
        "transformer_engine.pytorch.ops.op",
        (
            "BasicOperation.pre_first_fuser_forward",
            "make the parameters of an op by its own hook",
            "the op is listed as unclaimed; record it or register an initializer",
        ),
        (
            "BasicOperation._fp8_metas",
            "know whether an op has its recipe's state already",
            "the state is made again",
        ),
        (
            "BasicOperation._quantizers",
            "find quantizers that were shared by mistake",
            "they are not audited",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.ops.basic.basic_linear",
        (
            "BasicLinear._with_quantized_weight",
            "ask an op for a quantized weight",
            "build it under `quantized_model_init`",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.ops.sequential",
        ("Sequential._module_groups", "drop groups that hold old fusers", _FUSER),
    ),
    *entries(
        "transformer_engine.pytorch.ops.fuser",
        ("OperationFuser", "find fusers that cache Parameters", _FUSER),
        ("OperationFuser._basic_ops", "refresh a fuser", _FUSER),
        ("OperationFuser._basic_op_params", "refresh a fuser", _FUSER),
        ("OperationFuser._basic_op_num_params", "refresh a fuser", _FUSER),
        ("OperationFuser._flat_basic_op_params", "refresh a fuser", _FUSER),
        ("OperationFuser._last_amax_history_len", "refresh a fuser", _FUSER),
        ("OperationFuser._fused_ops_cache", "refresh a fuser", _FUSER, "2.20"),
        ("OperationFuser._forward_ops", "audit a fuser", _FUSER),
        ("OperationFuser._backward_ops", "audit a fuser", _FUSER),
        (
            "OperationFuser._cache_parameters",
            "know that a fuser notices new parameters by itself",
            "it is refreshed",
            "releases after 2.20",
        ),
        (
            "OperationFuser._param_version",
            "make a fuser look again",
            "it is refreshed",
            "releases after 2.20",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.module.base",
        (
            "TransformerEngineBaseModule",
            "recognize modules of Transformer Engine",
            "they are asked for `reset_parameters` like any module",
        ),
        (
            "TransformerEngineBaseModule._fp8_workspaces",
            "drop FP8 copies of old weights",
            "none: the first forward would read the old weight",
        ),
        (
            "TransformerEngineBaseModule._is_fsdp2",
            "let a module ask again whether FSDP2 manages it",
            "nothing to do: it asks each time",
            "releases that cache the answer; asked with a default",
        ),
        (
            "TransformerEngineBaseModule.param_init_meta",
            "know how each parameter is made, and what a subclass added",
            "modules of Transformer Engine cannot be made",
        ),
        (
            "_high_precision_init_val",
            "keep values in high precision beside a quantized weight",
            "they are dropped",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.ops.basic.basic_linear",
        (
            "BasicLinear._rng_state_tracker_function",
            "put a tracker of generators back after a failure",
            "the tracker stays where the failed call left it",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.optimizers.fused_sgd",
        (
            "FusedSGD._dummy_overflow_buf",
            "make the flag that it put on meta",
            "it stays there, and the audit names it",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.tensor.float8_tensor",
        ("Float8Tensor._data", "audit quantized weights", _QUANTIZED),
        ("Float8Tensor._transpose", "audit quantized weights", _QUANTIZED),
        ("Float8Tensor._transpose_invalid", "audit quantized weights", _QUANTIZED),
        (
            "Float8Tensor._scale_inv",
            "know which quantized tensors FSDP2 can cut",
            "sharded quantized weights are refused",
        ),
        (
            "Float8Tensor._fp8_dtype",
            "copy stored bits only into the same format",
            "none are told apart, and what another format has is copied",
        ),
    ),
    *entries(
        "transformer_engine.pytorch.tensor.float8_blockwise_tensor",
        ("Float8BlockwiseQTensor._is_2D_scaled", "audit quantized weights", _QUANTIZED),
        ("Float8BlockwiseQTensor._rowwise_data", "audit quantized weights", _QUANTIZED),
        (
            "Float8BlockwiseQTensor._columnwise_data",
            "audit quantized weights",
            _QUANTIZED,
        ),
    ),
)
