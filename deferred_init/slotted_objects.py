"""The attributes of objects whose classes declare `__slots__`, as a mapping."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping
from typing import Any

__all__ = ["SlottedAttributes", "slot_members"]


class SlottedAttributes(MutableMapping[str, Any]):
    """The attributes of an object whose class has `__slots__`, also of a frozen one.

    Those in an instance dict, which subclasses may have beside the slots, are among
    them; a slot that is not set is a missing key when it is read.
    """

    __slots__ = ("_members", "_owner")

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._members = slot_members(type(owner))

    def __getitem__(self, name: str) -> Any:
        member = self._members.get(name)
        if member is None:
            return vars(self._owner)[name]
        try:
            return member.__get__(self._owner)
        except AttributeError:  # not set
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        member = self._members.get(name)
        if member is None:
            vars(self._owner)[name] = value
        else:
            member.__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"`{name}` is a place of a tensor and stays")

    def __iter__(self) -> Iterator[str]:
        yield from self._members
        yield from getattr(self._owner, "__dict__", ())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def slot_members(own: type) -> dict[str, types.MemberDescriptorType]:
    """Return what a class and its bases declare in `__slots__`, by name."""
    return {
        name: member
        for base in reversed(own.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }
