"""Every private name of other packages that this one relies on, in one list.

A private name may go in any release. Each stands here with what it is for and what
happens without it; `missing_names()` looks for them, and a test fails loudly, with
this text, when a release that is tested against lacks one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass

__all__ = ["PRIVATE_NAMES", "PrivateName", "missing_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One name that its package does not promise to keep.

    Attributes:
        module: Where it is imported from; its first part is the package.
        name: Dotted path in that module.
        purpose: What it is for here.
        fallback: What happens, or is to be done, without it.
    """

    module: str
    name: str
    purpose: str
    fallback: str

    @property
    def path(self) -> str:
        """Module and name, joined."""
        return f"{self.module}.{self.name}"

    def exists(self) -> bool:
        """Whether the installed release has it; imports its module."""
        try:
            found: object = importlib.import_module(self.module)
        except ImportError:
            return False
        try:
            functools.reduce(getattr, self.name.split("."), found)
        except AttributeError:
            return False
        return True


_NO_SWAP = "none: identity could not be kept; rebind every holder instead"
_NO_RECORD = "none for recorded models; models on meta still work"
_HOOKS = "hooks of tensors would be lost; read them through the public handles"

PRIVATE_NAMES: tuple[PrivateName, ...] = tuple(
    PrivateName(module=module, name=name, purpose=purpose, fallback=fallback)
    for module, name, purpose, fallback in (
        ("torch", "_C._swap_tensor_impl", "swap past views, and undo", _NO_SWAP),
        (
            "torch",
            "Tensor._use_count",
            "find what keeps a tensor from being swapped",
            "let `torch.utils.swap_tensors` refuse, and rebind",
        ),
        (
            "torch",
            "Tensor._cdata",
            "tell whether a swap has happened",
            "keep a flag, at the price of a gap for interrupts",
        ),
        (
            "torch",
            "UntypedStorage._cdata",
            "tell apart storages on meta, where `data_ptr()` is 0",
            "compare bases and views only",
        ),
        (
            "torch",
            "Tensor._make_subclass",
            "make Parameters and deferred tensors over given memory",
            _NO_RECORD,
        ),
        ("torch", "Tensor._is_view", "order views after bases", "ask `_base`"),
        ("torch", "Tensor._base", "rebuild autograd's view relation", "plain windows"),
        ("torch", "Tensor._backward_hooks", "carry hooks over", _HOOKS),
        ("torch", "Tensor._post_accumulate_grad_hooks", "carry hooks over", _HOOKS),
        ("copyreg", "_slotnames", "compare slots of two classes", "walk `__slots__`"),
        (
            "torch",
            "_C._disabled_torch_function_impl",
            "keep `torch.nn.init` from going through Python twice",
            _NO_RECORD,
        ),
        ("torch", "_C.DisableTorchFunction", "make tensors unrecorded", _NO_RECORD),
        (
            "torch",
            "_C.DisableTorchFunctionSubclass",
            "make tensors unrecorded",
            _NO_RECORD,
        ),
        ("torch", "_C._DisableTorchDispatch", "make tensors unrecorded", _NO_RECORD),
        (
            "torch",
            "_C._storage_Use_Count",
            "see whether scratch memory is still held by a view",
            "keep scratch until the end of a step, at the price of its memory",
        ),
        ("torch", "_C.TensorBase", "what a deferred tensor overrides", _NO_RECORD),
        (
            "torch",
            "_C._nn._parse_to",
            "read the arguments of `Tensor.to` as torch does",
            "parse them by hand",
        ),
        (
            "torch.cuda",
            "_lazy_seed_tracker",
            "undo a seed set before CUDA starts",
            "leave it: only a constructor that seeds notices",
        ),
        (
            "torch.utils._device",
            "_device_constructors",
            "the list of functions that make tensors",
            "a list of our own",
        ),
        (
            "torch.utils._python_dispatch",
            "TorchDispatchMode",
            "see operations: dry runs, recording, seeds by name",
            "none; torch documents it, though the module is private",
        ),
        (
            "torch._subclasses.fake_tensor",
            "FakeTensor",
            "recognize fake tensors as deferred",
            "they count as unknown subclasses and are refused",
        ),
        (
            "torch.distributed.tensor._dtensor_spec",
            "DTensorSpec",
            "make a DTensor around a local shard",
            "`DTensor.from_local`, which may communicate",
        ),
        (
            "torch.distributed.tensor._dtensor_spec",
            "TensorMeta",
            "make a DTensor around a local shard",
            "`DTensor.from_local`, which may communicate",
        ),
        (
            "transformers.initialization",
            "TORCH_INIT_FUNCTIONS",
            "run a model's own init on tensors that are real in part",
            "models that are loaded in part are refused",
        ),
        (
            "transformers",
            "PreTrainedModel._init_weights",
            "the values of Hugging Face models",
            "none: record the constructor instead",
        ),
        (
            "transformers.monkey_patching",
            "apply_patches",
            "construct a model as `from_config` does",
            "construct without patches",
        ),
        (
            "transformer_engine.pytorch.ops.op",
            "BasicOperation.pre_first_fuser_forward",
            "make the parameters of an op by its own hook",
            "the op is listed as unclaimed; record it or register an initializer",
        ),
        (
            "transformer_engine.pytorch.ops.fuser",
            "OperationFuser",
            "find fusers that cache Parameters",
            "fusers of others are not refreshed; build them afterwards",
        ),
        (
            "transformer_engine.pytorch.module.base",
            "TransformerEngineBaseModule",
            "recognize modules of Transformer Engine",
            "they are asked for `reset_parameters` like any module",
        ),
    )
)


def missing_names(*, imported_only: bool = True) -> tuple[PrivateName, ...]:
    """Return the names that the installed releases lack.

    Args:
        imported_only: Look only into packages that are imported already; otherwise
            those that are not installed count as missing too.
    """
    return tuple(
        name
        for name in PRIVATE_NAMES
        if not (imported_only and name.module.partition(".")[0] not in sys.modules)
        and not name.exists()
    )
