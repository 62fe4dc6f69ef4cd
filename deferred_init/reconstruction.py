"""How a Hugging Face model is constructed a second time.

A `PreTrainedModel` keeps its class and its config, but neither the default dtype of
the time nor the options of its constructor. Those are found out by trying on meta.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deferred_init.default_dtype import default_dtype
from deferred_init.inventory import site_of
from deferred_init.rng import GeneratorSnapshot
from deferred_init.slots import ModuleSite, SlotKind
from deferred_init.structure_only import StructureOnly
from deferred_init.twin import difference

__all__ = ["Construction", "find_construction"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """How a model is constructed again.

    Attributes:
        dtype: The default dtype meanwhile.
        options: Flags for the constructor, such as `add_pooling_layer`.
        cast: Whether floating-point tensors are cast afterwards, as `.to(dtype)` did.
    """

    dtype: torch.dtype
    options: Mapping[str, bool] = field(default_factory=dict)
    cast: bool = False

    def build(self, model: nn.Module) -> nn.Module:
        """Construct the model anew, on the current default device."""
        with _quiet(), default_dtype(self.dtype), _patches():
            config = copy.deepcopy(model.config)
            twin: nn.Module = type(model)(config, **self.options)
        return twin

    def assumptions(self, model: nn.Module) -> tuple[str, ...]:
        """Name what the model does not tell."""
        if not self.cast:
            return ()
        kind = type(model).__name__
        return (
            f"{kind} was constructed while the default dtype was {self.dtype}, as it "
            "is now, and cast afterwards; where it was another one, set that one for "
            "`materialize` as well, or build the model inside `deferred_init(...)`",
        )

    def describe(self, model: nn.Module) -> str:
        """Name the call, for reports."""
        flags = "".join(f", {key}={value}" for key, value in self.options.items())
        return f"{type(model).__name__}(config{flags})"


def find_construction(
    site: ModuleSite,
) -> tuple[Construction, ModuleSite] | None:
    """Find a construction on meta with the structure of the model, and its site."""
    generators = GeneratorSnapshot(torch.device("cpu"))
    for construction in _candidates(site):
        try:
            with StructureOnly():
                built = construction.build(site.module)
        except Exception:  # noqa: BLE001 - constructors raise anything; hf.py is next
            continue
        finally:
            generators.restore()
        twin = site_of(built)
        if difference(site, twin, dtypes=not construction.cast) is None:
            return construction, twin
    return None


def _candidates(site: ModuleSite) -> Iterator[Construction]:
    """Yield constructions, the most likely first; few, as each is tried."""
    default = torch.get_default_dtype()
    configured = _as_dtype(getattr(site.module.config, "dtype", None))
    held = {
        slot.tensor.dtype
        for below in site.post_order()
        for slot in below.slots
        if slot.kind is SlotKind.PARAMETER and slot.tensor.is_floating_point()
    }
    dtypes = [dtype for dtype in (configured, default) if dtype in held]
    dtypes += [dtype for dtype in held if dtype in (torch.float16, torch.bfloat16)]
    dtypes = list(dict.fromkeys(dtypes)) or [default]
    model_class = type(site.module)
    for chosen in _options(model_class):
        for dtype in dtypes:
            yield Construction(dtype=dtype, options=chosen)
    for chosen in _options(model_class):
        yield Construction(dtype=default, options=chosen, cast=True)


def _options(model_class: type) -> Iterator[dict[str, bool]]:
    """Yield no options for a constructor, then each flag that it has, turned over."""
    yield {}
    for parameter in inspect.signature(model_class).parameters.values():
        if isinstance(parameter.default, bool):
            yield {parameter.name: not parameter.default}


def _as_dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        value = getattr(torch, value, None)
    return value if isinstance(value, torch.dtype) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, which were seen when the model was built."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _patches() -> Iterator[None]:
    """Class replacements that the user registered with transformers, if any."""
    from transformers.monkey_patching import apply_patches

    with apply_patches():
        yield
