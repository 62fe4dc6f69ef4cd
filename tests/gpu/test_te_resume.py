"""FP8 models that were made from meta are saved and resumed, bit for bit.

Each experiment is done with eager models as well: what Transformer Engine and torch
cannot do with those, they must not do here either, in the same words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import te_checkpoints
import torch
import torch.distributed.checkpoint as dcp
from one_rank import one_rank
from te_checkpoints import (
    FP8,
    MODELS,
    Load,
    Save,
    eager,
    from_meta,
    local_part,
    optimizer_of,
    resume,
    sized_as_stored,
    train_on,
)
from te_models import RECIPES, forward_backward, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from deferred_init.te.probe import fp8_state_manager

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.te,
    pytest.mark.distributed,
    # torch and TE warn at each other's lines of storages, views and single processes.
    pytest.mark.filterwarnings("ignore"),
]
EXACT = "resumes bit for bit"
# Sharded ops with FP8 weights: eager ones go on with other gradients as well.
INEXACT = {
    (recipe, store)
    for recipe in ("delayed", "current")
    for store in ("get_state_dict", "state_dict")
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    """One rank, with a CPU backend too, as an asynchronous save wants it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with one_rank("cpu:gloo,cuda:nccl"):
        yield


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    # Without it TE refuses the extra state of delayed scaling, which is a pickle.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")


def _states(optimizer: AdamW) -> list[dict[str, Any]]:
    found = list(optimizer.state.values())
    assert found
    return found


def _save_with_dcp(model: nn.Module, optimizer: AdamW, folder: Path) -> None:
    assert all(isinstance(state["exp_avg"], DTensor) for state in _states(optimizer))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def _load_with_dcp(
    model: nn.Module, optimizer: AdamW, folder: Path, te_recipe: Any
) -> None:
    weights, states = get_state_dict(model, optimizer)
    sized_as_stored(weights, folder, "model.")
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def _save_plain_with_dcp(model: nn.Module, optimizer: AdamW, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def _load_plain_with_dcp(
    model: nn.Module, optimizer: AdamW, folder: Path, te_recipe: Any
) -> None:
    """Load over a model that was trained already, so that its optimizer has states."""
    forward_backward(model, te_recipe, 9)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    sized_as_stored(state["model"], folder, "model.")
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _save_files(model: nn.Module, optimizer: AdamW, folder: Path) -> None:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def _load_files(
    model: nn.Module, optimizer: AdamW, folder: Path, te_recipe: Any
) -> None:
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


STORES: dict[str, tuple[Save, Load]] = {
    "get_state_dict": (_save_with_dcp, _load_with_dcp),
    "state_dict": (_save_plain_with_dcp, _load_plain_with_dcp),
    "torch.save": (_save_files, _load_files),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_saved_resumes_bit_for_bit(
    kind: str,
    recipe: str,
    store: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Sharded and saved by DCP, or whole and saved by torch."""
    te_recipe = RECIPES[recipe]()
    sharded = store != "torch.save"
    ours = from_meta(kind, te_recipe, sharded=sharded)
    how, seen = resume(ours, te_recipe, *STORES[store], tmp_path / "ours")
    theirs = eager(kind, te_recipe, sharded=sharded)
    eagerly, expected = resume(theirs, te_recipe, *STORES[store], tmp_path / "theirs")
    record_property("eager", eagerly)
    assert how == eagerly
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    if kind == "ops" and (recipe, store) in INEXACT:
        assert how.endswith("differ")
    else:
        assert how == EXACT


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_sharded_ops_resume_and_train_as_whole_ones_if_they_are_resharded(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default FSDP2 leaves what the root holds whole between forward and backward.

    From the second step on sharded ops have other gradients then, eager ones too.
    """
    te_recipe = RECIPES[recipe]()
    seen = {}
    for name in ("whole", "default", "resharded"):
        if name == "resharded":
            resharded = partial(fully_shard, reshard_after_forward=True)
            monkeypatch.setattr(te_checkpoints, "shard", resharded)
        make = from_meta("ops", te_recipe, sharded=name != "whole")
        model = make(0)
        seen[name] = train_on(model, optimizer_of(model), te_recipe, range(3))
        fp8_state_manager().reset()
    assert all(map(torch.equal, seen["resharded"], seen["whole"]))
    assert not all(map(torch.equal, seen["default"], seen["whole"]))
    how, _ = resume(make, te_recipe, *STORES["get_state_dict"], tmp_path / "ours")
    assert how == EXACT


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_master_weights_of_fused_adam_resume_with_the_shards(
    recipe: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    te_recipe = RECIPES[recipe]()

    def fused(model: nn.Module) -> Any:
        return te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)

    store = STORES["state_dict"]
    ours = from_meta("modules", te_recipe, sharded=True)
    how, seen = resume(ours, te_recipe, *store, tmp_path / "ours", fused)
    theirs = eager("modules", te_recipe, sharded=True)
    eagerly, expected = resume(theirs, te_recipe, *store, tmp_path / "theirs", fused)
    record_property("eager", eagerly)
    assert how == eagerly
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert how == EXACT


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("recipe", FP8)
def test_what_dcp_saves_of_fp8_shards_comes_back_bit_by_bit(
    recipe: str, in_background: bool, tmp_path: Path
) -> None:
    te_recipe = RECIPES[recipe]()
    make = from_meta("modules", te_recipe, sharded=True)
    model, other = make(0), make(1)
    train_on(model, optimizer_of(model), te_recipe, range(1))
    if in_background:
        dcp.async_save(model.state_dict(), checkpoint_id=tmp_path).result()
    else:
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    sized_as_stored(state, tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    for (name, mine), read in zip(
        model.named_parameters(), other.parameters(), strict=True
    ):
        assert same(local_part(mine), local_part(read)), name


def test_extra_state_of_delayed_scaling_has_to_be_trusted_as_in_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te_recipe = RECIPES["delayed"]()
    make = from_meta("modules", te_recipe, sharded=False)
    model = make(0)
    train_on(model, optimizer_of(model), te_recipe, range(1))
    state = model.state_dict()
    monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE")
    for other in (make(1), eager("modules", te_recipe, sharded=False)(1)):
        with pytest.raises(RuntimeError, match="Refusing to load pickled"):
            other.load_state_dict(state)
