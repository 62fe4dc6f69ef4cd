"""Which attributes of a module are worth a look, remembered by their names and types.

[Note: Layouts]
What a type cannot hold it never holds. So of modules whose attributes have the same
names and the same types in the same order, the same attributes are worth a look: of
the 50 to 70 of a Transformer Engine module a handful. Types are compared, not classes
of the module: an attribute that gets a value of another type makes another layout.
"""

from __future__ import annotations

from torch import nn

from deferred_init.audit.kinds import BUILT_IN, Kind, kind_of, when_kinds_change

__all__ = ["Layout", "layout_of"]

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_HOOK_TABLES = frozenset(
    {
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
_WRAPPER_STATE = "__composable_api_state_key"  # FSDP2's, of which it takes care
_MAX_LAYOUTS = 4096  # they keep types alive

Layout = tuple[tuple[int, str, bool], ...]
"""Places and names of attributes that are worth a look; whether not, if empty."""
_layouts: dict[tuple[tuple[str, ...], tuple[type, ...]], Layout] = {}
when_kinds_change(_layouts.clear)


def layout_of(attributes: dict[str, object]) -> Layout:
    """Return where in a module's instance dict there may be anything."""
    key = tuple(attributes), tuple(map(type, attributes.values()))
    found = _layouts.get(key)
    return _add(key, attributes) if found is None else found


def _add(
    key: tuple[tuple[str, ...], tuple[type, ...]], attributes: dict[str, object]
) -> Layout:
    if len(_layouts) >= _MAX_LAYOUTS:
        _layouts.clear()
    held = [
        (place, name, name in _HOOK_TABLES or type(value) in BUILT_IN)
        for place, (name, value) in enumerate(attributes.items())
        if kind_of(value) is not Kind.ATOM
        and (name in _HOOK_TABLES or name not in _MODULE_INTERNALS)
        and not name.startswith(_WRAPPER_STATE)
    ]
    _layouts[key] = found = tuple(held)
    return found
