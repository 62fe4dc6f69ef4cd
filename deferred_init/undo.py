"""The undo record: how to put everything back if a later step fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["ModuleSnapshot", "UndoLog"]

Action = Callable[[], None]
_MAX_ATTEMPTS = 10


class UndoLog:
    """Actions that undo what was done, run last first."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def __len__(self) -> int:
        return len(self._actions)

    def push(self, action: Action) -> None:
        """Remember how to undo what was just done, or is about to be.

        An action may be called though its deed was not done, and twice.
        """
        self._actions.append(action)

    def rollback(self, cause: BaseException | None = None) -> list[BaseException]:
        """Undo everything; goes on past actions that fail and returns their errors.

        The frames of `cause` are cleared first: a local variable in a failed init
        function may hold a view, and a tensor with a live view cannot be swapped.
        """
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        failures: list[BaseException] = []
        attempts = 0
        while self._actions:
            attempts += 1
            try:
                self._actions[-1]()
            except Exception as error:  # noqa: BLE001 - undo the rest all the same
                failures.append(error)
            except KeyboardInterrupt as error:
                # Impatience. Actions can be repeated: do this one again.
                if attempts < _MAX_ATTEMPTS:
                    continue
                failures.append(error)
            self._actions.pop()
            attempts = 0
        return failures


class ModuleSnapshot:
    """The attributes of modules, shallow: which object stands under which name.

    Dicts such as `_parameters` keep their identity when restored, because other
    code may hold them.
    """

    _TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved: list[tuple[nn.Module, dict[str, Any], list[Any]]] = []
        self._known: set[int] = set()
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Remember one more module as it is now; the first time counts."""
        module_id = id(module)
        if module_id in self._known:
            return
        self._known.add(module_id)
        attributes = vars(module)
        if not isinstance(attributes.get("_parameters"), dict):
            return  # a script keeps its own outside of Python, and is never written
        live = [attributes[name] for name in self._TABLES]
        tables = [table.copy() if table else () for table in live]  # most are empty
        self._saved.append((module, attributes.copy(), tables))

    def restore(self) -> None:
        """Put every remembered attribute back and drop new ones."""
        for module, attributes, tables in self._saved:
            current = vars(module)
            current.clear()
            current.update(attributes)
            for name, table in zip(self._TABLES, tables, strict=True):
                live = attributes[name]
                live.clear()
                live.update(table)
