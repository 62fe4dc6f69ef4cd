"""The ring of buffers between a file and a GPU, here with ordinary memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from deferred_init.loading.engine_options import EngineOptions
from deferred_init.loading.read_plan import Chunk
from deferred_init.loading.ring import Ring
from deferred_init.sources.byte_files import TensorBytes

OPTIONS = EngineOptions(num_readers=2, num_buffers=2, buffer_bytes=1024)
FILE = TensorBytes("bytes", torch.arange(4096, dtype=torch.int16))


class Maker:
    """Makes memory and remembers the sizes."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, num_bytes: int) -> Tensor:
        self.made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def chunk(offset: int, num_bytes: int) -> Chunk:
    return Chunk(file=FILE, offset=offset, num_bytes=num_bytes, landings=())


def test_buffers_go_round_and_are_made_once() -> None:
    make = Maker()
    ring = Ring(OPTIONS, make)
    ring.expect([chunk(0, 8192)])
    seen = []
    for _ in range(12):
        slot = ring.take(100)
        seen.append(id(slot))
        ring.give_back(slot)
    assert len(set(seen)) == 4
    assert seen[:4] == seen[4:8] == seen[8:]
    assert make.made == [1024] * 4


def test_a_small_model_makes_small_buffers() -> None:
    make = Maker()
    ring = Ring(OPTIONS, make)
    ring.expect([chunk(0, 40), chunk(40, 60)])
    ring.take(40)
    ring.take(60)
    assert make.made == [100, 100]


def test_a_row_larger_than_a_buffer_makes_that_one_larger() -> None:
    make = Maker()
    ring = Ring(OPTIONS, make)
    ring.expect([chunk(0, 5000)])
    slot = ring.take(5000)
    slot.read(chunk(16, 5000))
    assert make.made == [5000]
    expected = torch.arange(4096, dtype=torch.int16).view(torch.uint8)[16:5016]
    assert torch.equal(slot.memory, expected)


def test_a_buffer_that_cannot_be_made_is_not_lost() -> None:
    def fail(num_bytes: int) -> Tensor:
        raise MemoryError(num_bytes)

    ring = Ring(EngineOptions(num_readers=1, num_buffers=1), fail)
    for _ in range(3):  # would wait for ever if the slot were lost
        with pytest.raises(MemoryError):
            ring.take(10)


def test_closing_wakes_everybody_who_waits_for_a_buffer() -> None:
    ring = Ring(EngineOptions(num_readers=1, num_buffers=1), Maker())
    held = ring.take(10)
    errors: list[str] = []

    def wait() -> None:
        try:
            ring.take(10)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    ring.close()
    for thread in threads:
        thread.join(10)
    assert errors == ["loading was stopped"] * 3
    assert held.memory.numel() >= 10
