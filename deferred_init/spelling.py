"""Word the suggestion for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from deferred_init.errors import listing

__all__ = ["closest"]


def closest(name: str, known: Iterable[str]) -> str:
    """Word the suggestion that ends a message about an unknown name.

    >>> closest("quantise_weights", ["quantize_weights", "name"])
    'did you mean `quantize_weights`?'
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known: {listing(names)}"
