"""Processes that form a process group and run functions of the tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["RankPool"]

_START_S = 120.0
_CALL_S = 90.0
_RETURN_S = 20.0


class RankPool:
    """A process group of processes that lives as long as no call fails.

    Args:
        world_size: Number of processes.
    """

    def __init__(self, world_size: int) -> None:
        from backend import missing_gpus  # reads an option, which is parsed later

        if reason := missing_gpus(world_size):
            pytest.skip(reason)
        self.world_size = world_size
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = _CALL_S
    ) -> list[Any]:
        """Call `function(rank, *args)` on all ranks; return the results by rank.

        Raises:
            AssertionError: If a rank raised or did not come back in time; the
                processes are ended.
        """
        self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [_receive(pipe, timeout_s) for pipe in self._pipes]
        failures = [
            f"rank {rank}: {value}"
            for rank, (ok, value) in enumerate(answers)
            if not ok
        ]
        if failures:
            self.end()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """Ask the processes to return, which they note for coverage, or end them."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(_RETURN_S)
        self.end()

    def end(self) -> None:
        """End the processes, whatever they do, and wait until they are gone."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        if self.processes and all(each.is_alive() for each in self.processes):
            return
        self.end()
        # Port 0 lets the system choose a free one.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self._store.port, theirs),
                daemon=True,
            )
            process.start()
            self.processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            ok, value = _receive(pipe, _START_S)
            assert ok, value


def _receive(pipe: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not pipe.poll(timeout_s):
        return False, f"no answer within {timeout_s} s"
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "the process has ended"
    return answer


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    from backend import join

    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False
    )
    join(store, rank, world_size)
    pipe.send((True, None))
    while True:
        asked = pipe.recv()
        if asked is None:
            return
        function, args = asked
        try:
            pipe.send((True, _on_cpu(function(rank, *args))))
        except BaseException:  # noqa: BLE001 - the parent reports it
            pipe.send((False, traceback.format_exc()))


def _on_cpu(result: Any) -> Any:
    """Bring tensors to where the parent can read them."""
    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)
