"""Rules for projections that one side keeps joined and the other apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deferred_init.errors import listing
from deferred_init.sources.layout import Assembly, Stored, check_rule, matches
from deferred_init.sources.pieces import Piece, Sizes, along

__all__ = ["Fuse", "Split"]


@dataclass(frozen=True, slots=True)
class Fuse:
    r"""The model has as one tensor what the checkpoint stores as several.

    Args:
        target: Pattern of the model's names.
        sources: Templates of the stored names, in order.
        dim: Along which they are joined.
        groups: Interleave: the parts of each group stand together, as query, key and
            value of one key-value head do in Megatron's layout.

    Example:
        >>> rule = Fuse(
        ...     r"(.*)\.qkv\.weight",
        ...     [r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"],
        ... )
    """

    target: str
    sources: Sequence[str]
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        check_rule(self.target, self.dim, self.groups)

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Join what is stored under the names of the sources."""
        found = {}
        for name, match in matches(self.target, shapes):
            parts = [match.expand(template) for template in self.sources]
            if any(part in stored for part in parts):
                found[name] = self._join(parts, shapes[name], stored)
        return found

    def _join(
        self, names: list[str], shape: Sizes, stored: Mapping[str, Stored]
    ) -> Assembly:
        absent = [name for name in names if name not in stored]
        if absent:
            return Assembly(
                problem=f"is joined from {listing(names)}, but the "
                f"checkpoint lacks {listing(absent)}"
            )
        parts = [stored[name] for name in names]
        lengths = _lengths([part.info.shape for part in parts], shape, self.dim)
        if lengths is None or not _divide(lengths, self.groups):
            sizes = ", ".join(f"`{n}` {stored[n].info.shape}" for n in names)
            return Assembly(
                problem=f"has shape {shape} and cannot be joined along dim {self.dim}"
                f" in {self.groups} group(s) from {sizes}"
            )
        return Assembly(
            pieces=tuple(
                along(
                    parts[part].key,
                    self.dim,
                    source_view=parts[part].info.shape,
                    source_at=inner,
                    target_view=shape,
                    target_at=outer,
                    length=length,
                )
                for part, inner, outer, length in _ranges(lengths, self.groups)
            )
        )


@dataclass(frozen=True, slots=True)
class Split:
    r"""The model has as several tensors what the checkpoint stores as one.

    Args:
        source: Pattern of the stored names.
        targets: Templates of the model's names, in order; their sizes along `dim`
            say where to cut.
        dim: Along which to cut.
        groups: The stored tensor is interleaved; see `Fuse`.
    """

    source: str
    targets: Sequence[str]
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        check_rule(self.source, self.dim, self.groups)

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Cut every stored tensor that the pattern matches."""
        found: dict[str, Assembly] = {}
        for name, match in matches(self.source, stored):
            parts = [match.expand(template) for template in self.targets]
            here = [part for part in parts if part in shapes]
            if not here:
                continue
            found.update(self._cut(parts, here, name, stored[name], shapes))
        return found

    def _cut(
        self,
        parts: list[str],
        here: list[str],
        name: str,
        one: Stored,
        shapes: Mapping[str, Sizes],
    ) -> dict[str, Assembly]:
        whole = one.info.shape
        lengths = None
        if len(here) == len(parts):
            lengths = _lengths([shapes[part] for part in parts], whole, self.dim)
        if lengths is None or not _divide(lengths, self.groups):
            sizes = ", ".join(f"`{p}` {shapes.get(p, 'not there')}" for p in parts)
            problem = (
                f"is cut from `{name}` {whole} along dim {self.dim} in {self.groups} "
                f"group(s), which does not fit the model's {sizes}"
            )
            return {part: Assembly(problem=problem) for part in here}
        pieces: dict[str, list[Piece]] = {part: [] for part in parts}
        for part, inner, outer, length in _ranges(lengths, self.groups):
            pieces[parts[part]].append(
                along(
                    one.key,
                    self.dim,
                    source_view=whole,
                    source_at=outer,
                    target_view=shapes[parts[part]],
                    target_at=inner,
                    length=length,
                )
            )
        return {part: Assembly(pieces=tuple(own)) for part, own in pieces.items()}


def _lengths(parts: Sequence[Sizes], whole: Sizes, dim: int) -> list[int] | None:
    """Return the sizes of parts along a dim, or None if they do not make the whole."""
    if dim >= len(whole):
        return None
    rest = (*whole[:dim], *whole[dim + 1 :])
    for part in parts:
        if len(part) != len(whole) or (*part[:dim], *part[dim + 1 :]) != rest:
            return None
    lengths = [part[dim] for part in parts]
    return lengths if sum(lengths) == whole[dim] else None


def _divide(lengths: Sequence[int], groups: int) -> bool:
    return groups > 0 and all(length % groups == 0 for length in lengths)


def _ranges(lengths: Sequence[int], groups: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (part, index within the part, index within the whole, length)."""
    outer = 0
    for group in range(groups):
        for part, length in enumerate(lengths):
            step = length // groups
            yield part, group * step, outer, step
            outer += step
