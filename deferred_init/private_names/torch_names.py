"""Private names of torch."""

from __future__ import annotations

from deferred_init.private_names.entry import entries

__all__ = ["TORCH_NAMES"]

_NO_SWAP = "none: identity could not be kept; rebind every holder instead"
_NO_RECORD = "none for recorded models; models on meta still work"
_HOOKS = "hooks of tensors would be lost; read them through the public handles"
_TABLES = "none: the public accessors leave out what is None, tied or not persistent"
_MODULE_HOOKS = "hooks are not compared, nor carried over by a conversion"
_OLD_NORM = "such a module is refused; record it or use `parametrizations`"
_UNPICKLER = "allow the class's new name in `sources/dcp.py`"
_MRO = "name the public subclasses one by one"

TORCH_NAMES = (
    *entries(
        "torch",
        ("_C._swap_tensor_impl", "swap past views, and undo", _NO_SWAP),
        (
            "_C._len_torch_function_stack",
            "see whether the default device alone is in force",
            "never leave it out: init functions run a little slower",
        ),
        (
            "_C._len_torch_dispatch_stack",
            "see whether the mode of a policy by names alone is in force",
            "never leave it out: those policies run a little slower",
        ),
        (
            "_C._functorch.peek_interpreter_stack",
            "leave factories inside of `torch.vmap` to torch",
            "dispatch every factory: recording takes longer",
        ),
        (
            "_C._nn._parse_to",
            "send `module.to(0)` to meta where there is no GPU",
            "leave it out: only a machine without a GPU refuses such a call",
        ),
        (
            "Tensor._use_count",
            "find what keeps a tensor from being swapped",
            "let `torch.utils.swap_tensors` refuse, and rebind",
        ),
        (
            "Tensor._cdata",
            "tell whether a swap has happened",
            "keep a flag, at the price of a gap for interrupts",
        ),
        (
            "Generator._cdata",
            "tell generators apart, which are dispatched as new objects",
            "none: numbers would come from a generator of another seed",
        ),
        (
            "UntypedStorage._cdata",
            "tell apart storages on meta, where `data_ptr()` is 0",
            "compare bases and views only",
        ),
        (
            "UntypedStorage._new_with_weak_ptr",
            "see whether a storage that was handed out is still alive",
            "keep every storage that was handed out until the end",
        ),
        (
            "UntypedStorage._checkpoint_offset",
            "read single tensors of a `torch.save` file",
            "the file is loaded as a whole",
        ),
        (
            "Tensor._make_subclass",
            "make Parameters and deferred tensors over given memory",
            _NO_RECORD,
        ),
        ("Tensor._is_view", "order views after bases", "ask `_base`"),
        ("_neg_view", "rebuild views that negate", "`x.conj().imag` on a copy"),
        ("Tensor._base", "rebuild autograd's view relation", "plain windows"),
        (
            "Tensor._version",
            "notice changes in place",
            "changes in place after a view was taken are not noticed",
        ),
        ("Tensor._backward_hooks", "carry hooks over", _HOOKS),
        ("Tensor._post_accumulate_grad_hooks", "carry hooks over", _HOOKS),
        (
            "nn.Parameter._is_param",
            "mark a DTensor as a Parameter, as torch does",
            "wrap it in `nn.Parameter`, which drops the spec",
        ),
        (
            "_C._RestorePythonTLSSnapshot",
            "see autocast around operations on recorded tensors",
            "forwards under autocast of recorded models give other values",
        ),
        (
            "_C._dispatch_has_kernel_for_dispatch_key",
            "tell which operations autocast would have changed",
            "forwards under autocast in a recorded constructor give other values",
        ),
        (
            "_C._disabled_torch_function_impl",
            "keep `torch.nn.init` from going through Python twice",
            _NO_RECORD,
        ),
        ("_C.DisableTorchFunction", "make tensors unrecorded", _NO_RECORD),
        ("_C.DisableTorchFunctionSubclass", "make tensors unrecorded", _NO_RECORD),
        ("_C._DisableTorchDispatch", "make tensors unrecorded", _NO_RECORD),
        (
            "_C._storage_Use_Count",
            "see whether scratch memory is still held by a view",
            "keep scratch until the end of a step, at the price of its memory",
        ),
        ("_C.TensorBase", "what a deferred tensor overrides", _NO_RECORD),
        (
            "_C._nn._parse_to",
            "read the arguments of `Tensor.to` as torch does",
            "parse them by hand",
        ),
        (
            "ops.aten._to_copy",
            "the cast that a recorded `to` becomes",
            "`Tensor.to` under a mode",
        ),
        (
            "ops.aten.add.out._overloadpacket",
            "find an operator without `out=`, for the strides of what it resizes",
            "outputs are contiguous, and the audit names those of other strides",
        ),
        (
            "ops.aten._linalg_svd.default",
            "know the layout of singular vectors on a CPU",
            "leave it out: the audit names those of other strides",
        ),
        (
            "_C._get_dispatch_mode",
            "leave what runs under a `FakeTensorMode` out of a recording",
            "look for the mode in `torch.utils._python_dispatch`",
        ),
        (
            "_C._TorchDispatchModeKey.FAKE",
            "leave what runs under a `FakeTensorMode` out of a recording",
            "look for the mode in `torch.utils._python_dispatch`",
        ),
        (
            "ops.aten.add.Tensor._schema",
            "tell which arguments an operation writes",
            "none: recording and dry runs need it",
        ),
        (
            "_debug_has_internal_overlap",
            "keep poison away from expanded memory",
            "compare strides and sizes",
        ),
        (
            "_utils._rebuild_tensor",
            "let a deep copy of a recorded tensor be recorded",
            "deep copies in a recorded constructor are refused",
        ),
        ("nn.Module._parameters", "every slot of a module", _TABLES),
        ("nn.Module._buffers", "every slot of a module", _TABLES),
        ("nn.Module._modules", "every slot of a module", _TABLES),
        ("nn.Module._non_persistent_buffers_set", "persistence of buffers", _TABLES),
        ("nn.Module._forward_hooks", "compare and carry hooks", _MODULE_HOOKS),
        ("nn.Module._forward_hooks_with_kwargs", "carry hooks", _MODULE_HOOKS),
        ("nn.Module._forward_hooks_always_called", "carry hooks", _MODULE_HOOKS),
        ("nn.Module._forward_pre_hooks", "compare and carry hooks", _MODULE_HOOKS),
        ("nn.Module._forward_pre_hooks_with_kwargs", "carry hooks", _MODULE_HOOKS),
        ("nn.Module._backward_hooks", "compare and carry hooks", _MODULE_HOOKS),
        ("nn.Module._backward_pre_hooks", "compare and carry hooks", _MODULE_HOOKS),
        ("nn.Module._is_full_backward_hook", "carry hooks", _MODULE_HOOKS),
        ("nn.Module._state_dict_hooks", "compare and carry hooks", _MODULE_HOOKS),
        ("nn.Module._state_dict_pre_hooks", "compare and carry hooks", _MODULE_HOOKS),
        (
            "nn.Module._load_state_dict_pre_hooks",
            "compare and carry hooks",
            _MODULE_HOOKS,
        ),
        (
            "nn.Module._load_state_dict_post_hooks",
            "compare and carry hooks",
            _MODULE_HOOKS,
        ),
        (
            "nn.Module._load_from_state_dict",
            "tell a load from other in-place writes",
            "loading into a model that is being recorded is refused",
        ),
        (
            "nn.RNNBase._flat_weights",
            "find recurrent weights that went stale",
            "they are not audited",
        ),
        (
            "nn.RNNBase._flat_weights_names",
            "know which tensors `reset_parameters` writes",
            "ask `named_parameters(recurse=False)`",
        ),
        (
            "nn.MultiheadAttention._reset_parameters",
            "the values of attention",
            "none: record the constructor instead",
        ),
        (
            "nn.Transformer._reset_parameters",
            "the values of a Transformer",
            "none: record the constructor instead",
        ),
    ),
    *entries(
        "torch.nn.init",
        (
            "_no_grad_trunc_normal_",
            "record `trunc_normal_` as one operation",
            "record its parts, at the price of memory for each",
        ),
    ),
    *entries("torch.nn.modules.batchnorm", ("_NormBase", "all batch norms", _MRO)),
    *entries("torch.nn.modules.conv", ("_ConvNd", "all convolutions", _MRO)),
    *entries(
        "torch.nn.utils.parametrizations",
        ("_WeightNorm", "compute a weight norm again", _OLD_NORM),
        ("_SpectralNorm", "compute a spectral norm again", _OLD_NORM),
        ("_Orthogonal", "compute an orthogonal weight again", _OLD_NORM),
    ),
    *entries(
        "torch.cuda",
        (
            "_lazy_seed_tracker",
            "undo a seed set before CUDA starts",
            "leave it: only a constructor that seeds notices",
        ),
    ),
    *entries(
        "torch.jit._script",
        (
            "RecursiveScriptModule",
            "refuse scripted modules by name",
            "none: they would be planned like others, and fail later",
        ),
    ),
    *entries(
        "torch.serialization",
        ("_get_layout", "read DCP metadata without running code", _UNPICKLER),
    ),
    *entries(
        "torch.utils._device",
        (
            "DeviceContext",
            "construct on meta without drawing, under one mode",
            "`torch.device` as a context, whose draws take a quarter of the time",
        ),
        (
            "_device_constructors",
            "the list of functions that make tensors",
            "a list of our own",
        ),
    ),
    *entries(
        "torch.utils._pytree",
        ("tree_leaves", "find tensors in arguments", "`optree`, or a walk of our own"),
        ("tree_map_only", "replace tensors in arguments", "a walk of our own"),
    ),
    *entries(
        "torch.utils._python_dispatch",
        (
            "TorchDispatchMode",
            "see operations: dry runs, recording, seeds by name",
            "none; torch documents it, though the module is private",
        ),
        (
            "_disable_current_modes",
            "leave a dry run for the values that it needs",
            "compute them before the dry run",
        ),
    ),
    *entries(
        "torch._subclasses.fake_tensor",
        (
            "FakeTensor",
            "recognize fake tensors as deferred",
            "they count as unknown subclasses and are refused",
        ),
    ),
)
