"""Private names of torch.distributed, and of wrappers around modules."""

from __future__ import annotations

from deferred_init.private_names.entry import entries

__all__ = ["DISTRIBUTED_NAMES"]

_DTENSOR = "`DTensor.to_local()`, which enters autograd"
_FROM_LOCAL = "`DTensor.from_local`, which may communicate"
_FSDP2 = "what FSDP2 keeps is not audited"
_UNPICKLER = "allow the class's new name in `sources/dcp.py`"

DISTRIBUTED_NAMES = (
    *entries(
        "torch.distributed.distributed_c10d",
        (
            "_get_default_store",
            "ranks meet at the job's key-value store",
            "a store of our own, which needs an address",
        ),
    ),
    *entries(
        "torch.distributed.checkpoint.filesystem",
        ("_StorageInfo", "read DCP metadata without running code", _UNPICKLER),
        ("_StoragePrefix", "read DCP metadata without running code", _UNPICKLER),
    ),
    *entries(
        "torch.distributed.tensor",
        ("DTensor._local_tensor", "a rank's shard", _DTENSOR),
        ("DTensor._spec", "make a DTensor around a local shard", _FROM_LOCAL),
    ),
    *entries(
        "torch.distributed.tensor._dtensor_spec",
        ("DTensorSpec", "make a DTensor around a local shard", _FROM_LOCAL),
        ("TensorMeta", "make a DTensor around a local shard", _FROM_LOCAL),
    ),
    *entries(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        ("_get_module_fsdp_state", "find what FSDP2 keeps", _FSDP2),
        ("FSDPState._fsdp_param_group", "find what FSDP2 keeps", _FSDP2),
        (
            "FSDPState._fsdp_param_groups",
            "find what FSDP2 keeps, with several meshes",
            "`_fsdp_param_group`",
            "torch 2.12 and later",
        ),
    ),
    *entries(
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        ("FSDPParam._module_info", "where a parameter of FSDP2 belongs", _FSDP2),
        ("FSDPParam._sharded_param_data", "find stale shards", _FSDP2),
        ("FSDPParam._unsharded_param", "find what fusers see in the forward", _FSDP2),
        (
            "FSDPParam._init_extensions",
            "gather tensors of another class than the shards on meta had",
            "shard the model after materializing it",
        ),
        (
            "FSDPParam._orig_param_uid",
            "find ties over two FSDP groups",
            "such a tie is not found",
            "torch 2.12 and later",
        ),
    ),
    *entries(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        ("FSDPParamGroup._reset_sharded_params", "find stale shards", _FSDP2),
    ),
    *entries(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        (
            "ActivationWrapper._checkpoint_wrapped_module",
            "take the names of wrappers out of those of parameters",
            "names stay wrapped, and `by_name` draws other values when wrapped",
        ),
    ),
    *entries(
        "torch._dynamo.eval_frame",
        (
            "OptimizedModule._orig_mod",
            "take the names of wrappers out of those of parameters",
            "names stay wrapped, and `by_name` draws other values when compiled",
        ),
    ),
    *entries(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        (
            "FullyShardedDataParallel._fsdp_wrapped_module",
            "take the names of wrappers out of those of parameters",
            "names stay wrapped, and `by_name` draws other values under FSDP1",
        ),
    ),
)
