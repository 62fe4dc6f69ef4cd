"""Headers and indexes of any content: our errors, no crash, no hang, little memory.

500 cases each; `DEFERRED_INIT_FUZZ=20000` in the environment runs that many.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deferred_init as di
from deferred_init.sources import open_source
from deferred_init.sources.safetensors_header import DTYPE_TAGS

CASES = int(os.environ.get("DEFERRED_INIT_FUZZ", "500"))
MEMORY_PER_BYTE = 200
"""JSON as Python objects, per byte of text; tensors would be far beyond."""

many = settings(
    max_examples=CASES,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
sizes = st.integers(-2, 5) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_TAGS, "F4", "f32", ""]) | anything,
        "shape": st.lists(sizes, max_size=4) | anything,
        "data_offsets": st.lists(st.integers(-8, 64) | sizes, max_size=3) | anything,
    },
    optional={"extra": anything},
)
headers = st.dictionaries(
    st.text(max_size=6) | st.just("__metadata__"), entries | anything, max_size=5
)


@st.composite
def honest(draw: st.DrawFn) -> bytes:
    """A valid file, of which a few bytes may then be changed or cut."""
    header: dict[str, Any] = {}
    place = 0
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        tag = draw(st.sampled_from(sorted(DTYPE_TAGS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = DTYPE_TAGS[tag].itemsize
        for length in shape:
            size *= length
        offsets = [place, place + size]
        if name != "__metadata__":
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": offsets}
            place += size
    text = json.dumps(header).encode()
    content = bytearray(struct.pack("<Q", len(text)) + text + bytes(place))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 3]))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.sampled_from([False, False, True]))
    end = draw(st.integers(0, len(content))) if cut else len(content)
    return bytes(content[:end])


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """A length, a header of any content, and data of any length."""
    text = json.dumps(draw(headers | anything)).encode()
    text = draw(st.just(text) | st.binary(max_size=60))
    length = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    return struct.pack("<Q", length) + text + draw(st.binary(max_size=64))


def open_and_read(path: Path) -> None:
    """Open; if that works, every tensor must be readable in full."""
    try:
        source = open_source(path)
    except di.PlanError as error:
        text = str(error)
    else:
        for key, info in source.tensors.items():
            found = source.read(key, 0, info.shape[0] if info.shape else 1)
            assert tuple(found.shape) == info.shape
            assert found.dtype == info.dtype
        return
    assert path.name in text
    assert len(text) < 5000


@many
@given(content=honest() | made_up() | st.binary(max_size=80))
def test_any_bytes_are_read_or_refused_with_an_error_of_ours(
    folder: Path, content: bytes
) -> None:
    path = folder / "fuzz.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        open_and_read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000 + MEMORY_PER_BYTE * len(content)


names = st.text(max_size=10) | st.sampled_from(
    ["a.safetensors", "../a", "/etc/passwd", "..", ".", "", "a/../..", "\x00", "C:/x"]
)
maps = st.dictionaries(st.text(max_size=6), names | anything, max_size=4)
indexes = st.fixed_dictionaries({"weight_map": maps | anything}) | anything


@many
@given(
    text=indexes.map(lambda index: json.dumps(index).encode()) | st.binary(max_size=40)
)
def test_any_index_is_read_or_refused_with_an_error_of_ours(
    folder: Path, text: bytes
) -> None:
    inner = folder / "inner"
    inner.mkdir(exist_ok=True)
    good = json.dumps({"k": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})
    (inner / "a.safetensors").write_bytes(
        struct.pack("<Q", len(good)) + good.encode() + b"x"
    )
    (folder / "a").write_bytes(b"outside")
    path = inner / "model.safetensors.index.json"
    path.write_bytes(text)
    open_and_read(path)


def test_the_fuzzer_reaches_files_that_are_read_in_full() -> None:
    """Else the tests above would prove little."""
    read = 0

    @settings(max_examples=100, database=None, derandomize=True)
    @given(content=honest())
    def count(content: bytes) -> None:
        nonlocal read
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "fuzz.safetensors"
            path.write_bytes(content)
            try:
                read += bool(open_source(path).tensors)
            except di.PlanError:
                return

    count()
    assert read >= 5
