"""Small plans whose library calls stand on a stream of their own, or span a part of the group."""

from __future__ import annotations

from typing import NamedTuple

from overweave.ir.contract import preconditions
from overweave.ir.plan import LIBRARY, TILE_KERNEL, Engine, EngineAssignment, MatmulConfig, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Queue,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.schedules.tiles.order import tile_orders

ROWS, N, K, GROUPS = 64, 16, 16, 2


class Sizes(NamedTuple):
    rows: int = ROWS
    n: int = N
    k: int = K
    config: MatmulConfig = MatmulConfig(block_m=16, block_n=16, block_k=16)


SMALL = Sizes()


def region(buffer: str, rank: int, rows: tuple[int, int], cols: int) -> Region:
    return Region(buffer, rank, rows, (0, cols))


def reduced_beside(world_size: int, sizes: Sizes = SMALL, *, after: tuple[str, ...] = ()) -> Plan:
    """An all-reduce of groups of rows, each on a side stream once its tiles are stored: the tile kernel goes on."""
    (height, n, k, config), ranks = sizes, tuple(range(world_size))
    step = height // GROUPS
    tiles = step // config.block_m * (n // config.block_n)
    operations: list[Operation] = []
    for rank in ranks:
        parts = [(at * step, (at + 1) * step) for at in range(GROUPS)]
        for at, rows in enumerate(parts):
            operations.append(
                Compute(
                    name=f"multiply.{rank}.{at}", rank=rank, queue="tiles", notifies=(Notify("computed", rank, at),),
                    a=(region("x", rank, rows, k),), b=region("w", rank, (0, k), n),
                    out=(region("partial", rank, rows, n),), tiles=tiles,
                )
            )  # fmt: skip
        for at, rows in enumerate(parts):
            operations.append(
                Collective(
                    name=f"reduce.{rank}.{at}", rank=rank, queue="groups", function="all_reduce", label=f"reduce.{at}",
                    waits=(Wait("computed", (at, at + 1), tiles),), ranks=ranks,
                    sources=(region("partial", rank, rows, n),), destinations=(region("y", rank, rows, n),),
                )
            )  # fmt: skip
    problem = problem_of("matmul_all_reduce", world_size, sizes)
    schedule = Schedule(
        name="reduced_beside",
        world_size=world_size,
        buffers=(Buffer("x", height, k, "input"), Buffer("w", k, n, "input"), Buffer("partial", height, n, "local"),
                 Buffer("y", height, n, "output")),
        pads=(SignalPad("computed", GROUPS),),
        queues=(Queue("tiles", "issue"), Queue("groups", "complete", after)),
        given=given_of(problem),
        goal=tuple(
            Goal(region("y", rank, (0, height), n), "a@b", 0, 0, tuple((one * k, (one + 1) * k) for one in ranks))
            for rank in ranks
        ),
        operations=tuple(operations),
    )  # fmt: skip
    return planned(problem, schedule, {"tiles": TILE_KERNEL, "groups": LIBRARY}, config=config)


