"""Files on a disk, objects in a store and tensors in memory, all as `ByteFile`."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from deferred_init.aliases import dense_bytes
from deferred_init.errors import PlanError

__all__ = ["LocalFile", "RemoteFile", "TensorBytes", "memory_of", "open_bytes"]

_READ_BYTES = 1 << 24
_Identity = tuple[int, int, int]


class LocalFile:
    """A file on a file system; opened anew by each thread that reads it.

    Args:
        path: The file.
        mapped: Whether tensors may be left in the file instead of being copied.

    Raises:
        PlanError: It is not there, or is not a file.
    """

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        self.path = path
        self._mapped = mapped
        try:
            self._identity, self.size = _identity(os.stat(path))
        except OSError as error:
            raise PlanError(f"{path}: {error.strerror or error}") from error
        if not path.is_file():
            raise PlanError(f"{path}: expected a file")
        self._local = threading.local()

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer; see `ByteFile`."""
        descriptor = self._descriptor()
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(
                    f"{self.path} ends at byte {offset + done}, expected "
                    f"{len(buffer) - done} bytes more: it was cut while it was read"
                )
            done += count

    def check_unchanged(self) -> None:
        """Compare size, time of change and inode; see `ByteFile`."""
        identity, size = _identity(os.stat(self.path))
        if size != self.size:
            raise OSError(
                f"{self.path} changed while it was used: it had {self.size} bytes, "
                f"now it has {size}. Load it again when nobody writes it any more"
            )
        if identity != self._identity:
            raise OSError(
                f"{self.path} was written to or replaced while it was used. Load it "
                "again when nobody writes it any more"
            )

    def map(self) -> Any | None:
        """Map it copy-on-write: what is written never reaches the file."""
        if not self._mapped or self.size == 0:
            return None
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptor, self.size, flags=mmap.MAP_PRIVATE, prot=access)
        except OSError:  # a file system without mmap, or a limit on memory
            return None
        finally:
            os.close(descriptor)

    def _descriptor(self) -> int:
        held: _Descriptor | None = getattr(self._local, "descriptor", None)
        if held is None:
            held = _Descriptor(self.path)
            self._local.descriptor = held
        return held.number


class _Descriptor:
    """An open file that closes when its thread ends."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class RemoteFile:
    """A file behind any address that fsspec knows: `s3://...`, `memory://...`.

    Args:
        url: The address.

    Raises:
        PlanError: It cannot be reached, fsspec or a plug-in of it is not installed.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        try:
            import fsspec

            self._fs, self._path = fsspec.core.url_to_fs(url)
            self.size = int(self._fs.size(self._path))
            self._stamp = self._current_stamp()
        except ImportError as error:
            raise PlanError(
                f"{url}: addresses are read by fsspec and its plug-ins, of which one "
                f"could not be imported ({error}). Install it, or fetch the file before"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"{url}: {type(error).__name__}: {error}") from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer; see `ByteFile`."""
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            raise OSError(
                f"{self.name} gave {len(data)} bytes at {offset}, expected "
                f"{len(buffer)}"
            )
        buffer[:] = data

    def check_unchanged(self) -> None:
        """Compare what the store tells about it; see `ByteFile`."""
        self._fs.invalidate_cache()
        if self._current_stamp() != self._stamp:
            raise OSError(
                f"{self.name} changed while it was used. Load it again when nobody "
                "writes it any more"
            )

    def map(self) -> Any | None:
        """Return None: what is far away cannot be mapped."""
        return None

    def _current_stamp(self) -> tuple[Any, ...]:
        about = self._fs.info(self._path)
        keys = ("size", "ETag", "etag", "mtime", "LastModified", "generation")
        return tuple(str(about.get(key)) for key in keys)


class TensorBytes:
    """The memory of a contiguous tensor on the CPU.

    Args:
        name: What errors call it.
        tensor: The tensor; kept alive.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = tensor.detach()
        self.size = dense_bytes(tensor)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy into the buffer, without holding the interpreter's lock."""
        if offset < 0 or offset + len(buffer) > self.size:
            raise OSError(f"{self.name} has {self.size} bytes, asked beyond them")
        if len(buffer):
            target = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            ctypes.memmove(target, self._tensor.data_ptr() + offset, len(buffer))

    def check_unchanged(self) -> None:
        """Memory does not change by itself."""

    def map(self) -> Any | None:
        """Return None: the tensor belongs to somebody."""
        return None


def open_bytes(
    place: Path | str, *, mapped: bool = True, sha256: str | None = None
) -> LocalFile | RemoteFile:
    """Open a path or an address, and compare its checksum if one is given.

    Raises:
        PlanError: It cannot be opened, or the checksum does not match.
    """
    file: LocalFile | RemoteFile
    if isinstance(place, Path):
        file = LocalFile(place, mapped=mapped)
    else:
        file = RemoteFile(place)
    if sha256 is not None and (found := _sha256_of(file)) != sha256.lower():
        raise PlanError(
            f"{file.name}: the checksum does not match: expected SHA-256 {sha256}, "
            f"found {found}. Fetch the file again"
        )
    return file


def _sha256_of(file: LocalFile | RemoteFile) -> str:
    """Read a whole file and return its SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, file.size)))
    for start in range(0, file.size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, file.size - start)]
        file.read_into(start, part)
        digest.update(part)
    return digest.hexdigest()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; valid while the tensor lives."""
    num_bytes = dense_bytes(tensor)
    block = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    return memoryview(block).cast("B")


def _identity(stat: os.stat_result) -> tuple[_Identity, int]:
    return (stat.st_dev, stat.st_ino, stat.st_mtime_ns), stat.st_size
