"""Small values, of which a plan makes one or several for each tensor.

[Note: Frozen for the type checker]
`dataclass(frozen=True)` sets each field through `object.__setattr__`, which makes it
take two to three times as long to make an object. So these are frozen where they are
written down, by the type checker, and not once more while they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # is in `typing` from Python 3.11 on, and does nothing

    def dataclass_transform(**_: Any) -> Any:
        return lambda decorator: decorator


__all__ = ["small_value"]

T = TypeVar("T")


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    eq_default=False,
    field_specifiers=(field,),
)
def small_value(value_type: type[T]) -> type[T]:
    """Make a class a dataclass with slots and keywords only, compared by identity."""
    return dataclass(slots=True, kw_only=True, eq=False)(value_type)
