"""Failures in the middle of loading leave the model untouched, and nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deferred_init as di
from deferred_init.loading import session as session_module
from deferred_init.loading.engine_options import EngineOptions
from deferred_init.sources import Extent, TensorInfo, open_source

LAYERS = 20


def build() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    model.append(nn.Linear(8, 8, bias=False))
    model[LAYERS].weight = model[0].weight
    return model


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return build()


def state_of(model: nn.Module) -> list[Any]:
    return [
        (name, id(tensor), tensor.device.type, type(tensor), tensor.requires_grad)
        for name, tensor in model.named_parameters(remove_duplicate=False)
    ]


class FailingFile:
    """A file whose n-th read fails, however far loading has come."""

    def __init__(self, at: int, error: type[BaseException] = OSError) -> None:
        self.name = "failing.bin"
        self._at = at
        self._error = error
        self._lock = threading.Lock()
        self.reads = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.reads += 1
            if self.reads == self._at:
                raise self._error("Input/output error")
        buffer[:] = bytes(len(buffer))

    def check_unchanged(self) -> None:
        pass

    def map(self) -> None:
        return None


class FileSource:
    """All tensors of a model, in one file."""

    name = "a failing store"

    def __init__(self, file: FailingFile) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        offset = 0
        for name, tensor in build().state_dict().items():
            if name == f"{LAYERS}.weight":
                continue  # the tie is stored once
            info = TensorInfo(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                extent=Extent(file=file, offset=offset),
            )
            self.tensors[name] = info
            offset += info.num_bytes

    def read(self, key: str, start: int, stop: int) -> Tensor:
        raise AssertionError("everything has an extent")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many steps and few reads per step, as a large model has."""
    monkeypatch.setattr("deferred_init.handlers.checkpoint._STEP_BYTES", 600)
    yield
    assert [t for t in threading.enumerate() if "deferred_init" in t.name] == []


@pytest.mark.parametrize("at", range(1, 2 * LAYERS + 1, 2))
def test_a_read_error_at_any_point_leaves_the_model_untouched(
    at: int, small_steps: None
) -> None:
    model = on_meta()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    source = FileSource(FailingFile(at))
    before, random_state = state_of(model), torch.get_rng_state()
    with pytest.raises(di.MaterializeError) as caught:
        di.materialize(model, "cpu", weights=source, optimizers=[optimizer])
    text = str(caught.value)
    assert "from failing.bin failed: Input/output error" in text
    assert "put back as they were" in text
    assert "reading `" in text
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    di.materialize(model, "cpu", weights=dict(build().state_dict()))


def test_without_a_fault_the_same_load_succeeds(small_steps: None) -> None:
    """Else the test above might fail for another reason."""
    file = FailingFile(at=-1)
    model = on_meta()
    report = di.materialize(model, "cpu", weights=FileSource(file))
    assert file.reads == 2 * LAYERS
    assert len([s for s in report.steps if s.initializer == "checkpoint"]) > 5
    assert torch.equal(model[3].weight, torch.zeros(8, 8))
    # What a progress bar counts.
    assert sum(step.num_bytes for step in report.steps) == 20 * (64 + 8) * 4


class FailingSource:
    """A source without offsets that fails, or gives something else."""

    name = "my store"

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.tensors = {
            key: TensorInfo(shape=tuple(value.shape), dtype=value.dtype)
            for key, value in build().state_dict().items()
        }

    def read(self, key: str, start: int, stop: int) -> Tensor:
        if key != "9.weight":
            return torch.zeros(stop - start, *self.tensors[key].shape[1:])
        if isinstance(self._answer, BaseException):
            raise self._answer
        found: Tensor = self._answer
        return found


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (KeyError("gone"), "reading `9.weight` from my store failed: KeyError: 'gone'"),
        (torch.zeros(3, 8), r"the source gave torch.float32 of shape \(3, 8\), it had"),
        (torch.zeros(8, 8).int(), "the source gave torch.int32 of shape"),
    ],
)
def test_a_source_that_fails_or_breaks_its_promise_is_named(
    answer: Any, text: str, small_steps: None
) -> None:
    model = on_meta()
    before = state_of(model)
    with pytest.raises(di.MaterializeError, match=text):
        di.materialize(model, "cpu", weights=FailingSource(answer))
    assert state_of(model) == before


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("change", ["shrinks", "grows", "is_rewritten", "is_replaced"])
def test_a_file_that_changes_between_plan_and_load_is_an_error(
    change: str, mmap: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    state = {key: value.clone() for key, value in build().state_dict().items()}
    save_file(state, path)
    source = open_source(path, mmap=mmap)
    content = path.read_bytes()
    if change == "shrinks":
        os.truncate(path, len(content) - 100)
    elif change == "grows":
        path.write_bytes(content + bytes(8))
    elif change == "is_rewritten":
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    else:
        (tmp_path / "other").write_bytes(content)
        (tmp_path / "other").replace(path)
    model = on_meta()
    before = state_of(model)
    text = "changed while it was used|was written to or replaced while it was used"
    with pytest.raises(di.MaterializeError, match=text):
        di.materialize(model, "cpu", weights=source)
    assert state_of(model) == before


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({k: v.clone() for k, v in build().state_dict().items()}, path)
    model = on_meta()
    before = state_of(model)
    make = session_module.LoadingSession._begin

    def shrink_then_begin(*args: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return make(*args)

    monkeypatch.setattr(session_module.LoadingSession, "_begin", shrink_then_begin)
    text = r"model\.safetensors ends at byte \d+, expected \d+ bytes more: it was cut"
    with pytest.raises(di.MaterializeError, match=text):
        di.materialize(model, "cpu", weights=open_source(path, mmap=False))
    assert state_of(model) == before


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_threads_and_undoes_everything(
    small_steps: None,
) -> None:
    model = on_meta()
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        di.materialize(
            model, "cpu", weights=FileSource(Interrupting(at=3, error=OSError))
        )
    assert state_of(model) == before


class Interrupting(FailingFile):
    """Interrupts the main thread, as Ctrl-C does, while it waits for a read."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.reads += 1
        if self.reads == self._at:
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(0.3)
        buffer[:] = bytes(len(buffer))


_VICTIM = """
import sys, os, signal, threading
sys.path.insert(0, sys.argv[1])
import torch, deferred_init as di
from torch import nn
from deferred_init.sources import byte_files, open_source
reads = 0
lock = threading.Lock()
read_into = byte_files.LocalFile.read_into
def deadly(self, offset, buffer):
    global reads
    with lock:
        reads += 1
        if reads == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
    read_into(self, offset, buffer)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
source = open_source(sys.argv[2], mmap=False)
byte_files.LocalFile.read_into = deadly
di.materialize(model, "cpu", weights=source)
"""


@pytest.mark.parametrize("at", [1, 20, 40])
def test_a_killed_process_leaves_no_files(at: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    save_file(dict(model.state_dict()), path)
    content, scratch = path.read_bytes(), tmp_path / "tmp"
    scratch.mkdir()
    root = str(Path(di.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_VICTIM), root, str(path), str(at)],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(scratch.iterdir()) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, "tmp"]
    assert path.read_bytes() == content


def test_options_take_no_more_threads_than_there_are_cores() -> None:
    assert EngineOptions(num_readers=3).readers() == 3
    assert 1 <= EngineOptions().readers() <= min(16, os.cpu_count() or 1)
