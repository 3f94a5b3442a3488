"""What hardware runs the queues of a schedule of the catalog, by their names, and with which kernels."""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from overweave.ir.dtype import FLOAT8, ITEMSIZE_BYTES
from overweave.ir.exchange import packed_exchange
from overweave.ir.plan import (
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Engine,
    EngineAssignment,
    MatmulConfig,
    PackedConfig,
    Realization,
    ReduceConfig,
    SkinnyConfig,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import Put, Queue, Schedule
from overweave.schedules.communication import COMPLETE, COPIES, EXCHANGES, PACKED, SCALES, SUMS, TILES
from overweave.schedules.records.movers import copy_config
from overweave.schedules.records.options import Settings
from overweave.schedules.records.record import Adds, Method
from overweave.schedules.tiles.shape import (
    SUMS_FINISHED,
    KernelChoice,
    TileShape,
    packed_row_shape,
    packed_shape,
    reduction_shape,
    row_shape,
    shapes,
    skinny_shape,
)


def assigned(queue: Queue, of_tiles: Engine = TILE_KERNEL) -> EngineAssignment:
    """The engine of a queue, by its name: what has none of its own is the library's."""
    copies = COPY_ENGINE if queue.order == COMPLETE else COPY_KERNEL
    engines = {TILES: of_tiles, COPIES: copies, SCALES: COPY_ENGINE, SUMS: REDUCE_KERNEL, PACKED: PACKED_KERNEL}
    return EngineAssignment(queue.name, cast("Engine", engines.get(queue.name.split(".")[0], LIBRARY)))


def realized(
    schedule: Schedule,
    problem: Problem,
    method: Method,
    settings: Settings,
    matmul: MatmulConfig | None,
    sums: ReduceConfig,
) -> Realization:
    """Engines for all queues, and a configuration for each kernel that has one."""
    queues = {queue.name for queue in schedule.queues}
    return Realization(
        dtype=problem.dtype,
        engines=tuple(assigned(queue) for queue in schedule.queues),
        matmul=matmul,
        reduction=sums if SUMS in queues else None,
        copy=copy_config(settings),
        packed=packed_config(schedule, problem, settings.sms) if PACKED in queues else None,
        skinny=_skinny(problem, settings) if PACKED in queues and settings.matmul != "library" else None,
        library_sms=settings.library_sms if method.is_fused and EXCHANGES in queues else 0,
        partial_sums=method.adds.precision if method.adds else "float32",
    )


def sums_shape(problem: Problem, method: Method, settings: Settings) -> ReduceConfig:
    """The tiles of the reduction kernel. Beside a tile kernel they are large: it takes what that leaves idle. Where
    tiles add, it only moves sums, on all SMs, behind the tiles.
    """
    if problem.of_rows is not None:
        # The fewer rows a tile has, the fewer warps share a row, in another order: of a batch-invariant call one shape.
        rows = 0 if problem.batch_invariant else problem.result_rows(0)
        return row_shape(rows, problem.n, settings.sms)
    finishes = problem.sum_epilogue.steps != ()
    if method.adds is not None and method.adds.by == TILE_KERNEL:
        return reduction_shape(problem.m, problem.n, settings.sms, finishes)
    return SUMS_FINISHED if finishes else ReduceConfig()


def _skinny(problem: Problem, settings: Settings) -> SkinnyConfig:
    """One for the products of all weights, made for the widest."""
    shape = skinny_shape((problem.m, max(problem.widths), problem.k), settings.sms)
    return replace(shape, early=settings.matmul == "early")


def packed_config(schedule: Schedule, problem: Problem, sms: int) -> PackedConfig:
    """The launch of the kernel of packed messages."""
    members = [each for each in schedule.operations if each.queue == PACKED]
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    if problem.of_rows is not None:
        return packed_row_shape(problem.n * ITEMSIZE_BYTES[problem.result_dtype], packed_exchange(members, buffers))
    pushed = [part for each in members if isinstance(each, Put) for part in each.sources]
    sizes = [part.shape[0] * part.shape[1] * buffers[part.buffer].itemsize_bytes(problem.dtype) for part in pushed]
    return packed_shape(max(sizes, default=0), sms, packed_exchange(members, buffers))


def shapes_of_tiles(problem: Problem, kernel: KernelChoice, adds: Adds | None, sums: str) -> tuple[TileShape, ...]:
    """The tile shapes of a method's kernel, beside what it does to products, and to sums if its tiles make such.

    adds: how the method adds. sums: the option of this name.
    """
    finish = (adds is not None and adds.by == TILE_KERNEL) or sums == "epilogue"
    candidates = shapes(problem.dtype, kernel, problem.tile_epilogue(finish), len(problem.widths))
    of_parts = problem.epilogue.part_epilogue.added
    if kernel == "portable" or not finish or not (problem.sum_epilogue.steps or of_parts):
        return candidates
    # The assembler spills a register or two: of fp8, beside a step's product; where a consumer has 128 rows, beside
    # several addends; and of both, beside what is registered of parts.
    if of_parts:
        return tuple(shape for shape in candidates if max(shape.config.block_m, shape.config.block_n) <= 128)
    if problem.dtype == FLOAT8:
        return tuple(shape for shape in candidates if shape.config.block_n <= 128)
    has_several = adds is not None and adds.order != "ring" and problem.world_size > 2
    return tuple(shape for shape in candidates if shape.config.block_m <= 128 or not has_several)
