"""Derive a Realization for a Schedule without one: the engine that fits the operations of each queue."""

from __future__ import annotations

from overweave.hardware.machine import Machine
from overweave.ir.dtype import Dtype
from overweave.ir.exchange import packed_exchange
from overweave.ir.plan import (
    CopyConfig,
    Engine,
    EngineAssignment,
    MatmulConfig,
    PackedConfig,
    PackedExchange,
    Plan,
    Realization,
    ReduceConfig,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    ECHOES,
    Apply,
    Clear,
    Collective,
    Compute,
    Copy,
    Operation,
    Put,
    Queue,
    Reduce,
    Schedule,
)
from overweave.sim.cost import matmul_shape
from overweave.sim.order import tiles_of


def realize(schedule: Schedule, machine: Machine, dtype: Dtype = "bfloat16") -> Plan:
    """Return the plan in which copies have copy engines, issue queues are kernels, and cuBLAS and NCCL do the rest.

    The tile shape is the machine's first that gives every Compute as many tiles as the schedule says.
    """
    engines = tuple(EngineAssignment(queue.name, _engine(queue, schedule)) for queue in schedule.queues)
    computes = [operation for operation in schedule.operations if isinstance(operation, Compute)]
    rows, cols, k = matmul_shape(computes[0]) if computes else (0, 0, 0)
    return Plan(
        name=schedule.name,
        problem=Problem(operator="matmul", m=rows, n=cols, k=k, world_size=schedule.world_size, dtype=dtype),
        schedule=schedule,
        realization=Realization(
            dtype=dtype,
            engines=engines,
            matmul=_tile_shape(computes, machine),
            reduction=ReduceConfig(),
            copy=CopyConfig(),
            packed=PackedConfig(exchange=_exchange(schedule)),
        ),
    )


def _exchange(schedule: Schedule) -> PackedExchange:
    """Return the exchange of the schedule's packed kernel, derived from its operations."""
    queues = {queue.name for queue in schedule.queues if queue.order == "issue" and schedule.reuse == ECHOES}
    members = [each for each in schedule.operations if each.queue in queues]
    return packed_exchange(members, {buffer.name: buffer for buffer in schedule.buffers})


def _engine(queue: Queue, schedule: Schedule) -> Engine:
    """Return the engine that fits the operations of a queue."""
    members: list[Operation] = [operation for operation in schedule.operations if operation.queue == queue.name]
    if queue.order == "issue" and schedule.reuse == ECHOES:
        return "packed_kernel"
    if queue.order == "issue" and members:
        if all(isinstance(operation, Compute) for operation in members):
            return "tile_kernel"
        if all(isinstance(operation, Reduce) for operation in members):
            return "reduce_kernel"
        if all(isinstance(operation, Apply) for operation in members):
            return "author_kernel"
        if all(isinstance(operation, Put | Copy) for operation in members):
            return "copy_kernel"
    runs_on_sms = any(isinstance(operation, Clear | Compute | Reduce | Collective) for operation in members)
    only_copies = any(operation.reads for operation in members) and all(isinstance(each, Copy) for each in members)
    return "library" if runs_on_sms or only_copies or _is_callers(queue, schedule) else "copy_engine"


def _is_callers(queue: Queue, schedule: Schedule) -> bool:
    """Whether an author's kernel runs behind what the queue did: on the caller's stream."""
    kernels = {operation.queue for operation in schedule.operations if isinstance(operation, Apply)}
    return any(queue.name in each.after for each in schedule.queues if each.name in kernels)


def _tile_shape(computes: list[Compute], machine: Machine) -> MatmulConfig:
    for rate in machine.tiles_of("portable"):
        if all(_has_tile_count(operation, rate.block_m, rate.block_n) for operation in computes):
            return MatmulConfig(block_m=rate.block_m, block_n=rate.block_n)
    return MatmulConfig()


def _has_tile_count(operation: Compute, block_m: int, block_n: int) -> bool:
    rows, cols, _ = matmul_shape(operation)
    return operation.tiles == tiles_of(rows, cols, block_m, block_n)
