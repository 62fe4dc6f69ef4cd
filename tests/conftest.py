"""What tests of all folders share: scripts in processes of their own, Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that lets tests of several ranks run on GPUs."""
    parser.addoption(
        "--backend",
        choices=("gloo", "nccl"),
        default=os.environ.get("DEFERRED_INIT_BACKEND", "gloo"),
        help="what ranks talk by in tests/distributed: gloo on CPUs (the default), or "
        "nccl with one GPU a rank",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The processes that tests start have to know it as well.
    os.environ["DEFERRED_INIT_BACKEND"] = config.getoption("--backend")


def _run(
    *command: str,
    ranks: int | None = None,
    environment: Mapping[str, str] | None = None,
    status: int = 0,
) -> str:
    """Run a Python command in the repository's root; what it printed."""
    # A standalone rendezvous chooses a free port by itself.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    launch = () if ranks is None else (*torchrun, str(ranks))
    done = subprocess.run(
        [sys.executable, *launch, *command],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def run_script() -> Callable[..., str]:
    """Run a script: `run_script(FILE, *ARGUMENTS, ranks=2)`; its standard output.

    `ranks` starts so many processes with torchrun, `environment` adds variables, and
    `status` is the exit status that has to come.
    """
    return _run


@pytest.fixture(autouse=True)
def _nothing_recorded_before() -> None:
    """Begin as a process does: no recording of another test is still to be made."""
    from deferred_init.record.starts import forget_start

    forget_start()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the collector of garbage off, as long jobs do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
