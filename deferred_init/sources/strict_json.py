"""JSON from a stranger: duplicate names are errors, and no input can crash it."""

from __future__ import annotations

import json
from typing import Any

from deferred_init.errors import listing

__all__ = ["parse_strictly"]


def parse_strictly(text: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: It is not JSON, is nested too deeply, is not an object, or an
            object in it has a name twice.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object")
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    twice = []
    for name, _ in pairs:
        if name in seen:
            twice.append(name[:200])
        seen.add(name)
    raise ValueError(f"it has names twice: {listing(twice)}")
