"""Lets accelerate treat CPUs as GPUs, in processes that have this on their path.

Accelerate shards with FSDP and splits with tensor parallelism on accelerators only,
although its code and torch's run on CPUs with gloo. It is told here which backend there
is, and nothing else.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_ASKED = "accelerate.state"


def _gloo_where_there_are_ranks(state: ModuleType) -> None:
    types: Any = state.DistributedType

    def prepare_backend(*_: object, **__: object) -> tuple[str | None, Any]:
        if "LOCAL_RANK" in os.environ:
            return "gloo", types.MULTI_GPU
        return None, types.NO

    state.PartialState._prepare_backend = prepare_backend  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != _ASKED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def and_then(module: ModuleType) -> None:
            execute(module)
            _gloo_where_there_are_ranks(module)

        spec.loader.exec_module = and_then  # type: ignore[method-assign]
        return spec


os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP without the index of a GPU
sys.meta_path.insert(0, _Finder())
