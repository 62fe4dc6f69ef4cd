"""Process groups that the tests share, one per world size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The processes that are started have to import the tests by name as well.
sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    processes = [process for pool in pools.values() for process in pool.processes]
    for pool in pools.values():
        pool.close()
    assert not any(process.is_alive() for process in processes)


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """Return a function that gives the pool of a world size."""
    return lambda world_size: _pools.setdefault(world_size, RankPool(world_size))
