"""Costs of single things: a tile, a library matmul, a reduction, a copy, a collective."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import Bandwidth, ElementWise, Latency, Machine, SmCurve, load
from overweave.ir.plan import MatmulConfig
from overweave.ir.schedule import Buffer, Compute, Put, Reduce, Region, Schedule
from overweave.sim import cost

H200 = load("h200x4")
BF16: cost.Dtypes = ("bfloat16", "bfloat16")


def compute(m: int, n: int, k: int) -> Compute:
    a, b, out = Region("a", 0, (0, m), (0, k)), Region("b", 0, (0, k), (0, n)), Region("y", 0, (0, m), (0, n))
    return Compute(name="c", rank=0, queue="main", a=(a,), b=b, out=(out,))


def put(rows: tuple[int, int], cols: tuple[int, int]) -> tuple[Schedule, Put]:
    source, target = Region("x", 0, rows, cols), Region("x", 1, rows, cols)
    schedule = Schedule(
        name="s", world_size=2, buffers=(Buffer("x", 64, 64, "symmetric"),), queues=(), given=(), goal=(), operations=()
    )
    return schedule, Put(name="p", rank=0, queue="q", sources=(source,), destinations=(target,))


def test_a_tile_grows_with_k_and_with_a_slower_dtype():
    rate = H200.tile("portable", 128, 256)
    short, long = (cost.tile_us(H200, rate, (128, 256, k), "bfloat16") for k in (1024, 2048))
    assert long - short == pytest.approx(short - rate.overhead_us)
    assert cost.tile_us(H200, rate, (128, 256, 1024), "float32") > 10 * short


def test_a_matmul_of_few_rows_is_bound_by_its_weights():
    config = MatmulConfig()
    work = cost.kernel_work(H200, compute(16, 128 * 132, 8192), config, BF16, 132)
    weights_us = 128 * 132 * 8192 * 2 / H200.hbm.gb_per_s / 1e3
    assert work.tile_us == pytest.approx(max(weights_us, work.tile_us))
    slow = replace(H200, hbm=Bandwidth(100.0, ""))
    assert cost.kernel_work(slow, compute(16, 128 * 132, 8192), config, BF16, 132).tile_us > 20 * weights_us


def test_the_library_takes_the_tile_shape_that_wastes_least():
    wide, narrow = (cost.library_work(H200, compute(8192, n, 4096), BF16).count for n in (3584, 2752))
    assert wide == 64 * 14  # whole waves of 128 x 256
    assert narrow == 43 * 15  # of 192 x 192, five waves of which cost less than six of 128 x 256


def test_a_reduction_reads_every_operand_once(paper: Machine):
    machine = replace(paper, hbm=Bandwidth(1.0, ""))
    block = Region("x", 0, (0, 10), (0, 50))  # 1000 bytes
    work = cost.reduce_work(
        machine, Reduce(name="r", rank=0, queue="q", operands=(block,) * 3, out=block), "bfloat16", (2, 2)
    )
    assert work.tile_us == pytest.approx(4.0)  # 4000 bytes at 1 GB/s on 2 SMs in one wave of 2
    far = replace(block, rank=1)
    reduce = Reduce(name="r", rank=0, queue="q", operands=(far,), out=block)
    links = cost.reduce_work(
        replace(machine, links=replace(machine.links, sm_pull=SmCurve(((2, 0.1),), ""))), reduce, "bfloat16", (2, 2)
    )
    assert links.tile_us == pytest.approx(11.0)


def test_few_tiles_pull_faster_each_than_many():
    whole = Region("x", 1, (0, 16), (0, 4096))
    reduce = Reduce(name="r", rank=0, queue="q", operands=(whole,), out=replace(whole, rank=0))
    few, many = (cost.reduce_work(H200, reduce, "bfloat16", (count, count)) for count in (4, 132))
    assert many.tile_us < few.tile_us < 132 / 4 * many.tile_us
    beside = cost.reduce_work(H200, reduce, "bfloat16", (4, 132))
    assert beside.tile_us > few.tile_us, "other tiles of the kernel pull at the same time"


def test_a_library_sum_passes_over_its_total_once_per_operand(paper: Machine):
    machine = replace(paper, element_wise=ElementWise(*(Bandwidth(rate, "") for rate in (1.0, 1.0, 2.0))))
    block = Region("x", 0, (0, 10), (0, 50))  # 500 elements
    reduce = Reduce(name="r", rank=0, queue="q", operands=(block,) * 3, out=block)
    half = [work.tile_us for work in cost.library_sum_works(machine, reduce, "bfloat16")]
    assert half == pytest.approx([3.0, 5.0, 5.0, 1.5])  # 2 + 4, twice 4 + 2 + 4, 4 + 2 bytes of each
    single = [work.tile_us for work in cost.library_sum_works(machine, reduce, "float32")]
    assert single == pytest.approx([4.0, 6.0, 6.0, 2.0])
    assert cost.library_sum_works(machine, replace(reduce, out=replace(block, rows=(3, 3))), "bfloat16") == ()


def test_a_push_by_a_kernel_shares_its_rate_among_its_programs(paper: Machine):
    """500 elements of 2 bytes in 5 tiles; one SM of two has half of what both reach."""
    block = Region("x", 0, (0, 10), (0, 50))
    move = Put(name="p", rank=0, queue="q", sources=(block,), destinations=(replace(block, rank=1),), tiles=5)
    for programs in (1, 2):
        assert cost.push_work(paper, move, programs, "bfloat16", 5) == cost.Work(5, pytest.approx(0.2))
    late = replace(paper, latency=replace(paper.latency, copy_tile=Latency(3.0, "")))
    assert cost.push_work(late, move, 1, "bfloat16", 5).tile_us == pytest.approx(3.2)


def test_columns_of_a_matrix_travel_slower_than_rows(paper: Machine):
    (rows,) = cost.segments(paper, *put((0, 10), (0, 64)), "bfloat16")
    (cols,) = cost.segments(paper, *put((0, 64), (0, 10)), "bfloat16")
    assert rows.alone_us == pytest.approx(1.28)
    assert cols.alone_us == pytest.approx(2 * 1.28)
    assert cost.segments(paper, *put((3, 3), (0, 64)), "bfloat16") == ()
