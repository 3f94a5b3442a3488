"""The tile shape follows the waves."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.operators.forms import Scaling
from overweave.ir.plan import MOST_SPLITS, gate_obstacle, narrow_width, split_obstacle, step_obstacle
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import method_of
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.options import Settings
from overweave.schedules.records.record import MethodRequest
from overweave.schedules.tiles.grouped import Groups, grouped_shape, shapes_of_experts
from overweave.schedules.tiles.shape import (
    LEAST_STEPS,
    SHAPES,
    KernelChoice,
    count_tiles,
    row_shape,
    shapes,
    skinny_shape,
    tile_shape,
    tile_time_us,
    tiles_to_cut,
)

KERNELS: tuple[KernelChoice, ...] = ("hopper", "portable")


def blocks(heights: tuple[int, ...], cols: int, sms: int = 132, dtype: str = "bfloat16") -> tuple[int, int]:
    config = tile_shape(heights, cols, sms, shapes(dtype), 4096)
    return config.block_m, config.block_n


def test_large_problems_take_the_most_efficient_tile():
    assert blocks((2048,) * 4, 28672) == (128, 256)


def test_a_nearly_empty_last_wave_changes_the_shape():
    # 132 tiles of 128 x 256 are one wave; 144 are two, of which the second is nearly empty.
    assert blocks((128 * 11,), 256 * 12) == (128, 256)
    assert blocks((128 * 12,), 256 * 12) != (128, 256)


def test_low_chunks_take_low_tiles():
    assert blocks((64,) * 8, 256 * 20) == (64, 256)


def test_a_smaller_gpu_chooses_for_itself():
    assert len({blocks((1024,), 4096, sms) for sms in range(8, 140, 4)}) > 1


@pytest.mark.parametrize(
    ("tile", "m", "n", "whole", "narrow", "cut"),
    [
        ((256, 2), 8192, 2752, 704, 0, 44),  # 5 waves and 44 tiles: 88 halves share the sixth
        ((256, 2), 8192, 7392, 1856, 0, 8),
        ((256, 2), 8192, 8192, 2048, 0, 0),  # 15 waves and 68 tiles: 136 halves are more than a wave
        ((256, 2), 8192, 8448, 2112, 0, 0),  # whole waves
        ((256, 2), 8192, 2688, 640, 64, 24),  # the last column is half a tile wide
        ((256, 2), 128, 4096, 16, 0, 16),
        ((256, 4), 8192, 2752, 640, 64, 0),  # 192 of the last 256 columns: 64 tiles that take 0.88 each
        ((256, 4), 2048, 2560, 160, 0, 28),  # 112 quarters
        ((256, 4), 8192, 8192, 2048, 0, 0),  # 68 tiles: 272 quarters are three rounds
        ((192, 3), 1024, 5184, 216, 0, 0),  # 84 tiles: 252 thirds are two rounds, longer than one whole
        ((192, 3), 1024, 4096, 168, 8, 42),  # 21.3 tiles a row
    ],
)
def test_the_last_wave_is_cut_where_its_parts_take_less_time(
    tile: tuple[int, int], m: int, n: int, whole: int, narrow: int, cut: int
):
    hopper = (shape.config for shape in shapes("bfloat16", "hopper"))
    config = next(one for one in hopper if (one.block_n, one.split_n) == tile)
    count = count_tiles((m,), n, config)
    assert (count.whole, count.narrow, tiles_to_cut(count, 132, config)) == (whole, narrow, cut)


def test_a_cut_wave_is_counted_when_shapes_are_compared():
    hopper = shapes("bfloat16", "hopper")
    assert tile_shape((8192,), 2752, 132, hopper, 4096).block_n == 256
    assert tile_shape((8192,), 2752, 132, hopper, 4096).split_n == 2  # five waves and one of halves
    assert tile_shape((8192,), 9216, 132, hopper, 4096).split_n == 2


def test_one_full_wave_is_better_than_one_that_leaves_sms_idle_or_two():
    """Of 160 columns 128 tiles, of 192 columns 112, of 128 columns 160."""
    config = tile_shape((1024,), 2560, 132, shapes("bfloat16", "hopper"), 4096)
    assert (config.block_m, config.block_n, config.split_n) == (128, 160, 5)


def test_bulk_loads_of_rows_at_odd_multiples_of_16_bytes_are_what_a_small_tile_waits_for():
    hopper = shapes("bfloat16", "hopper")
    for shape in hopper:
        assert tile_time_us(shape, 4096) > tile_time_us(shape, 4080)
    smallest = min(hopper, key=lambda one: one.efficiency)
    assert tile_time_us(smallest, 4088) > 1.05 * tile_time_us(smallest, 4096)
    for shape in shapes("bfloat16"):
        assert tile_time_us(shape, 4088) < tile_time_us(shape, 4096)
    chosen = [tile_shape((557,), 10856, 132, hopper, k) for k in (11520, 11544)]
    assert chosen[0].block_m * chosen[0].block_n < chosen[1].block_m * chosen[1].block_n


def test_192_columns_are_three_rectangles_of_the_hopper_kernel():
    chosen = shapes("bfloat16", "hopper")[0].config
    assert Settings(block_n=192).tile(chosen).split_n == 3
    assert Settings(block_n=128).tile(chosen).split_n == 2
    for asked, split_n in ((Settings(block_n=192, split_n=2), 2), (Settings(block_n=256, split_n=3), 3)):
        with pytest.raises(InputError, match=f"split_n={split_n}.*no powers of two"):
            asked.tile(chosen)
    with pytest.raises(InputError, match=r"block_n=192.*kernel=hopper"):
        Settings(block_n=192).tile(shapes("bfloat16")[0].config)


def test_tiles_of_no_multiple_of_64_columns_are_rectangles_of_32_in_the_hopper_kernel():
    chosen = shapes("bfloat16", "hopper")[0].config
    config = Settings(block_n=160).tile(chosen)
    assert config.split_n == 5
    assert (config.part_n, narrow_width(128, config), narrow_width(129, config)) == (32, 128, 0)
    with pytest.raises(InputError, match=r"split_n=4.*less than 64"):  # where 64 will do, 32 are not taken
        Settings(block_n=128, split_n=4).tile(chosen)
    with pytest.raises(InputError, match=r"block_n=160.*kernel=hopper"):
        Settings(block_n=160).tile(shapes("bfloat16")[0].config)


def test_epilogues_take_no_tiles_whose_kernel_would_spill():
    config = tile_shape((8192,), 2752, 132, shapes("bfloat16", "hopper", Epilogue(activation="silu")), 4096)
    assert (config.block_n, config.split_n) == (256, 2)


def test_finished_tiles_of_three_weights_are_no_taller_or_wider_than_fits():
    biased = Epilogue(bias=True)
    for kernel in ("portable", "hopper"):
        two, three = (shapes("bfloat16", kernel, biased, weights) for weights in (2, 3))
        assert two == shapes("bfloat16", kernel, biased)
        left_out = [shape.config for shape in two if shape not in three]
        assert [max(config.block_m, config.block_n) for config in left_out] == [256]
        assert shapes("bfloat16", kernel, weights=3) == shapes("bfloat16", kernel)
        assert shapes("float8_e4m3fn", kernel, biased, 3) == shapes("float8_e4m3fn", kernel, biased)


def test_full_precision_has_shapes_of_its_own():
    assert blocks((4096,), 4096, dtype="float32") in {(s.config.block_m, s.config.block_n) for s in shapes("float32")}
    assert len(shapes("bfloat16")) >= 3


def test_the_hopper_kernel_takes_tiles_for_two_groups_of_warps_and_16_bits():
    assert {shape.config.kernel for shape in shapes("float16", "hopper")} == {"hopper"}
    assert all(shape.config.block_m >= 64 for shape in shapes("bfloat16", "hopper"))
    assert not any(split_obstacle(shape.config) for shape in shapes("bfloat16", "hopper"))
    assert tile_shape((64,) * 4, 7168, 132, shapes("bfloat16", "hopper"), 4096).block_m == 64
    with pytest.raises(InputError, match="kernel=portable"):
        shapes("float32", "hopper")


@pytest.mark.parametrize("scaling", ["rows", "tensor"])
def test_gated_tiles_are_such_as_can_be(scaling: Scaling):
    for activation, residual in product((None, "silu", "gelu"), (False, True)):
        epilogue = Epilogue(gate=True, activation=activation, residual=residual)  # type: ignore[arg-type]
        scaled = replace(epilogue, scaling=scaling)
        for kernel in KERNELS:
            of_fp8 = [shape.config for shape in shapes(FLOAT8, kernel, scaled)]
            assert not any(gate_obstacle(shape.config, "bfloat16") for shape in shapes("bfloat16", kernel, epilogue))
            assert not any(gate_obstacle(config, FLOAT8) or step_obstacle(config, FLOAT8) for config in of_fp8)
    tall = shapes("bfloat16", "hopper", Epilogue(gate=True))[1].config
    assert tall.block_m == 256
    assert "128 rows, not 256" in gate_obstacle(tall, FLOAT8)
    assert not gate_obstacle(replace(tall, kernel="portable"), FLOAT8)


@pytest.mark.parametrize(
    ("dtype", "kernel", "block_k", "words"),
    [
        ("bfloat16", "hopper", 128, "256 bytes of k"),
        ("float8_e4m3fn", "hopper", 16, "tensor cores take 32"),
        ("float8_e4m3fn", "portable", 16, "tensor cores take 32"),
    ],
)
def test_steps_of_k_that_no_kernel_can_take_are_refused(dtype: str, kernel: str, block_k: int, words: str):
    fp8 = {"b_is_transposed": True, "epilogue": Epilogue(scaling="rows"), "out_dtype": "bfloat16"}
    size = {"operator": "all_gather_matmul", "m": 512, "n": 512, "k": 512, "world_size": 2, "dtype": dtype}
    problem = Problem(**size, **(fp8 if dtype != "bfloat16" else {}))
    with pytest.raises(InputError, match=words):
        build("all_gather_matmul.push", problem, {"kernel": kernel, "block_k": block_k})
    assert build("all_gather_matmul.push", problem, {"kernel": kernel, "block_k": 64})


@pytest.mark.parametrize("rows", [1, 16, 500, 100_000])
@pytest.mark.parametrize("cols", [8, 40, 1024, 4096, 5120, 16384])
def test_tiles_to_norm_hold_whole_rows_and_their_parts_fit_registers(rows: int, cols: int):
    shape = row_shape(rows, cols, sms=132)
    assert shape.block_n >= cols
    part = shape.block_m * shape.block_n // shape.parts
    assert part <= 4096
    assert part // (32 * shape.warps) <= 16  # numbers of a thread
    assert shape.block_m == 1 or rows // shape.block_m >= 66  # every other SM has a tile, where rows suffice


# When the matmul of few rows may compute, and in how many shares.

PROBLEM = Problem(operator="all_gather_matmul", m=8, n=4096, k=1024, world_size=4, dtype="bfloat16")


@pytest.mark.parametrize(("m", "rows"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (500, 64)])
def test_rows_choose_the_tile(m: int, rows: int) -> None:
    assert skinny_shape((m, 4096, 4096), 132).block_m == rows


@pytest.mark.parametrize(("n", "shares"), [(1536, 5), (2560, 3), (4096, 2), (7168, 1), (14336, 1), (64, MOST_SPLITS)])
def test_every_sm_has_a_program(n: int, shares: int) -> None:
    assert skinny_shape((1, n, 8192), 132).splits == shares


def test_shares_have_some_steps() -> None:
    for k in (1, 16, 100, 1000, 3000):
        config = skinny_shape((1, 64, k), 132)
        assert config.splits == 1 or k >= LEAST_STEPS * config.splits * config.block_k


def test_all_fits_the_shared_memory_of_a_block() -> None:
    for one in SHAPES:
        assert one.stages * (one.block_m + one.block_n) * one.block_k * 2 <= 227 << 10


def said(problem: Problem) -> str:
    """What stands against the matmul of few rows, whatever the device."""
    method = method_of("matmul_all_reduce.one_shot_packed")
    return obstacle(MethodRequest(problem, {"matmul": "skinny"}), method, "schedule")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"dtype": "float32"}, "16 bits"), ({"epilogue": Epilogue(activation="silu")}, "silu")],
)
def test_what_it_cannot_do_is_said(changes: dict[str, object], why: str) -> None:
    problem = replace(PROBLEM, **changes)
    assert said(PROBLEM) == ""
    assert why in said(problem)
    with pytest.raises(InputError, match=why):
        build("all_gather_matmul.gather_packed", problem, {"matmul": "skinny"})
    build("all_gather_matmul.gather_packed", problem, {"matmul": "library"})


def test_sums_may_be_finished_behind_it() -> None:
    finished = Epilogue(bias=True, activation="silu", residual=True)
    problem = replace(PROBLEM, operator="matmul_all_reduce", epilogue=finished)
    plan = build("matmul_all_reduce.one_shot_packed", problem, {"matmul": "early"})
    assert plan.realization.skinny is not None
    assert "bias" in said(replace(problem, world_size=1))


def test_who_multiplies_is_no_option_of_other_plans() -> None:
    with pytest.raises(InputError, match="option matmul"):
        build("all_gather_matmul.per_shard", PROBLEM, {"matmul": "skinny"})


# The tile shape of a matmul by experts.

MIXTRAL = Groups(16384, 8, 14336, 4096, "bfloat16", NO_EPILOGUE)
SMS = 132


def block_of_groups(groups: Groups) -> tuple[int, int]:
    config = grouped_shape(groups, "hopper", SMS)
    return config.block_m, config.block_n


def test_many_rows_take_the_largest_tile():
    assert block_of_groups(MIXTRAL) == (128, 256)
    # 11 columns of 192 are one more than fit 2,048: whole ones of 256 are quicker, though their waves are more.
    assert block_of_groups(Groups(40960, 32, 2048, 4096, "bfloat16", NO_EPILOGUE)) == (128, 256)


def test_few_rows_of_an_expert_take_the_lowest_tile():
    assert block_of_groups(replace(MIXTRAL, rows=8 * 16))[0] == 64
    assert block_of_groups(replace(MIXTRAL, rows=8 * 65))[0] == 128
    assert block_of_groups(replace(MIXTRAL, rows=0))[0] == 64


def test_shapes_are_those_that_leave_registers():
    assert all(shape.config.block_m <= 128 for shape in shapes_of_experts("bfloat16", "hopper", NO_EPILOGUE))
    scaled = shapes_of_experts(FLOAT8, "hopper", Epilogue(scaling="rows"))
    assert scaled
    assert all(shape.config.block_m * shape.config.block_n < 128 * 256 for shape in scaled)
    assert shapes_of_experts(FLOAT8, "hopper", Epilogue(scaling="rows", gate=True, activation="silu"))
