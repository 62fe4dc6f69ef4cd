"""`deferred_init`: run a constructor and record it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deferred_init.one_at_a_time import generators_alone
from deferred_init.record.factories import RecordFactories
from deferred_init.record.graph import Recording
from deferred_init.record.kept_states import remember_kept, settle_undrawn
from deferred_init.record.mode import RecordOperations
from deferred_init.record.patches import Patches, active
from deferred_init.record.paused import index_of
from deferred_init.record.places import remember_places
from deferred_init.record.problems import RecordError, explained
from deferred_init.record.starts import began_there, remember_start
from deferred_init.record.tensor import DeferredTensor, value_of
from deferred_init.record.watch import GeneratorWatch

__all__ = ["deferred_init", "is_deferred", "recording_of"]

T = TypeVar("T")
_one_at_a_time = threading.Lock()


class _Recorder:
    """Opens the modes of one recording, in any thread."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Record everything that this thread does inside."""
        operations = RecordOperations(self.recording)
        before = active.recorder
        active.recorder = self
        try:
            with operations, RecordFactories(operations):
                yield
        finally:
            active.recorder = before


def deferred_init(
    fn: Callable[..., T],
    *args: Any,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> T:
    """Run any constructor without memory and record how it made every tensor.

    Inside, tensors claim to be on `device` and have shapes but no values; what looks
    at values (`item`, `tolist`, `if t > 0`) gets the true ones, computed alone. The
    result's tensors are deferred: they look like meta tensors, keep recording what is
    done to them, and become what eager construction would have made when they are
    materialized. The generators are left as they were found.

    Args:
        fn: The constructor, or any function that builds something.
        *args: Its positional arguments.
        device: The device that it shall believe to be on; it need not be present.
            By default torch's default device.
        **kwargs: Its keyword arguments.

    Returns:
        What `fn` returns. Inside another `deferred_init`, that one records.

    Raises:
        RecordError: If `fn` does something that can be neither recorded nor
            computed early, naming the operation and the line; or if another
            thread is recording.
    """
    if active.recorder is not None:
        return fn(*args, **kwargs)
    if not _one_at_a_time.acquire(blocking=False):
        raise RecordError(
            "another thread is inside deferred_init; constructors share the default "
            "generator, so they are recorded one at a time: wait for the other one"
        )
    try:
        with generators_alone("deferred_init"):
            return _record(fn, args, kwargs, _device(device))
    finally:
        _one_at_a_time.release()


def _record(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> T:
    """Run a constructor and record it."""
    recording = Recording(device)
    recording.began_as_another = began_there(recording)
    if torch.cuda.is_initialized():
        for index, generator in enumerate(torch.cuda.default_generators):
            recording.cuda_starts[index] = generator.get_state()
    recording.watch = GeneratorWatch(recording)
    recording.active = True
    seeds_queued = _queued_cuda_seeds()
    ended = False
    try:
        with Patches(), _Recorder(recording).modes():
            result = fn(*args, **kwargs)
        ended = True
    except RuntimeError as error:
        problem = explained(error)
        if problem is None:
            raise
        raise problem from error
    finally:
        recording.active, recording.autocast = False, ()
        recording.watch.close()
        _restore_cuda(recording, seeds_queued)
        recording.watch = None
        recording.borrowed.clear()
        if not ended:
            settle_undrawn(recording)
    remember_kept(recording)
    remember_start(recording)
    recording.set_result(result)
    recording.external.clear()
    recording.external_storages.clear()
    remember_places(recording, result)
    return result


def _queued_cuda_seeds() -> dict[str, Any]:
    """Return what `torch.manual_seed` left to be done when CUDA starts."""
    return copy.copy(vars(torch.cuda._lazy_seed_tracker))


def _restore_cuda(recording: Recording, seeds_queued: dict[str, Any]) -> None:
    """Undo for CUDA what a `torch.manual_seed` in the constructor did."""
    vars(torch.cuda._lazy_seed_tracker).update(seeds_queued)
    for index, state in recording.cuda_starts.items():
        torch.cuda.default_generators[index or 0].set_state(state)


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device that the constructor shall believe to be on."""
    found = torch.get_default_device() if device is None else torch.device(device)
    if found.type == "meta":
        if device is not None:
            raise ValueError(
                "device='meta' is no device to construct for: pass the device that "
                "the values are wanted on, such as 'cpu' or 'cuda'"
            )
        return torch.device("cpu")
    if found.type == "cuda" and index_of(found) is None:
        present = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device() if present else 0)
    return found


def is_deferred(obj: Tensor | nn.Module) -> bool:
    """Tell whether a tensor, or any parameter or buffer of a module, is recorded.

    Plain meta tensors, which `materialize` makes as well, are not.

    Args:
        obj: A tensor, or a module with everything below it.

    Raises:
        ValueError: If `obj` is neither a tensor nor a module.
    """
    if isinstance(obj, Tensor):
        return isinstance(obj, DeferredTensor)
    if isinstance(obj, nn.Module):
        tensors = [*obj.parameters(), *obj.buffers()]
        return any(isinstance(tensor, DeferredTensor) for tensor in tensors)
    raise ValueError(
        f"is_deferred takes a tensor or a module, got `{type(obj).__name__}`"
    )


def recording_of(obj: Tensor | nn.Module) -> Recording | None:
    """Return the recording behind a tensor or the first deferred one of a module."""
    if isinstance(obj, nn.Module):
        for tensor in [*obj.parameters(), *obj.buffers()]:
            if isinstance(tensor, DeferredTensor):
                return value_of(tensor).recording
        return None
    return value_of(obj).recording if isinstance(obj, DeferredTensor) else None
