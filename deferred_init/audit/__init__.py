"""The audit: looks at a model as a stranger would, and says what is wrong with it.

It shares no bookkeeping with the steps before it. What must be *the same
as before* can only be judged with a snapshot from before; `materialize` takes one,
and an audit alone checks what can be seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from deferred_init.audit import (  # noqa: F401 - they register their detectors
    carryover,
    deferred,
    identity,
    membership,
    modules,
    structure,
    values,
)
from deferred_init.audit.explanations import EXPLANATIONS, Explanation
from deferred_init.audit.graph import look
from deferred_init.audit.scene import Scene, detectors, register_detector
from deferred_init.audit.snapshot import Snapshot, take_snapshot
from deferred_init.record.paused import no_function_modes
from deferred_init.report import Finding

__all__ = [
    "EXPLANATIONS",
    "Explanation",
    "Scene",
    "Snapshot",
    "register_detector",
    "run_audit",
    "take_snapshot",
]


def run_audit(
    models: Sequence[nn.Module],
    *,
    optimizers: Sequence[Optimizer] = (),
    holders: Iterable[object] = (),
    verify: str = "fast",
    expected: Snapshot | None = None,
    device: torch.device | None = None,
    dtypes: Collection[torch.dtype] = (),
    dtype_forced: bool = False,
    rebound: Iterable[str] = (),
) -> list[Finding]:
    """Run all detectors; changes nothing.

    Args:
        models: The models, which may share parts.
        optimizers: Must hold the models' parameters and no stale ones.
        holders: Whatever else holds parameters.
        verify: `"full"` also reads all values, which waits for the device.
        expected: What `take_snapshot` saw before.
        device: Where everything that was deferred then has to be now.
        dtypes: Dtypes that floating-point tensors may have been given.
        dtype_forced: Whether the one dtype in `dtypes` was asked for, for all.
        rebound: Names whose tensor could not stay the same object.

    Returns:
        The findings, in the order of the detectors and of the places.
    """
    with no_function_modes():  # else each look at a subclass asks for its function
        scene = Scene(
            graph=look(models, optimizers, holders),
            optimizers=tuple(optimizers),
            full=verify == "full",
            expected=expected,
            device=device,
            dtypes=frozenset(dtypes),
            dtype_forced=dtype_forced,
            rebound=frozenset(rebound),
        )
        return [finding for detector in detectors() for finding in detector(scene)]
