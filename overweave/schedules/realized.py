"""What hardware runs the queues of a schedule of the catalog, by their names, and with which kernels."""

from __future__ import annotations

from typing import cast

from overweave.ir.plan import (
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Assignment,
    Engine,
    MatmulConfig,
    PackedConfig,
    Problem,
    Realization,
    ReduceConfig,
)
from overweave.ir.schedule import Copy, Queue, Reduce, Schedule
from overweave.schedules.communication import COPIES, ISSUE, MAIN, PACKED, SCALES, SUMS, TILES
from overweave.schedules.mover import copy_config
from overweave.schedules.options import Settings
from overweave.schedules.tile_shape import packed_shape

_ENGINES = {
    COPIES: COPY_ENGINE,
    SCALES: COPY_ENGINE,
    MAIN: LIBRARY,
    TILES: TILE_KERNEL,
    SUMS: REDUCE_KERNEL,
    PACKED: PACKED_KERNEL,
}


def realized(
    schedule: Schedule, problem: Problem, settings: Settings, matmul: MatmulConfig | None, sums: ReduceConfig
) -> Realization:
    """Engines for all queues, and a configuration for each kernel that has one."""
    queues = {queue.name for queue in schedule.queues}
    return Realization(
        dtype=problem.dtype,
        engines=tuple(Assignment(queue.name, _engine(queue)) for queue in schedule.queues),
        matmul=matmul,
        reduction=sums if SUMS in queues else None,
        copy=copy_config(settings),
        packed=_packed(schedule, problem, settings.sms) if PACKED in queues else None,
    )


def _packed(schedule: Schedule, problem: Problem, sms: int) -> PackedConfig:
    """Sums of whole partials are shared by nobody; else those of a shard are."""
    sums = [each.out.shape for each in schedule.operations if isinstance(each, Reduce) and each.queue == PACKED]
    is_shared = any(isinstance(each, Copy) and each.queue == PACKED for each in schedule.operations)
    elements = max((rows * cols for rows, cols in sums), default=0)
    return packed_shape(elements, problem.result_dtype, sms, 2 if is_shared else 1)


def _engine(queue: Queue) -> Engine:
    kind = queue.name.split(".")[0]
    return cast("Engine", COPY_KERNEL if (kind, queue.order) == (COPIES, ISSUE) else _ENGINES[kind])
