"""The verb `audit`: proves a model that may have been made in any way."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from deferred_init.audit import run_audit
from deferred_init.garbage import full_collections_wait
from deferred_init.handlers.ecosystems import load_handlers
from deferred_init.model_arguments import Models, as_models
from deferred_init.report import Report
from deferred_init.validate import as_optimizers, check_verify

__all__ = ["audit"]


@full_collections_wait()
def audit(
    model: Models,
    *,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    holders: Iterable[Any] = (),
    verify: str = "fast",
) -> Report:
    """Prove that a model is ready to train, or say what is wrong with it.

    Looks at the whole object graph and changes nothing; works on any model,
    materialized by this package or not. With `verify="full"` the ranks that share a
    sharded model compare checksums, and each of them has to call this.

    Args:
        model: A module, or several that belong together.
        optimizers: Have to hold the model's parameters, and no stale ones.
        holders: Anything else that holds parameters: EMA lists, dicts, functions with
            closures.
        verify: `"fast"` looks at objects, and at the padding rows of embeddings;
            `"full"` also reads all values, and waits for the device.

    Returns:
        A report whose `findings` are empty if all is well; never raises for them.

    Raises:
        TypeError: `model` or `optimizers` are of the wrong kind.
        ValueError: Another `verify`.
        PlanError: The installed release of a package that the model uses lacks
            something that is needed to look at it.

    Example:
        >>> import torch, deferred_init as di
        >>> di.audit(torch.nn.Linear(4, 2)).ok
        True
    """
    check_verify(verify)
    models, opts = as_models(model), as_optimizers(optimizers)
    load_handlers()
    started = time.perf_counter()
    findings = run_audit(models, optimizers=opts, holders=tuple(holders), verify=verify)
    seconds = {"audit": time.perf_counter() - started}
    return Report(findings=tuple(findings), seconds=seconds)
