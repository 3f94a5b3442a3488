"""The tile shape of a matmul by experts."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.schedules.tiles.grouped import Groups, grouped_shape, shapes_of_experts

MIXTRAL = Groups(16384, 8, 14336, 4096, "bfloat16", NO_EPILOGUE)
SMS = 132


def blocks(groups: Groups) -> tuple[int, int]:
    config = grouped_shape(groups, "hopper", SMS)
    return config.block_m, config.block_n


def test_many_rows_take_the_largest_tile():
    assert blocks(MIXTRAL) == (128, 256)
    # 11 columns of 192 are one more than fit 2,048: whole ones of 256 are quicker, though their waves are more.
    assert blocks(Groups(40960, 32, 2048, 4096, "bfloat16", NO_EPILOGUE)) == (128, 256)


def test_few_rows_of_an_expert_take_the_lowest_tile():
    assert blocks(replace(MIXTRAL, rows=8 * 16))[0] == 64
    assert blocks(replace(MIXTRAL, rows=8 * 65))[0] == 128
    assert blocks(replace(MIXTRAL, rows=0))[0] == 64


def test_shapes_are_those_that_leave_registers():
    assert all(shape.config.block_m <= 128 for shape in shapes_of_experts("bfloat16", "hopper", NO_EPILOGUE))
    scaled = shapes_of_experts(FLOAT8, "hopper", Epilogue(scaling="rows"))
    assert scaled
    assert all(shape.config.block_m * shape.config.block_n < 128 * 256 for shape in scaled)
    assert shapes_of_experts(FLOAT8, "hopper", Epilogue(scaling="rows", gate=True, activation="silu"))
