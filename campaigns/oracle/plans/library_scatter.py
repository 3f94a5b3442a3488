"""A reduce-scatter of two ranks by library matmuls, pushes and sums, each on a stream of its own or behind others."""

from __future__ import annotations

from overweave.ir.contract import preconditions
from overweave.ir.plan import (
    COPY_KERNEL,
    LIBRARY,
    REDUCE_KERNEL,
    CopyConfig,
    Engine,
    EngineAssignment,
    Plan,
    Realization,
    ReduceConfig,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Compute,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Reduce,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.schedules.tiles.order import tile_orders

HALF, N, K = 32, 16, 16


def region(buffer: str, rank: int, half: int, cols: int = N) -> Region:
    return Region(buffer, rank, (half * HALF, (half + 1) * HALF), (0, cols))


def operations_of(rank: int, parts: int) -> list[Operation]:
    """Matmuls, pushes of the peer's half, sums. parts: of each half."""
    peer, step = 1 - rank, HALF // parts
    operations: list[Operation] = []

    def rows(half: int, part: int) -> tuple[int, int]:
        return half * HALF + part * step, half * HALF + (part + 1) * step

    for part in range(parts):
        at = [Region("partial", rank, rows(half, part), (0, N)) for half in (peer, rank)]
        operations += [
            Compute(
                name=f"multiply.{rank}.{part}", rank=rank, queue="main", notifies=(Notify("computed", rank, part),),
                a=tuple(Region("x", rank, one.rows, (0, K)) for one in at),
                b=Region("w", rank, (0, K), (0, N)), out=tuple(at),
            ),
            Put(
                name=f"push.{rank}.{part}", rank=rank, queue="copies",
                waits=(Wait("computed", (part, part + 1), 1),), notifies=(Notify("arrived", peer, part),),
                sources=(at[0],), destinations=(Region("slots", peer, rows(0, part), (0, N)),),
            ),
            Reduce(
                name=f"sum.{rank}.{part}", rank=rank, queue="sums",
                waits=(Wait("computed", (part, part + 1), 1), Wait("arrived", (part, part + 1), 1)),
                operands=(at[1], Region("slots", rank, rows(0, part), (0, N)))[:: 1 if rank == 0 else -1],
                out=Region("y", rank, rows(0, part), (0, N)),
            ),
        ]  # fmt: skip
    return sorted(operations, key=lambda one: ("main", "copies", "sums").index(one.queue))


def scatter(pushes: Engine, sums_after: tuple[str, ...], *, parts: int = 1) -> Plan:
    """A reduce-scatter of two ranks by library matmuls."""
    problem = Problem(operator="matmul_reduce_scatter", m=2 * HALF, n=N, k=K, world_size=2, dtype="bfloat16")
    holdings = [one for rank in range(2) for one in preconditions(problem, rank)]
    schedule = Schedule(
        name="scatter",
        world_size=2,
        buffers=(
            Buffer("x", 2 * HALF, K, "input"),
            Buffer("w", K, N, "input"),
            Buffer("partial", 2 * HALF, N, "local"),
            Buffer("slots", HALF, N, "symmetric"),
            Buffer("y", HALF, N, "output"),
        ),
        pads=(SignalPad("computed", parts), SignalPad("arrived", parts)),
        queues=(
            Queue("main", "complete"),
            Queue("copies", "issue" if pushes == COPY_KERNEL else "complete"),
            Queue("sums", "issue", sums_after),
        ),
        given=tuple(
            InitialContents(Region(one.buffer, one.rank, (0, one.shape[0]), (0, one.shape[1])), one.tensor, *one.at)
            for one in holdings
        ),
        credits=(Credit(0, 1), Credit(1, 0)),
        goal=tuple(Goal(region("y", rank, 0), "a@b", rank * HALF, 0, ((0, K), (K, 2 * K))) for rank in range(2)),
        operations=tuple(one for rank in range(2) for one in operations_of(rank, parts)),
    )
    realization = Realization(
        dtype="bfloat16",
        engines=(
            EngineAssignment("main", LIBRARY),
            EngineAssignment("copies", pushes),
            EngineAssignment("sums", REDUCE_KERNEL),
        ),
        reduction=ReduceConfig(block_m=HALF, block_n=N),
        copy=CopyConfig(block_kib=4) if pushes == COPY_KERNEL else None,
    )
    tables = tile_orders(schedule, realization)
    return Plan(name="scatter", problem=problem, schedule=schedule, realization=realization, tile_orders=tables)
