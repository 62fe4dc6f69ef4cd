"""Deferred initialization: from a model without memory to one that can train."""

from __future__ import annotations

from deferred_init.api import materialize, plan
from deferred_init.audit_verb import audit
from deferred_init.distributed.fsdp1 import param_init_fn
from deferred_init.errors import (
    AuditError,
    DeferredInitError,
    MaterializeError,
    PlanError,
)
from deferred_init.handlers.registry import register_initializer
from deferred_init.lazy import materialize_on_first_forward
from deferred_init.plan import Plan
from deferred_init.recipe import Recipe
from deferred_init.record import (
    defer,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from deferred_init.report import Report
from deferred_init.te.on_meta import on_meta

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "DeferredInitError",
    "MaterializeError",
    "Plan",
    "PlanError",
    "Recipe",
    "Report",
    "audit",
    "defer",
    "deferred_init",
    "is_deferred",
    "materialize",
    "materialize_module",
    "materialize_on_first_forward",
    "materialize_tensor",
    "on_meta",
    "param_init_fn",
    "plan",
    "register_initializer",
]
