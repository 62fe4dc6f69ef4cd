"""Every private name of other packages that this one relies on, in one list.

A private name may go in any release. Each stands here with what it is for and what
happens without it. `missing_names()` looks for them: a test fails loudly, with this
text, when a release that is tested against lacks one, and `deferred-init doctor` says
so. A second test reads the code and fails when it uses one that is not listed.
"""

from __future__ import annotations

import importlib.util
import sys

from deferred_init.private_names.distributed_names import DISTRIBUTED_NAMES
from deferred_init.private_names.ecosystem_names import ECOSYSTEM_NAMES
from deferred_init.private_names.entry import PrivateName
from deferred_init.private_names.te_names import TE_NAMES
from deferred_init.private_names.torch_names import TORCH_NAMES

__all__ = ["PRIVATE_NAMES", "PrivateName", "missing_names"]

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *TORCH_NAMES,
    *DISTRIBUTED_NAMES,
    *ECOSYSTEM_NAMES,
    *TE_NAMES,
)


def missing_names(*, imported_only: bool = True) -> tuple[PrivateName, ...]:
    """Return the names that the installed releases lack and should have.

    Args:
        imported_only: Look only into packages that are imported already; otherwise
            into all that are installed, which imports them.
    """
    return tuple(
        name
        for name in PRIVATE_NAMES
        if not name.only_in
        and _is_asked_for(name.module.partition(".")[0], imported_only)
        and not name.exists()
    )


def _is_asked_for(package: str, imported_only: bool) -> bool:
    if package in sys.modules:
        return True
    return not imported_only and importlib.util.find_spec(package) is not None
