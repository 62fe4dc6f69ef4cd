"""Which stored tensor goes where: decided, and all problems found, before reading."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deferred_init.errors import listing
from deferred_init.loading.dtypes import cast_problem
from deferred_init.loading.prefixes import suggest_prefix
from deferred_init.loading.targets import Target
from deferred_init.sources.layout import Assembly, LayoutRule, Stored
from deferred_init.sources.pieces import Piece, Sizes, whole
from deferred_init.sources.protocol import TensorInfo, TensorSource
from deferred_init.tensor_names import canonical_name

__all__ = ["Load", "Matches", "WeightsRequest", "match_weights"]

_EXTRA_STATE = "_extra_state"
_WRAPPER = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRequest:
    """What the caller asked for about weights.

    Attributes:
        source: Where they come from.
        renames: Pattern and template, in order.
        rules: Layout rules.
        missing: `"init"`, `"error"` or `"any"`.
        unexpected: `"ignore"` or `"error"`.
    """

    source: TensorSource
    renames: tuple[tuple[str, str], ...] = ()
    rules: tuple[LayoutRule, ...] = ()
    missing: str = "init"
    unexpected: str = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A tensor of the model and the stored pieces that it is made of.

    Attributes:
        target: The tensor.
        pieces: What is read into it.
        twins: Keys of other sides of a tie, which have to be equal.
    """

    target: Target
    pieces: tuple[Piece, ...]
    twins: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Matches:
    """What was decided.

    Attributes:
        loads: What will be read.
        missing: Deferred tensors that the checkpoint has not.
        unfit: Deferred tensors that it has, but not so that they could be loaded.
        problems: Why it cannot be done; one sentence per offender.
        notes: Remarks for the report.
    """

    loads: list[Load] = field(default_factory=list)
    missing: list[Target] = field(default_factory=list)
    unfit: list[Target] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match_weights(weights: WeightsRequest, targets: Sequence[Target]) -> Matches:
    """Match what a source has with what a model has.

    Args:
        weights: The source, rules and policies.
        targets: All tensors of the model that are saved; only deferred ones are
            loaded.
    """
    matching = _Matching(weights, targets)
    matching.match_all()
    matching.judge_missing()
    matching.judge_unexpected()
    return matching.result


