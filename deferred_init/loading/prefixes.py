"""Guesses why names do not match: one prefix too much or too little."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from deferred_init.errors import listing

__all__ = ["suggest_prefix"]


def suggest_prefix(
    stored: Collection[str], wanted: Sequence[Sequence[str]]
) -> str | None:
    r"""Return a sentence that proposes the prefix with which most names would match.

    Args:
        stored: Names in the checkpoint.
        wanted: For each tensor of the model the names that it goes by.

    >>> print(suggest_prefix(["model.a.w"], [["a.w"]]))
    Without the prefix `model.` 1 of 1 would match: pass names={r'^model\.': ''}
    """
    names = {name for own in wanted for name in own}
    too_much: Counter[str] = Counter()
    for key in stored:
        too_much.update({head for head, tail in _cuts(key) if tail in names})
    keys = set(stored)
    too_little: Counter[str] = Counter()
    for own in wanted:
        heads = {head for name in own for head, tail in _cuts(name) if tail in keys}
        too_little.update(heads)
    best_much = max(too_much.items(), key=_rank, default=("", 0))
    best_little = max(too_little.items(), key=_rank, default=("", 0))
    if best_much[1] == best_little[1] == 0:
        return None
    total = len(wanted)
    if best_much[1] >= best_little[1]:
        prefix, count = best_much
        pattern = "^" + re.escape(prefix)
        text = (
            f"Without the prefix `{prefix}` {count} of {total} would match: pass "
            f"names={{r{pattern!r}: ''}}".replace("\\\\", "\\")
        )
        rivals = sorted(p for p, n in too_much.items() if n == count and p != prefix)
        if rivals:
            text += (
                f". So would they without {listing(rivals)}: choose by what it holds"
            )
        return text
    prefix, count = best_little
    return (
        f"With the prefix `{prefix}` put before them, {count} of {total} would match: "
        f"pass names={{'^': {prefix!r}}}"
    )


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield every way to cut a dotted name into a prefix and a rest."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1], name[at + 1 :]
        at = name.find(".", at + 1)


def _rank(item: tuple[str, int]) -> tuple[int, int]:
    """More matches first, then the shorter prefix."""
    return item[1], -len(item[0])
