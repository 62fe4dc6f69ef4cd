"""The loaders that are compared, and what they are compared by."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LOADERS: dict[str, Callable[[Path, torch.device], Any]] = {}


def loader(name: str) -> Callable[[Any], Any]:
    def register(fn: Any) -> Any:
        LOADERS[name] = fn
        return fn

    return register


def empty_model(folder: Path) -> nn.Module:
    """Build the model of a folder's config on meta, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16
        )
    return model


@loader("deferred_init")
def load_ours(folder: Path, device: torch.device) -> nn.Module:
    import deferred_init as di

    start = time.perf_counter()
    model = empty_model(folder)
    built = time.perf_counter() - start
    report = di.materialize(model, device, weights=folder, missing="error")
    stages = {"build": built, **report.seconds}
    text = ", ".join(f"{name} {seconds:.3f}" for name, seconds in stages.items())
    logging.getLogger("deferred_init.loading").debug("%s s", text)
    return model


@loader("deferred_init (copy)")
def load_ours_by_copy(folder: Path, device: torch.device) -> nn.Module:
    import deferred_init as di
    from deferred_init.sources import open_source

    model = empty_model(folder)
    weights = open_source(folder, mmap=False)
    di.materialize(model, device, weights=weights, missing="error")
    return model


@loader("transformers")
def load_transformers(folder: Path, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": str(device)}
    )
    return model


@loader("safetensors")
def load_safetensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state.update(load_file(path, device=str(device)))
    return state


@loader("accelerate")
def load_accelerate(folder: Path, device: torch.device) -> nn.Module:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded: nn.Module = load_checkpoint_and_dispatch(
        model, folder, device_map={"": str(device)}, dtype=torch.bfloat16
    )
    return loaded


def load_fastsafetensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    from fastsafetensors import fastsafe_open

    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    with fastsafe_open(files, device=str(device), nogds=True) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118


def load_streamer(folder: Path, device: torch.device) -> dict[str, Tensor]:
    from runai_model_streamer import SafetensorsStreamer

    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=str(device))
        return dict(streamer.get_tensors())


for _package, _load in (
    ("fastsafetensors", load_fastsafetensors),
    ("runai_model_streamer", load_streamer),
):
    if find_spec(_package) is not None:  # neither is needed for anything else
        LOADERS[_package] = _load


def import_everything(folder: Path) -> None:
    """Import beforehand what loaders import, also when used, so that none pays."""
    import accelerate  # noqa: F401
    import transformers
    from safetensors.torch import load_file  # noqa: F401

    import deferred_init  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    empty_model(folder)


OPTIONS = {
    "readers": "num_readers",
    "buffers": "num_buffers",
    "steps": "steps_ahead",
    "kib": "buffer_bytes",
}
"""Names of the options of a variant; `switch_us`, the time after which Python lets
another thread run, comes in addition."""


@contextmanager
def variant(text: str) -> Iterator[None]:
    """Let deferred_init load with other options than it would choose.

    Args:
        text: As `readers=8,kib=4096`; nothing stands for the options of the package.
    """
    from deferred_init.handlers import checkpoint
    from deferred_init.loading.engine_options import EngineOptions

    given = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        given[name] = int(value)
    interval = sys.getswitchinterval()
    if "switch_us" in given:
        sys.setswitchinterval(given.pop("switch_us") / 1e6)
    if "kib" in given:
        given["kib"] <<= 10
    options = EngineOptions(**{OPTIONS[name]: value for name, value in given.items()})
    checkpoint.EngineOptions = lambda: options  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint.EngineOptions = EngineOptions  # type: ignore[misc]
        sys.setswitchinterval(interval)
