"""Ranks that share a model tell each other how it went, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from deferred_init.distributed.members import meeting_for, ranks_of
from deferred_init.distributed.rendezvous import (
    Meeting,
    RanksFailed,
    RanksMissing,
    by_answer,
    spell_who,
)
from deferred_init.errors import MaterializeError
from deferred_init.handlers.protocol import Request
from deferred_init.report import Finding
from deferred_init.slots import Inventory

__all__ = ["all_still_there", "failures_told", "finish_together", "proved_together"]

_MAX_SHOWN = 10


@contextmanager
def failures_told(
    models: Sequence[nn.Module], call: str, broadcast_from: int | None = None
) -> Iterator[None]:
    """Tell the other ranks at once if the body fails, in which nobody meets.

    Args:
        models: As in `materialize`.
        call: What is called, for the message.
        broadcast_from: As in `materialize`.
    """
    try:
        yield
    except BaseException as error:
        tensors = (
            tensor
            for model in models
            for tensor in chain(model.parameters(), model.buffers())
        )
        if ranks := ranks_of(tensors, broadcast_from):
            Meeting(ranks, 1.0, call).fail(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def finish_together(inventory: Inventory, request: Request) -> Iterator[None]:
    """Let the body succeed only if it succeeds on all ranks that share the model.

    Raises:
        MaterializeError: The body failed on another rank, or a rank did not come.
    """
    with _finishing(inventory, request) as meeting:
        yield
        if meeting is not None:
            meeting.decide(None, _done)


def proved_together(
    inventory: Inventory, request: Request, prove: Callable[[], list[Finding]]
) -> list[Finding]:
    """Audit, and hear what the audits of the other ranks found.

    So `strict` raises on all ranks, and none goes on to a collective alone.

    Args:
        inventory: This rank's model.
        request: This rank's arguments.
        prove: Audits this rank's part.

    Returns:
        What was found here, and one finding for what only other ranks have found.

    Raises:
        MaterializeError: The audit failed on another rank, or a rank did not come.
    """
    with _finishing(inventory, request) as meeting:
        findings = prove()
        if meeting is None:
            return findings
        mine = [str(found) for found in findings if found.severity == "error"]
        by_rank = meeting.decide(mine[:_MAX_SHOWN], dict)
        others = {
            rank: text
            for rank, texts in by_rank.items()
            for text in texts[:1]
            if not set(texts) <= set(mine)
        }
        for text, ranks in by_answer(others).items():
            message = (
                f"expected a model that is ready on all ranks, found on "
                f"{spell_who(ranks)}: {text}; see the report there"
            )
            findings.append(Finding(code="other-ranks", fqn="", message=message))
        return findings


@contextmanager
def _finishing(inventory: Inventory, request: Request) -> Iterator[Meeting | None]:
    """Tell the other ranks if the body fails, which then fails on all."""
    meeting = meeting_for(inventory, request, "the end of `materialize`")
    try:
        yield meeting
    except (RanksFailed, RanksMissing) as error:  # which all ranks raise alike
        raise MaterializeError(str(error)) from error
    except BaseException as error:
        if meeting is not None:
            meeting.fail(f"{type(error).__name__}: {error}")
        raise


def all_still_there(inventory: Inventory, request: Request) -> None:
    """Meet before a collective, which would hang if a rank has failed.

    Raises:
        RanksFailed, RanksMissing: A rank has; raised on all others.
    """
    meeting = meeting_for(inventory, request, "the gathers of `materialize`")
    if meeting is not None:
        meeting.decide(None, _done)


def _done(answers: Mapping[int, Any]) -> None:
    """Judge nothing: whoever failed has said so."""
