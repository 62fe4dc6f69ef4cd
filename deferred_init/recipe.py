"""What `materialize` should make of a model: precision, dtypes, initialization."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deferred_init.dtype_policy import DtypePolicy
from deferred_init.errors import PlanError
from deferred_init.init_rules import InitRule
from deferred_init.init_sizes import InitSizes
from deferred_init.recipe_toml import fields_from_toml, toml_from_fields
from deferred_init.spelling import closest
from deferred_init.te_recipe import TERecipeSpec, is_te_recipe

__all__ = ["Recipe", "preset_names"]

_MAX_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A numeric format and an initialization scheme, as data.

    Args:
        name: What reports call it.
        description: Where it comes from and what it is for.
        te_recipe: The Transformer Engine recipe; None computes in high precision.
        quantize_weights: Store the weights quantized, not only compute with them.
        keep_high_precision_init: Keep each quantized weight's values from before
            quantization on the host, for an optimizer's master weights.
        inference: Row-wise data only: no backward pass will need the other copy.
        dtype: The dtype per kind of tensor.
        high_precision_modules: Globs on module names that are never quantized.
        init_rules: Distributions by name pattern. The first rule that matches
            counts; a tensor that none matches is filled by its module's own
            initializer.
        init_sizes: Sizes that the rules need and the model does not tell.

    Raises:
        ValueError: The fields contradict each other; all contradictions are listed.

    Example:
        >>> Recipe.load("fp8_current+gpt2").te_recipe.name
        'Float8CurrentScaling'
    """

    name: str
    description: str = ""
    te_recipe: TERecipeSpec | None = None
    quantize_weights: bool = False
    keep_high_precision_init: bool = False
    inference: bool = False
    dtype: DtypePolicy = DtypePolicy()
    high_precision_modules: tuple[str, ...] = ()
    init_rules: tuple[InitRule, ...] = ()
    init_sizes: InitSizes = InitSizes()

    def __post_init__(self) -> None:
        problems = []
        if self.quantize_weights and self.te_recipe is None:
            problems.append("`quantize_weights` needs a `te_recipe`")
        if self.keep_high_precision_init and not self.quantize_weights:
            problems.append("`keep_high_precision_init` needs `quantize_weights`")
        if problems:
            raise ValueError(f"recipe `{self.name}`: " + "; ".join(problems))

    @classmethod
    def load(cls, recipe: object = None) -> Recipe:
        """Make a `Recipe` of whatever a caller may give.

        Args:
            recipe: None (keep the model as it was built); a `Recipe`; the name of a
                preset; the path of a TOML file; several of those joined with `+`; or
                a Transformer Engine recipe object, with which weights stay in high
                precision unless the model was built with quantized ones.

        Raises:
            PlanError: No such preset or file, a bad file, or parts that contradict
                each other.
            TypeError: Anything else.
        """
        if recipe is None:
            return cls(name="as_built", description="Keep the model as it was built.")
        if isinstance(recipe, Recipe):
            return recipe
        if isinstance(recipe, os.PathLike):
            return cls._from_file(Path(recipe))
        if isinstance(recipe, str):
            return cls._from_text_reference(recipe)
        if is_te_recipe(recipe):
            spec = TERecipeSpec.from_te_recipe(recipe)
            return cls(name=type(recipe).__name__, te_recipe=spec)
        raise TypeError(
            "a recipe is a name, a path, a Recipe or a Transformer Engine recipe, "
            f"found {type(recipe).__name__}"
        )

    @classmethod
    def from_toml(cls, text: str, *, source: str = "the recipe") -> Recipe:
        """Read a recipe from the text of a TOML document.

        Raises:
            PlanError: Not TOML, unknown keys, bad or contradicting values; all of
                them are listed, each unknown key with the nearest known one.
        """
        found = fields_from_toml(text, source=source)
        try:
            return cls(**found)
        except ValueError as error:
            raise PlanError(f"{source}: {error}", [str(error)]) from error

    def to_toml(self) -> str:
        """Write the recipe as TOML; `from_toml` reads back an equal one.

        Raises:
            ValueError: A live TE recipe holds settings that plain data cannot express.
        """
        return toml_from_fields({f.name: getattr(self, f.name) for f in fields(self)})

    def combine(self, other: Recipe) -> Recipe:
        """Join two recipes; what only one of them sets is taken from that one.

        Raises:
            PlanError: Both set something, and differently; all such are listed.
        """
        conflicts: list[str] = []

        def one_of(where: str, ours: Any, theirs: Any, unset: Any) -> Any:
            if ours != unset and theirs != unset and ours != theirs:
                conflicts.append(where)
            return theirs if ours == unset else ours

        def one_of_each(where: str, ours: Any, theirs: Any) -> Any:
            chosen = {}
            for name in (each.name for each in fields(ours)):
                pair = getattr(ours, name), getattr(theirs, name)
                chosen[name] = one_of(f"{where}.{name}", *pair, None)
            return type(ours)(**chosen)

        merged: dict[str, Any] = {
            "te_recipe": one_of("te_recipe", self.te_recipe, other.te_recipe, None),
            "init_rules": one_of("init_rules", self.init_rules, other.init_rules, ()),
            "dtype": one_of_each("dtype", self.dtype, other.dtype),
            "init_sizes": one_of_each("init_sizes", self.init_sizes, other.init_sizes),
        }
        for name in ("quantize_weights", "keep_high_precision_init", "inference"):
            merged[name] = getattr(self, name) or getattr(other, name)
        if conflicts:
            both = " and ".join(f"`{each}`" for each in conflicts)
            raise PlanError(
                f"the recipes `{self.name}` and `{other.name}` both set {both}, and "
                "differently; use one of them, or write a recipe file",
                conflicts,
            )
        modules = self.high_precision_modules + other.high_precision_modules
        return Recipe(
            name=f"{self.name}+{other.name}",
            description="\n".join(filter(None, (self.description, other.description))),
            high_precision_modules=tuple(dict.fromkeys(modules)),
            **merged,
        )

    def rule_for(self, fqn: str, ndim: int) -> InitRule | None:
        """Find the rule that fills a tensor; None leaves it to its module."""
        return next((r for r in self.init_rules if r.matches(fqn, ndim)), None)

    def keeps_high_precision(self, module_fqn: str) -> bool:
        """Say whether a module is excluded from quantization by name."""
        return any(fnmatchcase(module_fqn, p) for p in self.high_precision_modules)

    def unsupported_reason(self, compute_capability: tuple[int, int]) -> str | None:
        """Say why a GPU of this compute capability cannot run it; None if it can."""
        if self.te_recipe is None:
            return None
        return self.te_recipe.unsupported_reason(compute_capability)

    def make_te_recipe(self) -> Any:
        """Build the Transformer Engine recipe object; None without quantization.

        Raises:
            PlanError: Transformer Engine is missing, or too old for this recipe.
        """
        return None if self.te_recipe is None else self.te_recipe.make()

    @classmethod
    def _from_file(cls, path: Path) -> Recipe:
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise PlanError(
                f"the recipe file {path} cannot be read: {error.strerror}"
            ) from error
        if len(content) > _MAX_BYTES:
            raise PlanError(
                f"the recipe file {path} has more than {_MAX_BYTES:,} bytes, which no "
                "recipe needs"
            )
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"the recipe file {path} is not text: {error}") from error
        return cls.from_toml(text, source=str(path))

    @classmethod
    def _from_text_reference(cls, reference: str) -> Recipe:
        # A path may hold a `+` of its own.
        if Path(reference).suffix == ".toml" and Path(reference).is_file():
            return cls._from_file(Path(reference))
        parts = [part.strip() for part in reference.split("+")]
        combined, *others = [cls._from_part(part) for part in parts]
        for other in others:
            combined = combined.combine(other)
        return combined

    @classmethod
    def _from_part(cls, part: str) -> Recipe:
        if part.endswith(".toml"):
            return cls._from_file(Path(part))
        if part not in preset_names():
            hint = closest(part, preset_names())
            stop = "" if hint.endswith("?") else "."
            raise PlanError(
                f"no recipe is called `{part}`; {hint}{stop} "
                "A file is given by its path, ending in .toml."
            )
        return cls._from_file(_preset_folder() / f"{part}.toml")


def preset_names() -> tuple[str, ...]:
    """List the recipes that come with the package."""
    return tuple(sorted(path.stem for path in _preset_folder().glob("*.toml")))


def _preset_folder() -> Path:
    package = Path(__file__).resolve().parent
    installed = package / "recipes"
    # In a checkout, and in an editable install of one, they stand beside the package.
    return installed if installed.is_dir() else package.parent / "recipes"
