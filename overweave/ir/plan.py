"""The Plan: a Schedule, the hardware that realizes it, and the table that says which tile runs when.

Every method is a Plan; the tuner chooses among Plans and nothing else in the library chooses anything.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from overweave.ir.schedule import Count, Name, Schedule

Dtype = Literal["bfloat16", "float16", "float32"]
ITEMSIZE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PowerOfTwo = Annotated[int, Meta(ge=1, le=1024)]

COPY_ENGINE, LIBRARY, TILE_KERNEL, REDUCE_KERNEL = "copy_engine", "library", "tile_kernel", "reduce_kernel"
Engine = Literal["copy_engine", "library", "tile_kernel", "reduce_kernel"]


class Problem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of an operator, as every rank sees it: the global matmul `[m, k] @ [k, n]` of one rank.

    all_gather_matmul: `m` rows after the gather, `n` columns and all `k` on each rank.
    matmul_reduce_scatter: `m` rows before the scatter, `n` columns, `k` the own part of the reduced axis.
    b_is_transposed: the weight lies in memory as `[n, k]`.
    """

    operator: Name
    m: Annotated[int, Meta(ge=0)]
    n: Annotated[int, Meta(ge=0)]
    k: Annotated[int, Meta(ge=0)]
    world_size: Count
    dtype: Dtype
    b_is_transposed: bool = False
    returns_gathered: bool = False


class MatmulConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of a tile kernel. group_m: tile rows that run together, to reuse `b` in L2.

    kernel: `portable` runs on every GPU that Triton knows and under the interpreter; `hopper` needs sm_90 and 16-bit
    numbers, and has its own warps (three groups), whatever `warps` says.
    """

    kernel: Literal["portable", "hopper"] = "portable"
    block_m: PowerOfTwo = 128
    block_n: PowerOfTwo = 256
    block_k: PowerOfTwo = 64
    group_m: Count = 8
    stages: Count = 3
    warps: Count = 8


class ReduceConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tile shape and launch of the ordered reduction. programs: how many blocks it may hold while it waits."""

    block_m: PowerOfTwo = 8
    block_n: PowerOfTwo = 1024
    warps: Count = 8
    programs: Count = 528


class Assignment(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine that runs a queue."""

    queue: Name
    engine: Engine


class Realization(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which hardware runs each queue, and with which kernels.

    copy_engine: Puts and Gets, without SMs. library: torch and NCCL calls on the caller's stream, in order.
    tile_kernel: all Computes of the queue in one launch. reduce_kernel: all Reduces of the queue in one launch.
    """

    dtype: Dtype
    engines: tuple[Assignment, ...]
    matmul: MatmulConfig | None = None
    reduction: ReduceConfig | None = None

    def engine_of(self, queue: str) -> Engine:
        """The engine of a queue. Raises KeyError."""
        for assignment in self.engines:
            if assignment.queue == queue:
                return assignment.engine
        raise KeyError(queue)


MULTIPLY, REDUCE = 0, 1
OWN_SHARD, WORKSPACE = 0, 1
NO_SIGNAL = -1


class TileRow(NamedTuple):
    """One tile. Rows and columns count elements; a tile never straddles a chunk, so `row_end` may cut it short.

    kind: MULTIPLY or REDUCE.           row, row_end, col: what it computes, in its output buffer.
    source: OWN_SHARD or WORKSPACE.     source_row: where its rows start in the buffer it reads (MULTIPLY), or counted
    from the first row of each operand of its operation (REDUCE).
    wait_lo, wait_hi, wait_count: the signals of the own rank it waits for (none if wait_lo == wait_hi).
    signal: the signal of the own rank it adds one to, or NO_SIGNAL.
    also, also_count: one more signal it waits for, with its own count, or NO_SIGNAL.
    operation: position of its operation among those of the rank and queue, for traces and reports.
    Signals are numbered through all pads of the schedule, in the order of `Schedule.pads`.
    """

    kind: int
    row: int
    row_end: int
    col: int
    source: int
    source_row: int
    wait_lo: int
    wait_hi: int
    wait_count: int
    signal: int
    operation: int
    also: int = NO_SIGNAL
    also_count: int = 0


class TileOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of one rank's kernel queue, in the order in which programs claim them."""

    rank: int
    queue: Name
    rows: tuple[TileRow, ...]


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that decides how one call runs. `tile_orders`: one per rank and kernel queue."""

    name: Name
    problem: Problem
    schedule: Schedule
    realization: Realization
    tile_orders: tuple[TileOrder, ...] = ()

    def tile_order(self, rank: int, queue: str) -> TileOrder:
        """The table of a rank's kernel queue. Raises KeyError."""
        for order in self.tile_orders:
            if order.rank == rank and order.queue == queue:
                return order
        raise KeyError((rank, queue))
