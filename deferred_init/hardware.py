"""GPUs that can be planned for by name, without having one."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from deferred_init.spelling import closest

__all__ = ["GPUS", "Hardware", "find_gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a plan needs to know of a GPU.

    Attributes:
        name: What it is asked for by.
        memory_bytes: Its memory by the data sheet, where 1 GB is 10^9 bytes. What
            torch can allocate differs by a few per cent.
        compute_capability: Decides which quantization recipes it can run.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


# Memory: NVIDIA's data sheets (B200: an HGX B200 has 1.44 TB in eight). Compute
# capability: https://developer.nvidia.com/cuda-gpus
GPUS: Final = MappingProxyType(
    {
        name: Hardware(
            name=name, memory_bytes=gigabytes * 10**9, compute_capability=capability
        )
        for name, gigabytes, capability in (
            ("a100", 80, (8, 0)),
            ("l40s", 48, (8, 9)),
            ("h100", 80, (9, 0)),
            ("h200", 141, (9, 0)),
            ("b200", 180, (10, 0)),
        )
    }
)


def find_gpu(name: str) -> Hardware:
    """Look a GPU up by name; upper and lower case are the same.

    Raises:
        ValueError: It is not in the table; names the nearest that is.

    Example:
        >>> find_gpu("H200").compute_capability
        (9, 0)
    """
    if not isinstance(name, str) or name.lower() not in GPUS:
        raise ValueError(
            f"no GPU is called {name!r}; {closest(str(name).lower(), GPUS)}"
        )
    return GPUS[name.lower()]
