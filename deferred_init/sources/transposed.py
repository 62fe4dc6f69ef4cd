"""Rule for matrices that one side keeps the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deferred_init.sources.layout import Assembly, Stored, check_rule, matches
from deferred_init.sources.pieces import Sizes, whole

__all__ = ["Transpose"]


@dataclass(frozen=True, slots=True)
class Transpose:
    r"""The checkpoint stores with its last two dims the other way round.

    Args:
        target: Pattern of the model's names.
        source: Template of the stored name; by default the same.

    Example:
        >>> rule = Transpose(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
    """

    target: str
    source: str = r"\g<0>"

    def __post_init__(self) -> None:
        check_rule(self.target, 0)

    def assemble(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, Sizes]
    ) -> dict[str, Assembly]:
        """Turn what is stored under the name of the source."""
        found = {}
        for name, match in matches(self.target, shapes):
            part = match.expand(self.source)
            if part in stored:
                found[name] = _turn(part, stored[part], shapes[name])
        return found


def _turn(name: str, one: Stored, shape: Sizes) -> Assembly:
    have = one.info.shape
    if len(have) < 2 or (*have[:-2], have[-1], have[-2]) != shape:
        return Assembly(
            problem=f"has shape {shape}, which `{name}` {have} is not the transpose of"
        )
    return Assembly(pieces=(replace(whole(one.key, shape), transposed=True),))
