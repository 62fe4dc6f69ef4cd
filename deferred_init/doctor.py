"""Say what is installed, what hardware there is, and what is wrong with either."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Any

import torch

from deferred_init.private_names import missing_names

__all__ = ["diagnose", "diagnosis_text"]

_PACKAGES = (
    "deferred-init",
    "torch",
    "transformer-engine",
    "transformers",
    "accelerate",
    "safetensors",
    "rich",
    "matplotlib",
)


def diagnose() -> dict[str, Any]:
    """Collect versions, GPUs and what Transformer Engine has, as plain data.

    Returns:
        `ok` is False if `problems` has any entry.
    """
    problems: list[str] = []
    found = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "transformer_engine": _transformer_engine(problems),
    }
    problems += _missing_names()
    return {"ok": not problems, "problems": problems, **found}


def diagnosis_text(diagnosis: dict[str, Any]) -> str:
    """Word a diagnosis for a person."""
    lines = [f"python              {diagnosis['python']}"]
    for name, version in diagnosis["packages"].items():
        lines.append(f"{name:<19} {version or 'not installed'}")
    lines.append(f"torch built for     {_cuda_text(diagnosis['cuda'])}")
    for gpu in diagnosis["gpus"]:
        major, minor = gpu["compute_capability"]
        lines.append(
            f"GPU {gpu['index']:<15} {gpu['name']}, compute capability {major}."
            f"{minor}, {gpu['memory_bytes'] / 2**30:.1f} GiB"
        )
    if not diagnosis["gpus"]:
        lines.append("GPU                 none that torch can use")
    for key, value in (diagnosis["transformer_engine"] or {}).items():
        lines += _detail_lines(key, value)
    lines += [f"PROBLEM: {problem}" for problem in diagnosis["problems"]]
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
            }
        )
    return gpus


def _transformer_engine(problems: list[str]) -> dict[str, Any] | None:
    """Import Transformer Engine, which fails in more ways than by being absent."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        problems.append(
            f"Transformer Engine is installed but cannot be imported: {error}. It must "
            "be built against the installed torch; see the README"
        )
        return None
    details = importlib.import_module("deferred_init.te.doctor").report()
    return dict(details)


def _missing_names() -> list[str]:
    """Say what the installed releases lack; looks only into what is imported."""
    return [
        f"the installed {name.module.partition('.')[0]} has no `{name.path}`, which is "
        f"used to {name.purpose}; without it: {name.fallback}"
        for name in missing_names()
    ]


def _cuda_text(cuda: str | None) -> str:
    return "CPU only" if cuda is None else f"CUDA {cuda}"


def _detail_lines(key: str, value: Any) -> list[str]:
    """Word one finding about Transformer Engine, its parts on lines of their own."""
    if isinstance(value, dict):
        parts = [f"{name}: {_plain_text(each)}" for name, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [str(each) for each in value]
    else:
        return [f"TE {key}: {_plain_text(value)}"]
    return [f"TE {key}:", *(f"  {part}" for part in parts or ["none"])]


def _plain_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