def gathered_beside(world_size: int, library_sms: int) -> Plan:
    """Library all-gathers on a side stream, and tiles that wait for each: so they must leave SMs to the library."""
    size, ranks = ROWS // world_size, tuple(range(world_size))
    half = size // 2
    tiles = -(-half // SMALL.config.block_m)
    operations: list[Operation] = []
    for rank in ranks:
        for at in range(2):
            shards = [(one * size + at * half, one * size + (at + 1) * half) for one in ranks]
            operations.append(
                Collective(
                    name=f"gather.{rank}.{at}", rank=rank, queue="gathers", function="all_gather", label=f"gather.{at}",
                    notifies=(Notify("arrived", rank, at),), ranks=ranks,
                    sources=(region("x", rank, (at * half, (at + 1) * half), K),),
                    destinations=tuple(region("gathered", rank, rows, K) for rows in shards),
                )
            )  # fmt: skip
        for at in range(2):
            rows = [(one * size + at * half, one * size + (at + 1) * half) for one in ranks]
            operations.append(
                Compute(
                    name=f"multiply.{rank}.{at}", rank=rank, queue="tiles", waits=(Wait("arrived", (at, at + 1), 1),),
                    a=tuple(region("gathered", rank, one, K) for one in rows), b=region("w", rank, (0, K), N),
                    out=tuple(region("y", rank, one, N) for one in rows), tiles=world_size * tiles,
                )
            )  # fmt: skip
    problem = problem_of("all_gather_matmul", world_size)
    schedule = Schedule(
        name="gathered_beside",
        world_size=world_size,
        buffers=(Buffer("x", size, K, "input"), Buffer("w", K, N, "input"), Buffer("gathered", ROWS, K, "local"),
                 Buffer("y", ROWS, N, "output")),
        pads=(SignalPad("arrived", 2),),
        queues=(Queue("tiles", "issue"), Queue("gathers", "complete")),
        given=given_of(problem),
        goal=tuple(Goal(region("y", rank, (0, ROWS), N), "a@b", 0, rank * N, ((0, K),)) for rank in ranks),
        operations=tuple(operations),
    )  # fmt: skip
    return planned(problem, schedule, {"tiles": TILE_KERNEL, "gathers": LIBRARY}, library_sms=library_sms)


def gathered_in_pairs(world_size: int, *, is_turned: bool = False) -> Plan:
    """The shards of neighbours, two and two: each pair is a group of its own. is_turned: its ranks descend."""
    operations, given, goal = [], [], []
    for rank in range(world_size):
        first = rank - rank % 2
        pair = tuple(range(first, min(first + 2, world_size)))[:: -1 if is_turned else 1]
        parts = tuple(region("y", rank, (4 * at, 4 * at + 4), 8) for at in range(len(pair)))
        operations.append(
            Collective(
                name=f"gather.{rank}", rank=rank, queue="main", function="all_gather", label=f"gather.{first}",
                ranks=pair, sources=(region("x", rank, (0, 4), 8),), destinations=parts,
            )
        )  # fmt: skip
        given.append(InitialContents(region("x", rank, (0, 4), 8), "a", 4 * rank, 0))
        goal += [Goal(part, "a", 4 * peer, 0) for part, peer in zip(parts, pair, strict=True)]
    schedule = Schedule(
        name="pairs", world_size=world_size, buffers=(Buffer("x", 4, 8, "input"), Buffer("y", 8, 8, "output")),
        queues=(Queue("main", "complete"),), given=tuple(given), goal=tuple(goal), operations=tuple(operations),
    )  # fmt: skip
    return planned(problem_of("", world_size), schedule, {"main": LIBRARY})


def problem_of(operator: str, world_size: int, sizes: Sizes = SMALL) -> Problem:
    return Problem(operator=operator, m=sizes.rows, n=sizes.n, k=sizes.k, world_size=world_size, dtype="float32")


def given_of(problem: Problem) -> tuple[InitialContents, ...]:
    """What the operator's record gives to every rank."""
    holdings = (one for rank in range(problem.world_size) for one in preconditions(problem, rank))
    return tuple(
        InitialContents(region(one.buffer, one.rank, (0, one.shape[0]), one.shape[1]), one.tensor, *one.at)
        for one in holdings
    )


def planned(
    problem: Problem,
    schedule: Schedule,
    engines: dict[str, Engine],
    *,
    config: MatmulConfig = SMALL.config,
    library_sms: int = 0,
) -> Plan:
    realization = Realization(
        dtype="float32",
        engines=tuple(EngineAssignment(queue, engine) for queue, engine in engines.items()),
        matmul=config if TILE_KERNEL in engines.values() else None,
        library_sms=library_sms,
        partial_sums="result",
    )
    tables = tile_orders(schedule, realization)
    return Plan(name=schedule.name, problem=problem, schedule=schedule, realization=realization, tile_orders=tables)
