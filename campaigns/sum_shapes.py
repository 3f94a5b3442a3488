"""Plans whose sums run in other shapes of the reduction kernel than the catalog's, for a campaign to compare them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from overweave.ir.plan import Plan, Problem, ReduceConfig
from overweave.ir.schedule import Operation, Reduce
from overweave.schedules.catalog import build
from overweave.schedules.tile_order import tile_orders
from overweave.schedules.woven_frame import counted

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
BLOCKS = ((8, 1024, 8), (4, 1024, 8), (2, 1024, 8), (4, 1024, 4), (2, 1024, 4), (1, 1024, 4))  # rows, columns, warps
PROGRAMS = (132, 264, 528, 1056)


class Sums(NamedTuple):
    """What is summed, and by which plan. rows: of a rank's partial."""

    plan: str
    rows: int
    cols: int = 4096
    pieces: int = 0

    def __str__(self) -> str:
        return f"{self.plan}{f' pieces={self.pieces}' * bool(self.pieces)} [{self.rows}, {self.cols}]"

    def build(self, world_size: int) -> Plan:
        """Its product is as small as one can be: only the sums are looked at."""
        operator = self.plan.split(".")[0]
        problem = Problem(operator=operator, m=self.rows, n=self.cols, k=16, world_size=world_size, dtype="bfloat16")
        return build(self.plan, problem, {"pieces": self.pieces} if self.pieces else {})


# Operands at peers, sums for oneself; two shots, whose second waits for the first; operands that are all here.
CASES = (
    Sums(f"{SCATTER}.pull", 1024),
    Sums(f"{SCATTER}.pull", 8192),
    *(Sums(f"{REDUCE}.two_shot", rows, pieces=pieces) for rows in (256, 1024) for pieces in (1, 2, 4)),
    Sums(f"{REDUCE}.two_shot", 4096, pieces=4),
    Sums(f"{REDUCE}.one_shot", 2048),
)


def shapes(blocks: tuple[tuple[int, int, int], ...] = BLOCKS) -> Iterator[ReduceConfig]:
    """Every block with every number of programs."""
    for block_m, block_n, warps in blocks:
        for programs in PROGRAMS:
            yield ReduceConfig(block_m=block_m, block_n=block_n, warps=warps, programs=programs)


def with_sums(plan: Plan, config: ReduceConfig, rank: int | None = None) -> Plan:
    """The plan with its sums in this shape. rank: with this rank's tables only."""
    operations = tuple(_with_tiles(operation, config) for operation in plan.schedule.operations)
    schedule = replace(plan.schedule, operations=counted(operations))
    realization = replace(plan.realization, reduction=config)
    return replace(
        plan, schedule=schedule, realization=realization, tile_orders=tile_orders(schedule, realization, rank)
    )


def _with_tiles(operation: Operation, config: ReduceConfig) -> Operation:
    if not isinstance(operation, Reduce) or not operation.notifies:
        return operation
    rows, cols = operation.out.shape
    return replace(operation, tiles=-(-rows // config.block_m) * -(-cols // config.block_n))
