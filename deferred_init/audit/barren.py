"""Tells of many objects at once that they lead to no tensor.

[Note: Looking without names]
Most of what modules hold leads nowhere: settings, lists of names, functions. So before
the walk goes through it with a name for each step, the collector of garbage is asked
what such objects refer to, level by level and for many modules together. That is at
least what the walk would find, and no code of the objects runs. Functions are the
exception: they refer to all of their module, of which only what they close over counts.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Set

from deferred_init.audit.kinds import Kind, kind_of, when_kinds_change

__all__ = ["Barren"]

_HAS_GC = 1 << 14  # `Py_TPFLAGS_HAVE_GC`: the collector can ask its instances
_NOT_ASKED = frozenset({Kind.TENSOR, Kind.MODULE, Kind.CACHE, Kind.FUNCTION})
_ENDS: set[type] = set()
"""Types that nothing is looked for in."""
_FOLLOWED: set[type] = set()
"""Types whose instances the collector can be asked about."""
when_kinds_change(_ENDS.clear)
when_kinds_change(_FOLLOWED.clear)


class Barren:
    """The objects of one walk that are known to lead nowhere."""

    def __init__(self) -> None:
        self._known: dict[int, object] = {}  # they are kept, so that ids stay theirs

    def lead_nowhere(self, values: Collection[object], seen: Set[int]) -> bool:
        """Whether no tensor, cache or new module can be reached from some values.

        Args:
            values: Attributes of modules.
            seen: Objects, by `id`, that need no second look.
        """
        known: dict[int, object] = self._known
        passed: dict[int, object] = {}
        level = values
        while level:
            found = {id(value): value for value in level if type(value) not in _ENDS}
            below: list[object] = []
            asked = []
            for key, value in found.items():
                if key in passed or key in known or key in seen:
                    continue
                own = type(value)
                if own in _FOLLOWED or _can_be_followed(own, value):
                    asked.append(value)
                elif isinstance(value, types.FunctionType):
                    below += _held_by(value)
                elif own not in _ENDS:
                    return False
                passed[key] = value
            level = below + gc.get_referents(*asked)
        known |= passed
        return True


def _can_be_followed(own: type, value: object) -> bool:
    """Whether the collector can be asked about a value; remembers its type."""
    kind = kind_of(value)
    if kind is Kind.ATOM:
        _ENDS.add(own)
    elif kind not in _NOT_ASKED and own.__flags__ & _HAS_GC:
        _FOLLOWED.add(own)
    return own in _FOLLOWED


def _held_by(function: types.FunctionType) -> list[object]:
    parts = function.__defaults__, function.__kwdefaults__, function.__dict__
    held: list[object] = [part for part in parts if part]
    if function.__closure__:
        held += gc.get_referents(*function.__closure__)  # the contents of its cells
    return held
