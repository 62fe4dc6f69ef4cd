"""SIGKILL at every boundary of `materialize`, each in a child of its own.

`python -m tests.reliability.kills MODULE:FUNCTION [WEIGHTS]` is the parent of the
victims, and writes how many there were.
"""

from __future__ import annotations

import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import deferred_init as di
from tests.reliability.faults import EVERY, Boundaries
from tests.reliability.tally import tally

__all__ = ["kill_at_boundaries"]

ROOT = Path(__file__).resolve().parents[2]


def kill_at_boundaries(make: str, weights: Path | None, folder: Path) -> int:
    """Kill a process at the boundaries of `materialize`, and look for what it left.

    Args:
        make: What makes the model, as `module:function`.
        weights: A file to load from, which must not change.
        folder: Where a folder for the processes' temporary files is made.

    Returns:
        The number of processes killed.
    """
    content = None if weights is None else weights.read_bytes()
    shared = set(Path("/dev/shm").iterdir())
    scratch = folder / "tmp"
    scratch.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.reliability.kills", make),
            *(() if weights is None else (str(weights),)),
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kills = int(done.stdout)
    tally["kills"] += kills
    assert list(scratch.iterdir()) == []
    assert {p for p in set(Path("/dev/shm").iterdir()) - shared if _ours(p)} == set()
    assert weights is None or weights.read_bytes() == content
    return kills


def _ours(path: Path) -> bool:
    """Whether an entry of shared memory may come from torch in a victim."""
    return path.name.startswith(("torch_", "psm_"))


def _main(target: str, weights: str | None = None) -> None:
    make = pkgutil.resolve_name(target)
    with Boundaries() as counted:
        di.materialize(make(), "cpu", weights=weights)
    places = range(1, len(counted.crossed) + 1, EVERY)
    for at in places:
        victim = os.fork()
        if victim == 0:
            with Boundaries(at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                di.materialize(make(), "cpu", weights=weights)
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        assert os.WIFSIGNALED(status), (at, status)
        assert os.WTERMSIG(status) == signal.SIGKILL, at
    sys.stdout.write(f"{len(places)}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
