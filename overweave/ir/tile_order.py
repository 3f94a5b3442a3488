"""The table of tiles: a kernel's programs claim its rows one by one. Each row has the tile's waits and its signal."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from overweave.ir.schedule import Compute, Name, Schedule

MULTIPLY, REDUCE, COPY, APPLY, PART = 0, 1, 2, 3, 4
OWN_SHARD, WORKSPACE = 0, 1
NO_SIGNAL = -1
NO_ADDENDS = -1
ALL_RANKS = -1


class TileRow(NamedTuple):
    """One tile. Rows and columns count elements; a tile never spans two chunks, so `row_end` may cut it short.

    kind: MULTIPLY, REDUCE or COPY.     row, row_end, col: what it computes or moves, in its output buffer.
    source: OWN_SHARD or WORKSPACE.     source_row: where its rows start in the buffer it reads (MULTIPLY, COPY), or
    counted from the first row of each operand of its operation (REDUCE).
    wait_lo, wait_hi, wait_count: the signals of the own rank it waits for (none if wait_lo == wait_hi).
    signal: the signal it adds one to, or NO_SIGNAL: on the own rank, on the peer that a COPY writes to, or on each rank
    that the operation of a REDUCE notifies.
    also, also_count: one more signal it waits for, with its own count, or NO_SIGNAL.
    width: its columns, if they are fewer than the kernel's tile has (MatmulConfig.split_n); 0: a whole tile.
    place: how many addends stand before its product, or NO_ADDENDS (MULTIPLY). They have the rows and columns of the
    result; their addresses stand beside the table. late_lo, late_hi, late_count: the signals it waits for before them.
    weight: by which of the schedule's weights it multiplies (Schedule.weights), and so which output it writes.
    finishes: 1 if its sum is whole, and the epilogue of sums is applied to it (Compute.finishes, Reduce.finishes).
    to: the rank where a product is stored and notified, relative to the own rank, modulo the group (0: here); or
    ALL_RANKS, and the peers are notified (MULTIPLY). The same rows and columns, the same signal; of the same buffer,
    or, if stored on all ranks, of one buffer for all peers.
    into: of the outputs of that weight, in the order of their first Computes, the one it writes: 0 or 1.
    shift: by how many columns those of its weight lie further than those of its result (MULTIPLY): where blocks are
    permuted, `row` and `col` are of the stack of their cells, and a tile is a whole cell.
    operation: position of its operation among those of the rank and queue, for traces and reports.
    APPLY: `row` is the tile's number in the author's kernel; `col`: how many slices are to be claimed before it waits,
    `width`: 1 if it claims any, at least one. Slices are COPY rows behind all others. PART: not a tile, but rows
    `[row, row_end)` of a late need, with the waits before they are read; parts stand behind all tiles.
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
    width: int = 0
    place: int = NO_ADDENDS
    late_lo: int = 0
    late_hi: int = 0
    late_count: int = 0
    weight: int = 0
    into: int = 0
    finishes: int = 0
    to: int = 0
    shift: int = 0


class TileOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of one rank's kernel queue, in the order in which programs claim them."""

    rank: int
    queue: Name
    rows: tuple[TileRow, ...]


def outputs(schedule: Schedule, rank: int, weight: str) -> tuple[str, ...]:
    """Return the buffers into which a rank's products by a weight go, in the order of its Computes."""
    computes = (operation for operation in schedule.of_rank(rank) if isinstance(operation, Compute))
    return tuple(dict.fromkeys(part.buffer for each in computes if each.b.buffer == weight for part in each.out))


def store_target(compute: Compute, world_size: int) -> int | None:
    """Return `TileRow.to` of a Compute's tiles; None if no row can express the ranks where it stores."""
    ranks = compute.stored_at
    if len(ranks) == 1:
        return (ranks.pop() - compute.rank) % world_size
    return ALL_RANKS if len(ranks) == world_size else None


def ranks_to_notify(compute: Compute) -> set[int]:
    """Return the ranks that a Compute's tiles notify: the one where they store, or, if they store on all, the peers."""
    ranks = compute.stored_at
    return ranks if len(ranks) == 1 else ranks - {compute.rank}
