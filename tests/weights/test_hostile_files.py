"""Broken and hostile files: a clear error with file and key, the model as it was."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deferred_init as di
from deferred_init.sources import open_source


def entry(dtype: str = "F32", shape: Any = (2,), begin: int = 0, end: int = 8) -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def twice(key: str) -> bytes:
    body = json.dumps(entry())
    return f'{{"{key}": {body}, "{key}": {body}}}'.encode()


EIGHT = bytes(8)
BROKEN = {
    "empty": (b"", "has 0 bytes, expected 8 at the least"),
    "header_larger_than_file": (
        pack({}, length=1 << 40),
        r"the header should have 1099511627776 bytes, more than the whole file \(10\)",
    ),
    "truncated_data": (
        pack({"a": entry()}, bytes(4)),
        "its data is cut off: the header promises 8 bytes, the file has 4",
    ),
    "data_left_over": (
        pack({"a": entry()}, bytes(9)),
        "its data has bytes left over: the header promises 8 bytes, the file has 9",
    ),
    "overlap": (
        pack({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
        "`b` overlaps the tensor before it: it begins at 4, expected 8",
    ),
    "gap": (
        pack({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)),
        "`b` leaves a gap: it begins at 12, expected 8",
    ),
    "out_of_range": (
        pack({"a": entry(shape=(4,), end=16)}, EIGHT),
        "its data is cut off",
    ),
    "backwards": (
        pack({"a": entry(begin=8, end=0)}, EIGHT),
        r"`a` has the data_offsets \[8, 0\]",
    ),
    "negative": (
        pack({"a": entry(begin=-8, end=0)}, EIGHT),
        r"`a` has the data_offsets \[-8, 0\]",
    ),
    "negative_shape": (pack({"a": entry(shape=(-2,))}, EIGHT), r"has the shape \[-2\]"),
    "boolean_shape": (pack({"a": entry(shape=(True,))}, EIGHT), "has the shape"),
    "huge_shape": (
        pack({"a": entry(shape=(2**62, 2**62))}, EIGHT),
        "bytes, but its data_offsets hold 8",
    ),
    "too_many_dims": (pack({"a": entry(shape=(1,) * 65)}, EIGHT), "has the shape"),
    "duplicate_names": (pack(twice("a"), EIGHT), "it has names twice: `a`"),
    "unknown_dtype": (
        pack({"a": entry("F31")}, EIGHT),
        "`a` has the dtype 'F31', expected one of `BOOL`, `U8`",
    ),
    "wrong_dtype": (
        pack({"a": entry("F64")}, EIGHT),
        r"`a` is F64 of shape \(2,\), which is 16 bytes, but its data_offsets hold 8",
    ),
    "unknown_field": (
        pack({"a": {**entry(), "x": 1}}, EIGHT),
        "`a` does not consist of dtype, shape and data_offsets",
    ),
    "not_an_entry": (pack({"a": 3}), "`a` does not consist of dtype, shape and"),
    "metadata": (pack({"__metadata__": {"a": 1}}), "does not map text to text"),
    "not_json": (pack(b"{'a': 1}"), "in its header: Expecting property name"),
    "not_text": (pack(b"\xff\xfe{}"), "in its header: 'utf-8' codec can't decode"),
    "a_list": (pack(b"[]"), "in its header: it is a list, not an object"),
    "deep": (pack(b"[" * 100_000), "in its header: it is nested too deeply"),
    "long_number": (pack(b'{"a": ' + b"9" * 5000 + b"}"), "in its header: Exceeds"),
    "pickle": (
        pickle.dumps({"a": [1.0] * 10}),
        "starts as a pickle or a `torch.save` file does",
    ),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a Git LFS pointer, not the file: fetch it with `git lfs pull`",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_safetensors_file_is_named_with_what_is_wrong(
    case: str, tmp_path: Path
) -> None:
    content, text = BROKEN[case]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    model = nn.Linear(1, 1, device="meta")
    with pytest.raises(di.PlanError, match=text) as caught:
        di.materialize(model, "cpu", weights=path)
    assert f"{path} is not a usable safetensors file: " in str(caught.value)
    assert model.weight.is_meta


def test_a_torch_file_with_the_wrong_name_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(di.PlanError, match=r"name it `\.pt` or `\.bin`"):
        open_source(path)


def test_a_header_is_read_without_allocating_more_than_the_file_suggests(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack({"a": entry(shape=(2**40,), end=2**42)}, EIGHT))
    tracemalloc.start()
    with pytest.raises(di.PlanError, match="is cut off"):
        open_source(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x"]
)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_that_leads_out_of_its_folder_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    index = tmp_path / f"model.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(di.PlanError, match="1 file names lead out of the folder"):
        open_source(index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a usable index: it is a list, not an object"),
        ("{", "is not a usable index: Expecting property name"),
        ("{}", "`weight_map` is not there, or does not map keys to file names"),
        ('{"weight_map": {"a": 3}}', "does not map keys to file names"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "it has names twice: `a`"),
        (
            '{"weight_map": {"a": "x.safetensors"}}',
            "1 of the 1 files that it names are "
            "not there: `x.safetensors`. Fetch the checkpoint again",
        ),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_broken_index_is_named_with_what_is_wrong(
    text: str, message: str, tmp_path: Path
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(di.PlanError, match=message):
        open_source(tmp_path)


def test_an_index_that_promises_keys_which_its_files_lack_is_refused(
    tmp_path: Path,
) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    for kind in ("safetensors", "bin"):
        index = tmp_path / f"m.{kind}.index.json"
        where = {"a": f"x.{kind}", "b": f"x.{kind}"}
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(di.PlanError, match="1 keys are not in the files that the "):
            open_source(index)


def test_a_symlink_within_a_folder_is_followed_as_caches_need_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "blobs" / "123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "123")
    assert list(open_source(tmp_path / "snapshot").tensors) == ["a"]


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        save_file(
            {"a": torch.ones(1)}, tmp_path / f"model-0000{part}-of-00002.safetensors"
        )
    with pytest.raises(di.PlanError, match="1 keys are in two files: `a"):
        open_source(tmp_path)


def test_folders_say_what_they_have_and_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(di.PlanError, match="holds no weights that are known"):
        open_source(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00003.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(di.PlanError, match=r"parts \[2\] of 3 are missing"):
        open_source(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(di.PlanError, match="several safetensors files and no index"):
        open_source(tmp_path)
    with pytest.raises(di.PlanError, match=r"no such file or folder\. Nothing is down"):
        open_source(tmp_path / "gone")


def test_checksums_are_compared_when_given(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    import hashlib

    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert open_source(path, sha256={path.name: right.upper()}).tensors
    wrong = "0" * 64
    text = f"{path}: the checksum does not match: expected SHA-256 {wrong}, found"
    with pytest.raises(di.PlanError, match=text):
        open_source(path, sha256={path.name: wrong})
    with pytest.raises(di.PlanError, match="checksums are for files that are not load"):
        open_source(path, sha256={"other": right})
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(di.PlanError, match="the checksum does not match"):
        open_source(tmp_path / "x.pt", sha256={"x.pt": wrong})


def test_mappings_without_values_are_refused() -> None:
    with pytest.raises(di.PlanError, match="holds no tensors"):
        open_source({"a": 3})
    with pytest.raises(
        di.PlanError, match="1 tensors are on the meta device and have no val"
    ):
        open_source({"a": torch.ones(1, device="meta")})
    with pytest.raises(di.PlanError, match="1 tensors are sparse or quantized"):
        open_source({"a": torch.eye(3).to_sparse()})


def test_an_address_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(di.PlanError, match="memory://nowhere/x: FileNotFoundError"):
        open_source("memory://nowhere/x")
    with pytest.raises(di.PlanError, match="nosuch://a/b: ValueError: Protocol not kn"):
        open_source("nosuch://a/b")
