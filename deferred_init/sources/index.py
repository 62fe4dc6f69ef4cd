"""The index of a sharded checkpoint: which file holds which tensor."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

from deferred_init.errors import PlanError, listing
from deferred_init.sources.byte_files import LocalFile, RemoteFile
from deferred_init.sources.strict_json import parse_strictly

__all__ = ["is_inside", "parse_index", "read_index"]

_MAX_INDEX_BYTES = 500_000_000


def read_index(path: Path) -> dict[str, Path]:
    """Read an index in Hugging Face's form and check every path in it.

    Args:
        path: A `*.index.json` file with a `weight_map` of key to file name.

    Returns:
        For each key the file, within the folder of the index.

    Raises:
        PlanError: It is malformed, names a place outside its folder, or names files
            that are not there (a download that was not finished).
    """
    weight_map = parse_index(LocalFile(path))
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise PlanError(
            f"{path}: {len(absent)} of the {len(names)} files that it names are not "
            f"there: {listing(absent)}. Fetch the checkpoint again"
        )
    return {key: path.parent / name for key, name in weight_map.items()}


def parse_index(file: LocalFile | RemoteFile) -> dict[str, str]:
    """Return the file name of each key; every name lies within the index's folder.

    Raises:
        PlanError: It is malformed, or names a place outside its folder.
    """
    if file.size > _MAX_INDEX_BYTES:
        raise PlanError(
            f"{file.name}: more than {_MAX_INDEX_BYTES:,} bytes, which no index needs"
        )
    text = bytearray(file.size)
    try:
        file.read_into(0, memoryview(text))
        content = parse_strictly(text)
    except (ValueError, OSError) as error:
        raise PlanError(
            f"{file.name} is not a usable index: {str(error)[:300]}"
        ) from None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name for name in weight_map.values()
    ):
        raise PlanError(
            f"{file.name} is not a usable index: `weight_map` is not there, or does "
            "not map keys to file names"
        )
    outside = sorted({name for name in weight_map.values() if not is_inside(name)})
    if outside:
        raise PlanError(
            f"{file.name}: {len(outside)} file names lead out of the folder: "
            f"{listing(outside)}. An index may only name files beside or below it"
        )
    return weight_map


def is_inside(name: str) -> bool:
    """Whether a name stays in the folder, on any system; symlinks are the owner's."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return (
        "\x00" not in name
        and not posix.is_absolute()
        and not windows.drive
        and not windows.root
        and ".." not in posix.parts
        and ".." not in windows.parts
    )
