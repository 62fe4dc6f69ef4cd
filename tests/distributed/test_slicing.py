"""Slices are those that DTensor and FSDP2 make, without any communication."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deferred_init.distributed.slicing import Axis, copy_region, region_of


def _cut(full: torch.Tensor, axes: list[Axis], **kwargs: object) -> torch.Tensor:
    region = region_of(full.shape, axes, **kwargs)  # type: ignore[arg-type]
    local = torch.full(region.shape, -1, dtype=full.dtype)
    copy_region(local, full, region)
    if region.cut is not None:
        assert torch.equal(full.narrow(*region.cut), local)
    return local


def _chunk(tensor: torch.Tensor, count: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.integers(0, 13),
    cols=st.integers(1, 7),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dims=st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1])),
    data=st.data(),
)
def test_every_combination_of_shards_cuts_as_torch_chunk_does(
    rows: int,
    cols: int,
    sizes: tuple[int, int],
    dims: tuple[int | None, int | None],
    data: st.DataObject,
) -> None:
    full = torch.arange(rows * cols).reshape(rows, cols)
    ranks = [data.draw(st.integers(0, size - 1)) for size in sizes]
    expected = full
    for dim, size, rank in zip(dims, sizes, ranks, strict=True):
        if dim is not None:
            expected = _chunk(expected, size, rank, dim)
    axes = [
        Axis(dim=dim, size=size, rank=rank)
        for dim, size, rank in zip(dims, sizes, ranks, strict=True)
    ]
    assert torch.equal(_cut(full, axes), expected)


def test_one_range_of_one_dim_is_known_as_such() -> None:
    def cut(*axes: Axis) -> tuple[int, int, int] | None:
        return region_of((8, 6), axes).cut

    rows, columns = (Axis(dim=dim, size=2, rank=1) for dim in (0, 1))
    strided = Axis(dim=0, size=2, rank=1, split_factor=2)
    assert cut() == (0, 0, 8)
    assert cut(rows) == (0, 4, 4)
    assert cut(columns) == (1, 3, 3)
    assert cut(rows, columns) is None
    assert region_of((8, 6), [strided], (4, 6)).cut == (0, 4, 4)
    assert region_of((), []).cut is None
    assert region_of((3, 2), [Axis(dim=0, size=4, rank=3)]).cut == (0, 0, 0)


@settings(deadline=None, max_examples=100)
@given(rows=st.integers(0, 17), dp=st.integers(1, 4), tp=st.integers(1, 4))
def test_a_strided_shard_is_what_fsdp_cuts_out_of_the_tensor_parallel_shard(
    rows: int, dp: int, tp: int
) -> None:
    full = torch.arange(rows * 2).reshape(rows, 2)
    for i in range(dp):
        for j in range(tp):
            expected = _chunk(_chunk(full, tp, j, 0), dp, i, 0)
            axes = [
                Axis(dim=0, size=dp, rank=i, split_factor=tp),
                Axis(dim=0, size=tp, rank=j),
            ]
            local = _cut(full, axes, local_shape=expected.shape)
            assert torch.equal(local, expected)


def test_dtensors_own_reading_of_an_uneven_strided_shard_is_recognized_by_shape() -> (
    None
):
    full = torch.arange(9)
    axes = [Axis(dim=0, size=4, rank=0, split_factor=2)]
    assert _cut(full, axes, local_shape=(3,)).tolist() == [0, 1, 2]
    axes = [Axis(dim=0, size=4, rank=2, split_factor=2)]
    assert _cut(full, axes, local_shape=(2,)).tolist() == [4, 7]


def test_a_local_shape_that_no_reading_explains_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has shape \(3,\), but the placements give"):
        region_of((8,), [Axis(dim=0, size=2, rank=0)], (3,))


@settings(deadline=None, max_examples=100)
@given(
    rows=st.integers(0, 17),
    pieces=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    data=st.data(),
)
def test_a_shard_of_a_strided_shard_is_a_part_of_what_it_keeps(
    rows: int, pieces: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    full = torch.arange(rows)
    outer, inner = (data.draw(st.integers(0, size - 1)) for size in sizes)
    kept = torch.cat(
        [
            _chunk(_chunk(full, pieces, piece, 0), sizes[0], outer, 0)
            for piece in range(pieces)
        ]
    )
    expected = _chunk(kept, sizes[1], inner, 0)
    axes = [
        Axis(dim=0, size=sizes[0], rank=outer, split_factor=pieces),
        Axis(dim=0, size=sizes[1], rank=inner),
    ]
    others_first = region_of(full.shape, axes)  # as FSDP2 reads it, tried first
    local = _cut(full, axes, local_shape=expected.shape)
    if others_first.shape != tuple(expected.shape):
        assert torch.equal(local, expected)
