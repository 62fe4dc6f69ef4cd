"""Detectors: modules that are not what they were before."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_

from deferred_init.audit.scene import Scene, register_detector
from deferred_init.audit.snapshot import ModuleBefore
from deferred_init.errors import listing
from deferred_init.report import Finding

__all__: list[str] = []


@register_detector
def changed_modules(scene: Scene) -> Iterator[Finding]:
    """Find modules that are gone, replaced, or differ in what they carried."""
    if scene.expected is None:
        return
    now = {found.fqn: found.module for found in scene.graph.modules}
    for before in scene.expected.modules:
        module = now.get(before.fqn)
        if module is None:
            yield _finding(
                before,
                "lost-module",
                "the module that stood here, found nothing; put it back",
            )
        elif module is not before.module:
            yield _finding(
                before,
                "replaced-module",
                "the same module object, found "
                f"another one, a `{type(module).__name__}`; put it back",
            )
        else:
            yield from _differences(before, scene)


def _differences(before: ModuleBefore, scene: Scene) -> Iterator[Finding]:
    module = before.module
    if type(module) is not before.module_class:
        yield _finding(
            before,
            "module-class-changed",
            f"class `{before.module_class.__name__}`, found `{type(module).__name__}`; "
            "parametrize or convert the model before or after, not meanwhile",
        )
    if module.training != before.training:
        yield _finding(
            before,
            "mode-changed",
            f"training={before.training} as before, found {module.training}; call "
            f"`train({before.training})`",
        )
    if module._non_persistent_buffers_set != before.transient:
        yield from _changed_persistence(before)
    if tuple(vars(module)) != before.attributes:
        yield from _lost_attributes(before, scene)
    if before.hooks:
        yield from _lost_hooks(before)


def _changed_persistence(before: ModuleBefore) -> Iterator[Finding]:
    module = before.module
    changed = before.transient ^ module._non_persistent_buffers_set
    for name in sorted(changed & module._buffers.keys()):
        was = "not " if name in before.transient else ""
        yield _finding(
            before,
            "persistence-changed",
            f"a buffer that is {was}saved by `state_dict()`, found that it is "
            f"{'' if was else 'not'}; register it again with the same `persistent=`",
            name,
        )


def _lost_attributes(before: ModuleBefore, scene: Scene) -> Iterator[Finding]:
    prefix = f"{before.fqn}." if before.fqn else ""
    missing = sorted(set(before.attributes) - set(vars(before.module)))
    lost = [name for name in missing if not scene.is_rebound(prefix + name)]
    if lost:
        yield _finding(
            before,
            "lost-module-attribute",
            f"the attributes {listing(lost)} as before, found none; set them again",
        )


def _lost_hooks(before: ModuleBefore) -> Iterator[Finding]:
    for table, hooks in before.hooks.items():
        present = vars(before.module).get(table, {}).values()
        if len(present) == len(hooks) and all(map(is_, present, hooks)):
            continue
        kept = {id(hook) for hook in present}
        gone = sum(id(hook) not in kept for hook in hooks)
        if gone:
            yield _finding(
                before,
                "lost-module-hook",
                f"{len(hooks)} hooks in `{table}` as before, found {gone} gone; "
                "register them again",
            )


def _finding(before: ModuleBefore, code: str, text: str, name: str = "") -> Finding:
    fqn = f"{before.fqn}.{name}".strip(".") if name else before.fqn
    return Finding(code=code, fqn=fqn, message=f"expected {text}")
