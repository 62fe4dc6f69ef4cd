"""Rules for layers, such as experts, that one side stacks and the other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deferred_init.errors import listing
from deferred_init.sources.layout import Assembly, Stored, check_rule, matches
from deferred_init.sources.pieces import Sizes, along

__all__ = ["Stack", "Unstack"]


@dataclass(frozen=True, slots=True)
class Stack:
    r"""The model stacks along a new dim what the checkpoint stores one by one.

    Args:
        target: Pattern of the model's names.
        source: Template of the stored names, with `{index}`.
        dim: The new dim; its size says how many there are.

    Example:
        >>> rule = Stack(r"(.*)\.experts\.w1", r"\1.experts.{index}.w1.weight")
    """

    target: str
    source: str
    dim: int = 0

    def __post_init__(self) -> None:
        check_rule(self.target, self.dim)

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Stack what is stored under the numbered names."""
        found = {}
        for name, match in matches(self.target, shapes):
            shape = shapes[name]
            count = shape[self.dim] if len(shape) > self.dim else 0
            template = match.expand(self.source)
            parts = [template.replace("{index}", str(i)) for i in range(count)]
            if any(part in stored for part in parts):
                found[name] = self._stack(parts, shape, stored)
        return found

    def _stack(
        self, names: list[str], shape: Sizes, stored: Mapping[str, Stored]
    ) -> Assembly:
        absent = [name for name in names if name not in stored]
        if absent:
            return Assembly(
                problem=f"stacks {len(names)} tensors, but the checkpoint lacks "
                f"{len(absent)} of them: {listing(absent)}"
            )
        each = (*shape[: self.dim], *shape[self.dim + 1 :])
        odd = [name for name in names if stored[name].info.shape != each]
        if odd:
            found = stored[odd[0]].info.shape
            return Assembly(
                problem=f"stacks tensors of shape {each}, but {len(odd)} have others: "
                f"{listing(odd)}, the first {found}"
            )
        view = (*shape[: self.dim], 1, *shape[self.dim + 1 :])
        return Assembly(
            pieces=tuple(
                along(
                    stored[name].key,
                    self.dim,
                    source_view=view,
                    source_at=0,
                    target_view=shape,
                    target_at=index,
                    length=1,
                )
                for index, name in enumerate(names)
            )
        )


@dataclass(frozen=True, slots=True)
class Unstack:
    r"""The model has one by one what the checkpoint stacks along a dim.

    Args:
        source: Pattern of the stored names.
        target: Template of the model's names, with `{index}`.
        dim: The dim of the stored tensor that counts them.

    Example:
        >>> rule = Unstack(r"(.*)\.experts\.gate_up_proj", r"\1.gate_up.weight{index}")
    """

    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        check_rule(self.source, self.dim)

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Take the layers of every stored tensor that the pattern matches."""
        found = {}
        for name, match in matches(self.source, stored):
            shape = stored[name].info.shape
            template = match.expand(self.target)
            for index in range(shape[self.dim] if len(shape) > self.dim else 0):
                part = template.replace("{index}", str(index))
                if part in shapes:
                    found[part] = self._layer(name, stored[name], index, shapes[part])
        return found

    def _layer(self, name: str, one: Stored, index: int, target: Sizes) -> Assembly:
        shape = one.info.shape
        view = (*shape[: self.dim], 1, *shape[self.dim + 1 :])
        if (*shape[: self.dim], *shape[self.dim + 1 :]) != target:
            return Assembly(
                problem=f"has shape {target}, but is layer {index} along dim "
                f"{self.dim} of `{name}` {shape}"
            )
        piece = along(
            one.key,
            self.dim,
            source_view=shape,
            source_at=index,
            target_view=view,
            target_at=0,
            length=1,
        )
        return Assembly(pieces=(piece,))
