"""What was saved comes back bit by bit, from every source and in every dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import deferred_init as di
from deferred_init.sources import TensorInfo, open_source
from tests.weights.small_models import as_safetensors

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape).to(dtype)
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else None).to(
        dtype
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(raw(one), raw(other))
    )


def all_kinds() -> dict[str, Tensor]:
    torch.manual_seed(0)
    kinds = {f"of_{str(dtype)[6:]}": values(dtype, 3, 5) for dtype in DTYPES}
    kinds["scalar"] = torch.tensor(2.5)
    kinds["no_rows"] = torch.empty(0, 4)
    kinds["no_columns"] = torch.empty(4, 0)
    kinds["one"] = torch.tensor([7])
    kinds["deep"] = torch.randn(2, 3, 4, 5)
    return kinds


class Holder(nn.Module):
    """Holds tensors as parameters where they can be, else as buffers."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.complex64):
                self.register_parameter(name, nn.Parameter(empty))
            else:
                self.register_buffer(name, empty)


def as_mapping(state: dict[str, Tensor], folder: Path) -> object:
    return state


def as_folder(state: dict[str, Tensor], folder: Path) -> object:
    as_safetensors(state, folder)
    return str(folder)


def as_shards(state: dict[str, Tensor], folder: Path) -> object:
    """Two shards and an index, as Hugging Face writes them."""
    names = sorted(state)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, keys in parts.items():
        save_file({key: state[key].contiguous() for key in keys}, folder / file)
    where = ",".join(f'"{k}": "{file}"' for file, keys in parts.items() for k in keys)
    index = folder / "model.safetensors.index.json"
    index.write_text(f'{{"metadata": {{}}, "weight_map": {{{where}}}}}')
    return folder


def as_numbered_parts(state: dict[str, Tensor], folder: Path) -> object:
    as_shards(state, folder)
    (folder / "model.safetensors.index.json").unlink()
    return folder


def as_index(state: dict[str, Tensor], folder: Path) -> object:
    as_shards(state, folder)
    return folder / "model.safetensors.index.json"


def as_torch_file(state: dict[str, Tensor], folder: Path) -> object:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def as_old_torch_file(state: dict[str, Tensor], folder: Path) -> object:
    path = folder / "weights.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def as_torch_shards(state: dict[str, Tensor], folder: Path) -> object:
    names = sorted(state)
    torch.save({name: state[name] for name in names[::2]}, folder / "a.bin")
    torch.save({name: state[name] for name in names[1::2]}, folder / "b.bin")
    where = ",".join(
        f'"{name}": "{"ab"[place % 2]}.bin"' for place, name in enumerate(names)
    )
    (folder / "pytorch_model.bin.index.json").write_text(
        f'{{"weight_map": {{{where}}}}}'
    )
    return folder


def as_dcp(state: dict[str, Tensor], folder: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves in a single process
        dcp.save(dict(state), checkpoint_id=folder / "dcp")
    return folder / "dcp"


def as_address(state: dict[str, Tensor], folder: Path) -> object:
    path = as_safetensors(state, folder)
    assert isinstance(path, Path)
    url = f"memory://{folder.name}/weights.safetensors"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    return url


def as_address_of_an_index(state: dict[str, Tensor], folder: Path) -> object:
    as_shards(state, folder)
    for path in folder.iterdir():
        with fsspec.open(f"memory://{folder.name}/sharded/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    return f"memory://{folder.name}/sharded/model.safetensors.index.json"


class Own:
    """A source that somebody else wrote."""

    name = "my store"

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.tensors = {
            key: TensorInfo(shape=tuple(value.shape), dtype=value.dtype)
            for key, value in state.items()
        }

    def read(self, key: str, start: int, stop: int) -> Tensor:
        value = self._state[key]
        return value[start:stop] if value.ndim else value


def as_own_source(state: dict[str, Tensor], folder: Path) -> object:
    return Own(state)


Saver = Callable[[dict[str, Tensor], Path], Any]
SAVERS: list[Saver] = [
    as_mapping,
    as_safetensors,
    as_folder,
    as_shards,
    as_numbered_parts,
    as_index,
    as_torch_file,
    as_old_torch_file,
    as_torch_shards,
    as_dcp,
    as_address,
    as_address_of_an_index,
    as_own_source,
]


def name_of(save: Saver) -> str:
    return save.__name__.removeprefix("as_")


@pytest.mark.parametrize("verify", ["fast", "full"])
@pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "copy"])
@pytest.mark.parametrize("save", SAVERS, ids=name_of)
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    save: Saver, mmap: bool, verify: str, tmp_path: Path
) -> None:
    state = all_kinds()
    if save is as_old_torch_file:  # torch's own old format lacks these
        new = ("of_uint", "of_float8")
        state = {key: v for key, v in state.items() if not key.startswith(new)}
    model = Holder(state)
    weights = open_source(save(state, tmp_path), mmap=mmap)
    held = dict(model.named_parameters())
    report = di.materialize(
        model,
        "cpu",
        weights=weights,
        missing="error",
        unexpected="error",
        verify=verify,
    )
    assert report.ok
    loaded = model.state_dict()
    assert [key for key in state if not same_bits(loaded[key], state[key])] == []
    assert all(param is held[name] for name, param in model.named_parameters())


@pytest.mark.parametrize("save", [as_mapping, as_torch_file], ids=name_of)
def test_tensors_with_gaps_and_permuted_sizes_come_back(
    save: Saver, tmp_path: Path
) -> None:
    whole = torch.randn(6, 8)
    state = {"permuted": whole.t(), "gaps": whole[::2, 1:7:3], "end": whole[4:]}
    model = Holder({key: value.contiguous() for key, value in state.items()})
    di.materialize(model, "cpu", weights=save(state, tmp_path), missing="error")
    for key, value in state.items():
        assert torch.equal(getattr(model, key), value)


def test_a_tensor_of_another_memory_format_keeps_its_strides(tmp_path: Path) -> None:
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 4, 2, device="meta").to(memory_format=torch.channels_last)
    path = as_safetensors(dict(conv.state_dict()), tmp_path)
    di.materialize(model, "cpu", weights=path)
    assert torch.equal(model.weight, conv.weight)
    assert model.weight.stride() == conv.weight.stride()


@pytest.mark.parametrize("save", SAVERS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_dtype_of_the_model(
    save: Saver, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    state = {"weight": torch.randn(40, 30), "bias": torch.randn(40).bfloat16()}
    model = nn.Linear(30, 40, device="meta")
    di.materialize(model, "cpu", weights=save(state, tmp_path), dtype=dtype)
    assert same_bits(model.weight, state["weight"].to(dtype))
    assert same_bits(model.bias, state["bias"].to(dtype))


def test_nested_mappings_are_known_by_dotted_names() -> None:
    saved = {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "step": 4}
    model = nn.Linear(3, 2, device="meta")
    di.materialize(model, "cpu", weights=saved, names={"^model.": ""})
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_a_mapping_is_copied_and_never_taken_over() -> None:
    state = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    model = nn.Linear(3, 2, device="meta")
    di.materialize(model, "cpu", weights=state)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(state["weight"], torch.ones(2, 3))


def test_a_tensor_of_one_element_may_have_a_dim_more_or_less() -> None:
    model = Holder({"scalar": torch.tensor(1.0), "vector": torch.ones(1)})
    state = {"scalar": torch.tensor([2.0]), "vector": torch.tensor(3.0)}
    di.materialize(model, "cpu", weights=state)
    assert model.scalar.shape == ()
    assert model.scalar == 2
    assert model.vector.shape == (1,)
    assert model.vector == 3
