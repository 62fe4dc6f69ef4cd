"""Saves a model as a checkpoint to start trainings from."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Final

from torch import nn

from deferred_init.errors import MaterializeError

__all__ = ["FORMATS", "save_seed_checkpoint", "usable_folder"]

FORMATS: Final = ("safetensors", "dcp")


def usable_folder(path: str | os.PathLike[str]) -> Path:
    """Check, before any work, that a folder can take a checkpoint.

    Raises:
        ValueError: It is a file, holds something already, or cannot be made.
    """
    folder = Path(path)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{str(path)!r} must be a new or an empty folder")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{str(path)!r} cannot be made in {str(above)!r}")
    return folder


def save_seed_checkpoint(
    model: nn.Module, folder: Path, file_format: str
) -> tuple[str, ...]:
    """Save a model's state dict.

    Args:
        model: Real, and in one piece.
        folder: Made if it is not there.
        file_format: `"safetensors"`, by transformers' own method if the model has it,
            or `"dcp"`, which `torch.distributed.checkpoint` loads under any sharding.

    Returns:
        The names of the files.

    Raises:
        MaterializeError: safetensors is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if file_format == "dcp":
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            # That one process saves alone is what is wanted here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                model.state_dict(),
                storage_writer=FileSystemWriter(folder),
                no_dist=True,
            )
    else:
        _save_safetensors(model, folder)
    return tuple(sorted(path.name for path in folder.iterdir()))


def _save_safetensors(model: Any, folder: Path) -> None:
    try:
        from safetensors.torch import save_model
    except ImportError as error:
        raise MaterializeError(
            f"the format safetensors could not be imported ({error}); install it with "
            'pip install "deferred-init[hf]", or choose the format dcp'
        ) from error
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_model(model, str(folder / "model.safetensors"))
