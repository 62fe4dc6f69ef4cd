"""Faults on a GPU: everything is as before, memory too, and the next call succeeds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import build, on_meta, recorded
from torch import Tensor, nn

import deferred_init as di
from tests.reliability.faults import (
    MAX_GROWTH_BYTES,
    Job,
    check_every_boundary,
    held_by,
    own_threads,
    quick_collections,
)
from tests.reliability.portrait import Portrait, generators, seed

pytestmark = pytest.mark.gpu


def data_of(tensor: Tensor) -> dict[str, Tensor]:
    if type(tensor) in (Tensor, nn.Parameter):
        return {"": tensor.detach()}
    from te_models import data_of as parts_of

    parts: dict[str, Tensor] = parts_of(tensor)
    return parts


def look(held: Any) -> dict[str, Any]:
    """Describe modules, and the tensors in anything else, bit by bit."""
    facts: dict[str, Any] = {}
    for index, item in enumerate(held):
        if not isinstance(item, nn.Module):
            facts.update((f"{index}{k}", v) for k, v in Portrait(item).facts.items())
            continue
        for name, module in item.named_modules():
            facts[f"{index}/{name}!"] = (type(module), tuple(vars(module)))
        tensors = [
            *item.named_parameters(remove_duplicate=False),
            *item.named_buffers(remove_duplicate=False),
        ]
        first: dict[int, str] = {}
        for name, tensor in tensors:
            flags = (type(tensor), tensor.dtype, str(tensor.device), tensor.shape)
            facts[f"{index}/{name}"] = (
                *(*flags, tensor.requires_grad, sorted(vars(tensor))),
                first.setdefault(id(tensor), name),
                None if tensor.is_meta else bits(tensor),
            )
    return facts


def bits(tensor: Tensor) -> dict[str, bytes]:
    return {
        name: part.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        for name, part in data_of(tensor).items()
    }


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    with quick_collections():
        yield


def memory() -> int:
    gc.collect()  # what earlier models left in cycles
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def states() -> Any:
    return generators(), torch.cuda.get_rng_state().tolist()


def job(model: nn.Module, run: Callable[[], Any], *held: Any) -> Job:
    parts = [model, *held]
    return Job(
        run=run,
        held=lambda: parts,
        look=look,
        states=states,
        memory=memory,
        tensors=tensors_in,
    )


def tensors_in(held: Any) -> Iterator[Tensor]:
    for item in held:
        if isinstance(item, nn.Module):
            yield from item.parameters()
            yield from item.buffers()
        else:
            yield from Portrait(item).tensors.values()


@pytest.mark.parametrize("make", [on_meta, recorded])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_fault_at_any_boundary_is_undone(
    make: Callable[[], nn.Module], dtype: torch.dtype | None
) -> None:
    def make_job() -> Job:
        seed(3)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def run() -> None:
            di.materialize(model, "cuda", optimizers=optimizer, dtype=dtype)

        return job(model, run, held_by([optimizer]))

    assert len(check_every_boundary(make_job)) > 30


@pytest.mark.parametrize("kind", ["ops", "modules"])
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_fault_at_any_boundary_is_undone_with_te(kind: str, recipe: str) -> None:
    te_models = pytest.importorskip("te_models", reason="needs TE")
    te_recipe = te_models.RECIPES[recipe]()

    def make_job() -> Job:
        seed(3)
        if kind == "ops":
            model = te_models.build(
                lambda: te_models.ops_model("all", "meta"), te_recipe
            )
            model._module_groups = model._make_module_groups(model._modules.values())
            assert not all(_is_module(group) for group in model._module_groups)
        else:
            model = te_models.build(
                lambda: te_models.module_model("LayerNormMLP", "meta"), te_recipe
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def run() -> None:
            di.materialize(model, "cuda", optimizers=optimizer, verify="full")

        made = job(model, run)
        made.more = lambda: groups_of(model, optimizer)
        return made

    crossed = check_every_boundary(make_job)
    assert "after FuserRefresher" in crossed


def _is_module(item: object) -> bool:
    return isinstance(item, nn.Module)


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Say which parameters optimizers and fusers hold, by name."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    found: list[Any] = [
        [names.get(id(param)) for param in group["params"]]
        for group in optimizer.param_groups
    ]
    for fuser in vars(model).get("_module_groups") or ():
        if not _is_module(fuser):
            lists = (fuser._flat_basic_op_params, fuser._basic_op_num_params)
            found.append(([names.get(id(param)) for param in lists[0]], lists[1]))
    return found


def test_a_fault_while_loading_leaves_no_reader_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    monkeypatch.setattr("deferred_init.handlers.checkpoint._STEP_BYTES", 1 << 14)
    seed(5)
    state = {k: v for k, v in build().state_dict().items() if k != "3.weight"}
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    content = path.read_bytes()

    def make_job() -> Job:
        seed(3)
        model = on_meta()
        made = job(model, lambda: di.materialize(model, "cuda", weights=path))
        made.more = lambda: (own_threads(), path.read_bytes() == content)
        return made

    crossed = check_every_boundary(make_job)
    assert crossed.count("after a step") >= 2


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Let the allocator reserve only so much more than it has now."""
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + num_bytes
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


MB = 1 << 20


def too_large() -> Callable[[], nn.Module]:
    """Return the builder of 4 MB tensors that need 100 MB more than 100 MB."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Segments that are in use in part have room that no limit takes away.
    room = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    number = (room + 200 * MB) // (4 * MB) + 1
    return lambda: nn.Sequential(
        *(nn.Linear(1024, 1024, bias=False) for _ in range(number))
    )


@pytest.mark.parametrize("kind", ["meta", "recorded", "loading"])
def test_a_real_lack_of_memory_is_undone(kind: str) -> None:
    large = too_large()
    options: dict[str, Any] = {"seed": 1}
    if kind == "loading":
        options["weights"] = dict(large().state_dict())
    if kind == "recorded":
        with torch.device("cuda"):
            model = di.deferred_init(large)
    else:
        with torch.device("meta"):
            model = large()
    before, rng, num_bytes = look([model]), states(), memory()
    objects = [id(parameter) for parameter in model.parameters()]
    with at_most(100 * MB), pytest.raises(di.MaterializeError) as caught:
        di.materialize(model, "cuda", **options)
    error: BaseException | None = caught.value
    causes = []
    while error is not None:
        causes.append(type(error))
        error = error.__cause__
    assert torch.OutOfMemoryError in causes, str(caught.value)
    assert abs(memory() - num_bytes) < MAX_GROWTH_BYTES
    assert look([model]) == before
    assert states() == rng
    assert own_threads() == []
    assert di.materialize(model, "cuda", **options).ok
    assert [id(parameter) for parameter in model.parameters()] == objects
    if kind == "loading":
        expected = options["weights"]
    else:
        torch.manual_seed(1)
        with torch.device("cuda"):
            expected = large().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].cuda()), name


def test_300_materializations_leave_no_memory_behind() -> None:
    def once() -> None:
        model = on_meta()
        optimizer = torch.optim.AdamW(model.parameters())
        di.materialize(model, "cuda", optimizers=optimizer, seed=0)

    once()
    gc.collect()
    before, reserved = memory(), torch.cuda.memory_reserved()
    for _ in range(299):
        once()
    gc.collect()
    assert abs(memory() - before) < MAX_GROWTH_BYTES
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20
