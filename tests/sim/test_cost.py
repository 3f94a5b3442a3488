"""Costs of single things: a tile, a library matmul, a reduction, a copy, a collective."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import ElementWise, Latency, Machine, load
from overweave.hardware.topology import Bandwidth, SmCurve
from overweave.ir.plan import CopyConfig, MatmulConfig, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Compute, Operation, Put, Reduce, Region, Schedule
from overweave.sim.cost import Costs, KernelCost, tile_us
from overweave.sim.order import LaunchStep, QueueRun

H200 = load("h200x4")
BLOCK = Region("x", 0, (0, 10), (0, 50))  # 500 elements, 1000 bytes
WHOLE = QueueRun(0, 0)
BUFFERS = (
    Buffer("a", 8192, 8192, "input"),
    Buffer("b", 8192, 1 << 15, "input"),
    Buffer("y", 8192, 1 << 15, "output"),
    Buffer("x", 64, 64, "symmetric"),
    Buffer("x32", 64, 64, "symmetric", "float32"),
)


def costs(machine: Machine, programs: int = 16) -> Costs:
    """Of a plan that has these buffers and kernels, and nothing to do."""
    schedule = Schedule(name="s", world_size=2, buffers=BUFFERS, queues=(), given=(), goal=(), operations=())
    kernels = Realization(dtype="bfloat16", engines=(), matmul=MatmulConfig(), copy=CopyConfig(programs=programs))
    problem = Problem(operator="s", m=0, n=0, k=0, world_size=2, dtype="bfloat16")
    return Costs(Plan(name="s", problem=problem, schedule=schedule, realization=kernels), machine)


def tile(machine: Machine, operation: Operation, counts: tuple[int, int], programs: int = 16) -> KernelCost:
    """Of a kernel. counts: the tiles of the operation, and of its launch."""
    return costs(machine, programs).tiles(LaunchStep(operation, "tile_kernel", (), ()), WHOLE, *counts)


def compute(m: int, n: int, k: int, tiles: int = 1) -> Compute:
    a, b, out = Region("a", 0, (0, m), (0, k)), Region("b", 0, (0, k), (0, n)), Region("y", 0, (0, m), (0, n))
    return Compute(name="c", rank=0, queue="main", a=(a,), b=b, out=(out,), tiles=tiles)


def put(rows: tuple[int, int], cols: tuple[int, int]) -> Put:
    source, target = Region("x", 0, rows, cols), Region("x", 1, rows, cols)
    return Put(name="p", rank=0, queue="q", sources=(source,), destinations=(target,))


def reduce(*operands: Region, out: Region = BLOCK) -> Reduce:
    return Reduce(name="r", rank=0, queue="q", operands=operands, out=out)


def test_a_tile_grows_with_k_and_with_a_slower_dtype():
    rate = H200.tile("portable", 128, 256)
    short, long = (tile_us(H200, rate, (128, 256, k), "bfloat16") for k in (1024, 2048))
    assert long - short == pytest.approx(short - rate.overhead_us)
    assert tile_us(H200, rate, (128, 256, 1024), "float32") > 10 * short


def test_a_matmul_of_few_rows_is_bound_by_its_weights():
    operation = compute(16, 128 * 132, 8192, 132)
    weights_us = 128 * 132 * 8192 * 2 / H200.hbm.gb_per_s / 1e3
    assert tile(H200, operation, (132, 132)).tile_us >= weights_us
    slow = replace(H200, hbm=Bandwidth(100.0, ""))
    assert tile(slow, operation, (132, 132)).tile_us > 20 * weights_us


def test_the_library_takes_the_tile_shape_that_wastes_least():
    ((wide,), (narrow,)) = (costs(H200).alone(compute(8192, n, 4096)) for n in (3584, 2752))
    assert wide.count == 64 * 14  # whole waves of 128 x 256
    assert narrow.count == 43 * 15  # of 192 x 192, five waves of which cost less than six of 128 x 256


def test_a_reduction_reads_every_operand_once(paper: Machine):
    machine = replace(paper, hbm=Bandwidth(1.0, ""))
    near = tile(machine, reduce(BLOCK, BLOCK, BLOCK), (2, 2))
    assert near.tile_us == pytest.approx(4.0)  # 4000 bytes at 1 GB/s on 2 SMs in one wave of 2
    slow = replace(machine, links=replace(machine.links, sm_pull=SmCurve(((2, 0.1),), "")))
    assert tile(slow, reduce(replace(BLOCK, rank=1)), (2, 2)).tile_us == pytest.approx(11.0)


def test_few_tiles_pull_faster_each_than_many():
    whole = Region("x", 1, (0, 16), (0, 4096))
    total = reduce(whole, out=replace(whole, rank=0))
    few, many = (tile(H200, total, (count, count)) for count in (4, 132))
    assert many.tile_us < few.tile_us < 132 / 4 * many.tile_us
    assert tile(H200, total, (4, 132)).tile_us > few.tile_us, "other tiles of the kernel pull at the same time"


def test_a_library_sum_passes_over_its_total_once_per_operand(paper: Machine):
    machine = replace(paper, element_wise=ElementWise(*(Bandwidth(rate, "") for rate in (1.0, 1.0, 2.0))))
    half = [work.tile_us for work in costs(machine).alone(reduce(BLOCK, BLOCK, BLOCK))]
    assert half == pytest.approx([3.0, 5.0, 5.0, 1.5])  # 2 + 4, twice 4 + 2 + 4, 4 + 2 bytes of each
    single = replace(BLOCK, buffer="x32")
    whole = [work.tile_us for work in costs(machine).alone(reduce(single, single, single, out=single))]
    assert whole == pytest.approx([4.0, 6.0, 6.0, 2.0])
    assert costs(machine).alone(reduce(BLOCK, out=replace(BLOCK, rows=(3, 3)))) == ()


def test_a_push_by_a_kernel_shares_its_rate_among_its_programs(paper: Machine):
    """500 elements of 2 bytes in 5 tiles; one SM of two has half of what both reach."""
    move = put((0, 10), (0, 50))
    for programs in (1, 2):
        assert tile(paper, move, (5, 5), programs) == KernelCost(5, pytest.approx(0.2))
    late = replace(paper, latency=replace(paper.latency, copy_tile=Latency(3.0, "")))
    assert tile(late, move, (5, 5), 1).tile_us == pytest.approx(3.2)


def test_columns_of_a_matrix_travel_slower_than_rows(paper: Machine):
    (rows,) = costs(paper).segments(put((0, 10), (0, 64)))
    (cols,) = costs(paper).segments(put((0, 64), (0, 10)))
    assert rows.alone_us == pytest.approx(1.28)
    assert cols.alone_us == pytest.approx(2 * 1.28)
    assert costs(paper).segments(put((3, 3), (0, 64))) == ()