class _Matching:
    def __init__(self, weights: WeightsRequest, targets: Sequence[Target]) -> None:
        self.result = Matches()
        self._weights = weights
        self._targets = targets
        self._infos = weights.source.tensors
        self._stored = self._renamed()
        self._by_name = _index(self._stored)
        self._used: set[str] = set()
        self._real: list[str] = []

    def match_all(self) -> None:
        """Find the pieces of every tensor."""
        shapes = {name: t.shape for t in self._targets for name in t.names}
        assembled: dict[str, Assembly] = {}
        for rule in self._weights.rules:
            made = rule.assemble(self._by_name, shapes)
            if not made:
                self.result.notes.append(f"weights: no tensor fits the rule {rule}")
            for name, assembly in made.items():
                assembled.setdefault(name, assembly)
        for target in self._targets:
            found = next((assembled[n] for n in target.names if n in assembled), None)
            if found is None:
                self._match_directly(target)
            elif found.problem is not None:
                self._reject(target, found.problem)
            else:
                self._accept(target, found.pieces)
        if self._real:
            self.result.notes.append(
                f"weights: {len(self._real)} tensors have memory already and were left "
                f"alone, though the checkpoint has them: {listing(self._real)}"
            )

    def judge_missing(self) -> None:
        """Apply the policy for what the checkpoint lacks."""
        missing = [target.name for target in self.result.missing]
        wanted = sum(target.slot.deferred for target in self._targets)
        if not missing:
            return
        source, policy = self._weights.source, self._weights.missing
        if policy == "error":
            self.result.problems.append(
                f"{source.name} lacks {len(missing)} of {wanted} tensors: "
                f"{listing(missing)}. Pass missing='init' to initialize them"
                f"{self._hint()}"
            )
        elif policy == "init" and 2 * len(missing) > wanted:
            self.result.problems.append(
                f"{source.name} lacks {len(missing)} of {wanted} tensors, most of the "
                f"model: {listing(missing)}; it has {listing(list(self._infos))}"
                f"{self._hint()}. If it is meant to fill only a part, pass "
                "missing='any'"
            )
        else:
            self.result.notes.append(
                f"weights: {len(missing)} of {wanted} tensors are not in the "
                f"checkpoint and were initialized: {listing(missing)}"
            )

    def judge_unexpected(self) -> None:
        """Apply the policy for what the checkpoint has too much."""
        left = [key for key in self._infos if key not in self._used]
        state = [key for key in left if key.rpartition(".")[2] == _EXTRA_STATE]
        if state:
            self.result.notes.append(
                f"weights: {len(state)} entries of extra state were not read: "
                f"{listing(state)}"
            )
        extra = sorted(set(left) - set(state))
        if not extra:
            return
        text = f"{len(extra)} of {len(self._infos)} keys are not in the model"
        if self._weights.unexpected == "error":
            self.result.problems.append(
                f"{self._weights.source.name}: {text}: {listing(extra)}. Pass "
                "unexpected='ignore' to leave them out"
            )
        else:
            self.result.notes.append(f"weights: {text}: {listing(extra)}")

    def _match_directly(self, target: Target) -> None:
        found = [name for name in target.names if name in self._by_name]
        keys = list(dict.fromkeys(self._by_name[name].key for name in found))
        if not keys:
            if target.slot.deferred:
                self.result.missing.append(target)
            return
        fitting = [key for key in keys if _fits(self._infos[key].shape, target.shape)]
        if not fitting:
            self._used.update(keys)
            if target.slot.deferred:
                stored = self._infos[keys[0]].shape
                text = f"has shape {target.shape} in the model, but {stored} in the "
                text += f"checkpoint (`{keys[0]}`)"
                if stored == (*target.shape[:-2], *target.shape[:-3:-1]):
                    text += ": if it is transposed, pass a `Transpose` in `names`"
                self._reject(target, text)
            return
        self._used.update(keys)
        if len(keys) > 1 and target.slot.deferred:
            self.result.notes.append(
                f"weights: the checkpoint stores the tied `{target.name}` "
                f"{len(keys)} times; `{fitting[0]}` was read"
            )
        info = self._infos[fitting[0]]
        piece = whole(fitting[0], info.shape)
        if info.shape != target.shape:  # one element, with or without dims
            ones = (1,) * max(len(info.shape), len(target.shape))
            piece = whole(fitting[0], ones)
        like = (info.shape, info.dtype)
        twins = [k for k in fitting[1:] if _kind(self._infos[k]) == like]
        self._accept(target, (piece,), tuple(twins))

    def _accept(
        self, target: Target, pieces: tuple[Piece, ...], twins: tuple[str, ...] = ()
    ) -> None:
        keys = list(dict.fromkeys(piece.key for piece in pieces))
        self._used.update(keys)
        if not target.slot.deferred:
            self._real.append(target.name)
            return
        for key in keys:
            reason = cast_problem(self._infos[key].dtype, target.dtype)
            if reason is not None:
                self._reject(target, f"{reason} (`{key}`)")
                return
        self.result.loads.append(Load(target=target, pieces=pieces, twins=twins))

    def _reject(self, target: Target, problem: str) -> None:
        self.result.problems.append(f"`{target.name}` {problem}")
        self.result.unfit.append(target)

    def _renamed(self) -> dict[str, Stored]:
        """List what is stored by name after renaming; two keys may not collide."""
        found: dict[str, Stored] = {}
        clashes: list[str] = []
        used: set[str] = set()
        for key, info in self._infos.items():
            name = key
            for pattern, template in self._weights.renames:
                name, count = re.subn(pattern, template, key)
                if count:
                    used.add(pattern)
                    break
            if name in found:
                clashes.append(f"{found[name].key} and {key}")
            found[name] = Stored(key=key, info=info)
        if clashes:
            self.result.problems.append(
                f"{len(clashes)} pairs of keys get the same name by `names`: "
                f"{listing(clashes)}"
            )
        idle = [pattern for pattern, _ in self._weights.renames if pattern not in used]
        if idle:
            self.result.notes.append(
                f"weights: no key matches the patterns {listing(idle)} of `names`"
            )
        return found

    def _hint(self) -> str:
        wanted = {t.names[0]: t.names for t in self._targets if t.slot.deferred}
        text = suggest_prefix(self._stored, list(wanted.values()))
        return "" if text is None else f". {text}"


def _index(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Add names without wrappers' parts where they are free."""
    found = dict(stored)
    for name, one in stored.items():
        found.setdefault(canonical_name(name), one)
    if all(name.startswith(_WRAPPER) for name in stored):
        for name, one in list(found.items()):
            found.setdefault(name.removeprefix(_WRAPPER), one)
    return found


def _kind(info: TensorInfo) -> tuple[Sizes, torch.dtype]:
    return info.shape, info.dtype


def _fits(stored: Sizes, wanted: Sizes) -> bool:
    """Whether shapes are equal; one element may have one dim more or less."""
    single = {stored, wanted} == {(), (1,)}
    return stored == wanted or single
