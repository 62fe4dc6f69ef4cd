"""Every architecture of transformers and timm, small enough to be built on a CPU."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from zoo_result import TooSlowError, cause, seed_everything
from zoo_shrink import candidates

MAX_PARAMETERS = 60_000_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture.

    Attributes:
        name: Its name.
        prepare: Finds out how to build it and returns a function that does, as
            many times as wanted, each time as if for the first time.
    """

    name: str
    prepare: Callable[[], Callable[[], nn.Module]]


class TooLargeError(Exception):
    """An architecture has more than `MAX_PARAMETERS` parameters, however shrunken."""


def transformers_cases() -> Iterator[Case]:
    """Yield every architecture of `AutoModel` and `AutoModelForCausalLM`."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind, mapping in (
        ("AutoModel", auto.MODEL_MAPPING),
        ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        names = sorted(mapping._model_mapping)
        for model_type in names:
            yield Case(
                name=f"{kind}/{model_type}",
                prepare=functools.partial(_transformers, kind, model_type),
            )


def _transformers(kind: str, model_type: str) -> Callable[[], nn.Module]:
    """Return a function that builds one architecture from a shrunken config."""
    import transformers

    config = _choose(kind, model_type)
    auto: Any = getattr(transformers, kind)
    return lambda: auto.from_config(copy.deepcopy(config))


def _choose(kind: str, model_type: str) -> Any:
    """Return the most shrunken configuration that builds within the limit."""
    import transformers

    auto = getattr(transformers, kind)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]()
    problems = []
    too_large = False
    for level, candidate in candidates(config):
        try:
            with torch.device("meta"):
                probe = auto.from_config(copy.deepcopy(candidate))
            num = sum(p.numel() for p in probe.parameters())
            if num > MAX_PARAMETERS:
                problems.append(f"{level}: {num:,} parameters")
                too_large = True
                continue
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001  try the eager build
            if "meta" not in str(error) and level != "small":
                problems.append(f"{level}: {cause(error)}")
                continue
        try:
            seed_everything()
            auto.from_config(copy.deepcopy(candidate))
        except TooSlowError:
            raise
        except Exception as error:  # noqa: BLE001  try the next candidate
            problems.append(f"{level}: {cause(error)}")
            continue
        return candidate
    kind_of_error = TooLargeError if too_large else ValueError
    raise kind_of_error("; ".join(problems))


def timm_cases() -> Iterator[Case]:
    """Yield every timm architecture with fewer than `MAX_PARAMETERS` parameters."""
    import timm

    for name in timm.list_models():
        yield Case(name=f"timm/{name}", prepare=functools.partial(_timm, name))


def _timm(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds one timm model."""
    import timm

    num = 0
    with torch.device("meta"), contextlib.suppress(Exception):
        num = sum(p.numel() for p in timm.create_model(name).parameters())
    if num > MAX_PARAMETERS:
        raise TooLargeError(f"{num:,} parameters")
    return lambda: timm.create_model(name)  # type: ignore[no-any-return]


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "transformers": transformers_cases,
    "timm": timm_cases,
}
