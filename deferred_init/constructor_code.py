"""What the bytecode of constructors tells about the order in which they did things.

The names that `constructor_names.py` reads tell what a constructor calls. Here are
questions that also need the instructions between the names. Each answer is a hint for
a report: whoever hides a call behind another function is not seen through.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Sequence

from deferred_init.constructor_names import by_type, constructors

__all__ = ["assigned_after", "calls_with_arguments", "passed_in", "stored_twice"]

_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"})
_COMPARES = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP", "TO_BOOL"})


@by_type
def calls_with_arguments(module_type: type, method: str) -> bool:
    """Whether a constructor of the class passes arguments to one of its methods."""
    return any(
        one.argval == method and after.opname.startswith("LOAD_")
        for code in constructors(module_type)
        for one, after in itertools.pairwise(_instructions(code))
        if _is_name(one)
    )


@by_type
def passed_in(module_type: type) -> frozenset[str]:
    """Return attributes to which a constructor assigns one of its own arguments.

    An argument that the constructor tests or assigns to does not count: it may stand
    for something that the constructor makes itself (`y if y is not None else Y()`).
    """
    found: set[str] = set()
    for code in constructors(module_type):
        instructions = _instructions(code)
        num = code.co_argcount + code.co_kwonlyargcount
        arguments = set(code.co_varnames[1:num]) - _tested_or_assigned(instructions)
        loaded: list[str] = []
        for one in instructions:
            if one.opname == "STORE_ATTR" and len(loaded) > 1:
                value, owner = loaded[-2:]
                if value in arguments and owner == code.co_varnames[0]:
                    found.add(one.argval)
            is_load = one.opname.startswith("LOAD_FAST")
            loaded = [*loaded, *_names(one)] if is_load else []
    return frozenset(found)


@by_type
def stored_twice(module_type: type) -> frozenset[str]:
    """Return attributes that the constructors of two classes of the MRO assign."""
    seen: set[str] = set()
    twice: set[str] = set()
    for code in constructors(module_type):
        stored = {o.argval for o in _instructions(code) if o.opname == "STORE_ATTR"}
        twice |= seen & stored
        seen |= stored
    return frozenset(twice)


@by_type
def assigned_after(module_type: type, method: str) -> frozenset[str]:
    """Return attributes that a constructor assigns after it has called a method."""
    found: set[str] = set()
    for code in constructors(module_type):
        called = False
        for one in _instructions(code):
            called = called or (_is_name(one) and one.argval == method)
            if called and one.opname == "STORE_ATTR":
                found.add(one.argval)
    return frozenset(found)


def _tested_or_assigned(instructions: Sequence[dis.Instruction]) -> set[str]:
    """Return variables that a jump or a comparison looks at, or that are assigned."""
    found: set[str] = set()
    for one, second, third in zip(
        instructions, instructions[1:], instructions[2:], strict=False
    ):
        if one.opname.startswith("STORE_FAST"):
            found.update(_names(one))
        looks = (second.opname, third.opname)
        if one.opname.startswith("LOAD_FAST") and any(
            name in _COMPARES or "JUMP" in name for name in looks
        ):
            found.update(_names(one))
    return found


def _is_name(one: dis.Instruction) -> bool:
    """Whether something is looked up by its name, which a string in code is not."""
    return one.opname.startswith("LOAD_") and one.opname != "LOAD_CONST"


def _instructions(code: types.CodeType) -> Sequence[dis.Instruction]:
    return [one for one in dis.get_instructions(code) if one.opname not in _BETWEEN]


def _names(one: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction; since 3.13 some take two at once."""
    value = one.argval
    return value if isinstance(value, tuple) else (value,)
