"""Tensors as the matrices that operators take: in rows, whatever their strides."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.operators import all_gather_matmul, matmul_reduce_scatter
from overweave.ops.dispatch.route import GroupRank
from overweave.ops.dispatch.rows import RowLayout, gathered_rows, scattered_rows

SHAPES = (((6, 4), 0), ((2, 6, 4), 1), ((2, 3, 6, 4), 2))


def strided(shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.arange(2 * torch.Size(shape).numel(), dtype=torch.float32)
    return whole.view(*shape, 2)[..., 0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_matrices_of_strided_tensors_are_row_major(shape: tuple[int, ...], dim: int, world_size: int):
    place, x = GroupRank("g", world_size, 0, tuple(range(world_size))), strided(shape)
    made: list[RowLayout] = [
        gathered_rows((all_gather_matmul.OPERATOR, place), x, dim, None),
        scattered_rows((matmul_reduce_scatter.OPERATOR, place), x, dim),
    ]
    assert all(rows.matrix.is_contiguous() for rows in made)
    if world_size == 1:
        assert all(torch.equal(rows.restored(rows.matrix), x) for rows in made)
