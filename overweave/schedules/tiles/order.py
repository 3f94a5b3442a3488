"""The tables that kernels and simulator read: which tile runs when, what it waits for, what it announces.

The order of the schedule's Computes is kept: that is the rotation. Within a Compute tiles are grouped for L2: groups of
`group_m` tile rows, column by column, so that a wave reads few distinct rows of `a` and columns of `b`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.blocks import block_cells
from overweave.ir.plan import (
    COPY_KERNEL,
    KERNELS,
    REDUCE_KERNEL,
    TILE_KERNEL,
    MatmulConfig,
    Realization,
    ReduceConfig,
    narrow_width,
)
from overweave.ir.schedule import Buffer, Compute, Copy, Operation, Put, Range, Reduce, Region, Schedule, Wait
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import (
    COPY,
    MULTIPLY,
    NO_SIGNAL,
    OWN_SHARD,
    REDUCE,
    WORKSPACE,
    TileOrder,
    TileRow,
    outputs,
    ranks_to_notify,
    store_target,
)
from overweave.schedules.tiles.along_k import with_shares

BEHIND_SOURCE_ROW = TileRow._fields.index("source_row") + 1
EVEN_PIECES = "Use pieces=1, or pieces of equally many tiles; by hand, one range of signals and one signal at most"


class _Blocks(Struct, frozen=True):
    """A tile's extent and how many rows of tiles run together. matmul: whose tiles may be narrow."""

    block_m: int
    block_n: int
    group_m: int
    matmul: MatmulConfig | None = None


class _Context(Struct, frozen=True):
    """What a row needs to know of its schedule."""

    world_size: int
    first_signal: dict[str, int]
    homes: dict[str, str]
    # Signals that only the rank's own operations in these queues announce.
    announced_by: dict[tuple[str, int], set[str | None]]
    weights: tuple[str, ...]
    outs: dict[str, tuple[str, ...]]  # of each weight
    permuted: dict[str, Buffer]


def tile_orders(schedule: Schedule, realization: Realization, rank: int | None = None) -> tuple[TileOrder, ...]:
    """The tables of every kernel queue, of every rank or of one.

    Raises ScheduleError if an operation cannot be told in a table: more to wait for than a range of signals and one
    signal, a signal on another rank, or an operation that is not its kernel's.
    """
    ranks = range(schedule.world_size) if rank is None else (rank,)
    queues = [queue.name for queue in schedule.queues if realization.engine_of(queue.name) in KERNELS]
    return tuple(tile_order(schedule, realization, one, queue) for one in ranks for queue in queues)


def tile_order(schedule: Schedule, realization: Realization, rank: int, queue: str) -> TileOrder:
    """The table of one rank's kernel queue. Raises as `tile_orders` does."""
    context = _context(schedule, rank)
    after = next(candidate.after for candidate in schedule.queues if candidate.name == queue)
    engine = realization.engine_of(queue)
    matmul, reduction = realization.matmul or MatmulConfig(), realization.reduction or ReduceConfig()
    rows: list[TileRow] = []
    operations = (operation for operation in schedule.of_rank(rank) if operation.queue == queue)
    for position, operation in enumerate(operations):
        if engine == TILE_KERNEL and isinstance(operation, Compute):
            blocks = _Blocks(matmul.block_m, matmul.block_n, matmul.group_m, matmul)
            rows += _multiply_rows(operation, position, blocks, _duties(operation, context, after), context)
        elif engine == COPY_KERNEL and isinstance(operation, Put | Copy):
            rows += _copy_rows(operation, position, _duties(operation, context, after), context)
        elif engine == REDUCE_KERNEL and isinstance(operation, Reduce):
            blocks = _Blocks(reduction.block_m, reduction.block_n, 1)
            rows += _reduce_rows(operation, position, blocks, _duties(operation, context, after))
        else:
            raise ScheduleError(f"tile order of queue {queue}", f"{operation.name} is none of its tiles", "Move it")
    computes = [one for one in schedule.of_rank(rank) if isinstance(one, Compute)]
    if engine == TILE_KERNEL and matmul.split_k and computes:
        rows = with_shares(rows, matmul, computes[0].b.shape[0])
    return TileOrder(rank, queue, tuple(rows))


def copy_rows(schedule: Schedule, rank: int, position: int, move: Operation) -> tuple[TileRow, ...]:
    """The rows of a Put that stands among other operations of its queue. Raises as `tile_orders` does."""
    if not isinstance(move, Put):
        raise ScheduleError(f"tile order of {move.name}", "it is none of the kernel's tiles", "Move it")
    context = _context(schedule, rank)
    return tuple(_copy_rows(move, position, _duties(move, context, ()), context))


def tile_count(schedule: Schedule, realization: Realization) -> int:
    """How many rows the tables of all ranks would have, without making them; or more, if a rank has none."""
    matmul, reduction = realization.matmul or MatmulConfig(), realization.reduction or ReduceConfig()
    count = schedule.world_size * matmul.split_tiles * max(0, matmul.split_k - 1)
    for operation in schedule.operations:
        engine = realization.engine_of(operation.queue)
        if engine == COPY_KERNEL:
            count += operation.instances
        elif engine in KERNELS:
            blocks = matmul if engine == TILE_KERNEL else reduction
            stored = operation.out if isinstance(operation, Compute) else operation.writes
            shapes = (part.shape for part in stored)
            whole = sum(-(-rows // blocks.block_m) * -(-cols // blocks.block_n) for rows, cols in shapes)
            is_cut = engine == TILE_KERNEL and matmul.split_n > 1
            count += min(max(whole, operation.instances), matmul.split_n * whole) if is_cut else whole
    return count


def _context(schedule: Schedule, rank: int) -> _Context:
    starts = accumulate((pad.size for pad in schedule.pads), initial=0)
    announced_by: dict[tuple[str, int], set[str | None]] = {}
    for operation in schedule.operations:
        for notify in operation.notifies:
            if notify.rank == rank:
                queue = operation.queue if operation.rank == rank else None
                announced_by.setdefault((notify.pad, notify.signal), set()).add(queue)
    return _Context(
        schedule.world_size,
        {pad.name: start for pad, start in zip(schedule.pads, starts, strict=False)},
        {buffer.name: buffer.home for buffer in schedule.buffers},
        announced_by,
        schedule.weights,
        {weight: outputs(schedule, rank, weight) for weight in schedule.weights},
        {buffer.name: buffer for buffer in schedule.buffers if buffer.blocks},
    )


class _Duties(NamedTuple):
    """What every tile of an operation waits for and announces; see TileRow."""

    wait: tuple[int, int, int]
    also: tuple[int, int]
    signal: int


def _duties(operation: Operation, context: _Context, after: tuple[str, ...]) -> _Duties:
    """A range of signals, and one more signal with a count of its own, is all that a row can wait for."""
    waits = [wait for wait in operation.waits if not _is_implied(wait, context, after)]
    waits.sort(key=lambda wait: wait.signals[1] - wait.signals[0], reverse=True)
    more, signals = waits[1:], {context.first_signal[one.pad] + one.signal for one in operation.notifies}
    if len(more) > 1 or any(wait.signals[1] - wait.signals[0] > 1 for wait in more) or len(signals) > 1:
        found = "it waits for more than a range and one signal, or signals twice"
        raise ScheduleError(f"tile order of {operation.name}", found, EVEN_PIECES)
    told = [notify.rank for notify in operation.notifies]
    is_known = set(told) == _told(operation) or isinstance(operation, Reduce)  # sums tell any ranks
    if told and not (is_known and len(set(told)) == len(told)):
        raise ScheduleError(f"tile order of {operation.name}", "it signals a peer", "Let the copy engine announce it")
    first = context.first_signal
    ranges = [(first[w.pad] + w.signals[0], first[w.pad] + w.signals[1], w.count) for w in waits]
    return _Duties(
        wait=ranges[0] if ranges else (0, 0, 0),
        also=(ranges[1][0], ranges[1][2]) if more else (NO_SIGNAL, 0),
        signal=next(iter(signals), NO_SIGNAL),
    )


def _told(operation: Operation) -> set[int]:
    """Whom tiles tell that they are stored."""
    if isinstance(operation, Put):
        return {operation.peer}
    return ranks_to_notify(operation) if isinstance(operation, Compute) else {operation.rank}


def _is_implied(wait: Wait, context: _Context, after: tuple[str, ...]) -> bool:
    """Whether the kernels that must have ended before this one starts already announced all the wait asks for."""
    announcers = (context.announced_by.get((wait.pad, signal), {None}) for signal in range(*wait.signals))
    return all(queue in after for queues in announcers for queue in queues)


def _multiply_rows(
    compute: Compute, position: int, blocks: _Blocks, duties: _Duties, context: _Context
) -> list[TileRow]:
    """The Compute's instances beyond its tiles say how many of the last whole ones are cut."""
    if [part.shape[0] for part in compute.a] != [part.shape[0] for part in compute.out]:
        raise ScheduleError(f"tile order of {compute.name}", "rows of `a` and `out` differ", "Cut both alike")
    shared = _fields_of_product(compute, position, duties, context)
    rows: list[TileRow] = []
    for a, out in zip(compute.a, compute.out, strict=True):
        shared = shared._replace(source=OWN_SHARD if context.homes[a.buffer] == "input" else WORKSPACE)
        if out.buffer in context.permuted:
            rows += _stored_rows(shared, (compute, a, out), context.permuted[out.buffer], blocks.group_m)
        else:
            rows += _rows(shared, out, a.rows[0], blocks)
    config = blocks.matmul
    if config is None or config.split_n == 1:
        return rows
    return _with_last_cut(rows, (compute.tiles - len(rows)) // (config.split_n - 1), config)


def _shared_fields(kind: int, position: int, duties: _Duties) -> TileRow:
    """What the tiles of an operation have in common."""
    return TileRow(kind, 0, 0, 0, WORKSPACE, 0, *duties.wait, duties.signal, position, *duties.also)


def _fields_of_product(compute: Compute, position: int, duties: _Duties, context: _Context) -> TileRow:
    weight = context.weights.index(compute.b.buffer)
    into = context.outs[compute.b.buffer].index(compute.out[0].buffer) if compute.out else 0
    to = store_target(compute, context.world_size) if compute.out else 0
    if to is None:
        found, cure = f"it is stored at ranks {sorted(compute.stored_at)}", "Store at one rank, or at every rank"
        raise ScheduleError(f"tile order of {compute.name}", found, cure)
    shared = _shared_fields(MULTIPLY, position, duties)._replace(weight=weight, into=into, to=to)
    if not compute.addends:
        return shared
    late = _late(compute, context.first_signal)
    return shared._replace(place=compute.place, finishes=int(compute.finishes), **late)


def _stored_rows(
    shared: TileRow, part: tuple[Compute, Region, Region], buffer: Buffer, group_m: int
) -> Iterator[TileRow]:
    """The tiles of a part of a product whose blocks are permuted: each stores a whole cell of their stack."""
    compute, a, out = part
    blocks = buffer.blocks
    assert blocks is not None
    cells = block_cells(blocks, (buffer.rows, buffer.cols), (out.rows, out.cols))
    wide = max(1, -(-(out.cols[1] - out.cols[0]) // blocks.cols))
    bands = ((at // wide // group_m, cell.cols[0], cell.rows[0], cell) for at, cell in enumerate(cells))
    for _, _, _, cell in sorted(bands):
        row = cell.start // blocks.cols
        source_row, shift = a.rows[0] + cell.rows[0] - out.rows[0], compute.b.cols[0] + cell.cols[0] - out.cols[0]
        yield shared._replace(row=row, row_end=row + blocks.rows, source_row=source_row, shift=shift)


def _late(compute: Compute, first: dict[str, int]) -> dict[str, int]:
    """The one range of signals that a tile waits for before it adds. Raises ScheduleError for more."""
    if len(compute.late_waits) > 1:
        found = "it waits late for more than a range"
        raise ScheduleError(f"tile order of {compute.name}", found, "Give it one range of signals at most")
    for wait in compute.late_waits:
        lo, hi = (first[wait.pad] + signal for signal in wait.signals)
        return {"late_lo": lo, "late_hi": hi, "late_count": wait.count}
    return {}


def _with_last_cut(rows: list[TileRow], count: int, config: MatmulConfig) -> list[TileRow]:
    """The last `count` whole tiles as `split_n` each, behind the narrow ones among them, which take longer."""
    first = len(rows)
    narrow: list[TileRow] = []
    cut: list[TileRow] = []
    while first and len(cut) < count:
        first -= 1
        (narrow if rows[first].width else cut).append(rows[first])
    parts = (
        row._replace(col=row.col + left, width=config.part_n)
        for row in reversed(cut)
        for left in range(0, config.block_n, config.part_n)
    )
    return [*rows[:first], *reversed(narrow), *parts]


def _reduce_rows(reduce: Reduce, position: int, blocks: _Blocks, duties: _Duties) -> list[TileRow]:
    """`source_row` counts from the first row of every operand: their addresses stand beside the table."""
    shared = _shared_fields(REDUCE, position, duties)._replace(finishes=int(reduce.finishes))
    return _rows(shared, reduce.out, 0, blocks)


def _copy_rows(move: Put | Copy, position: int, duties: _Duties, context: _Context) -> Iterator[TileRow]:
    """One row for each of the tiles of a Put. What only waits is one row without rows."""
    wait, also, signal = duties
    if len(move.sources) > 1:
        found, cure = f"it moves {len(move.sources)} rectangles", "Give each a Put of its own"
        raise ScheduleError(f"tile order of {move.name}", found, cure)
    if not move.sources:
        yield TileRow(COPY, 0, 0, 0, WORKSPACE, 0, *wait, signal, position, *also)
    for source, target in zip(move.sources, move.destinations, strict=True):
        place = OWN_SHARD if context.homes[source.buffer] == "input" else WORKSPACE
        offset = source.rows[0] - target.rows[0]
        for lo, hi in tile_parts(target.rows, move.instances):
            yield TileRow(COPY, lo, hi, target.cols[0], place, lo + offset, *wait, signal, position, *also)


def _rows(shared: TileRow, out: Region, source_row: int, blocks: _Blocks) -> list[TileRow]:
    """A table has up to a million rows, and those of an operation differ in five fields of 27: no name is looked up."""
    kind, place, narrow = shared.kind, shared.source, blocks.matmul
    last_col = out.cols[1] - (out.cols[1] - out.cols[0] - 1) % blocks.block_n - 1
    last_width = narrow_width(out.cols[1] - last_col, narrow) if narrow else 0
    hi, offset = out.rows[1], source_row - out.rows[0]
    whole, last = (tuple(shared._replace(width=width))[BEHIND_SOURCE_ROW:] for width in (0, last_width))
    ends = {row: min(row + blocks.block_m, hi) for row in range(*out.rows, blocks.block_m)}
    tiles = swizzled(out.rows, out.cols, blocks.block_m, blocks.block_n, blocks.group_m)
    new = tuple.__new__
    return [
        new(TileRow, (kind, row, ends[row], col, place, row + offset, *(last if col == last_col else whole)))
        for row, col in tiles
    ]


def swizzled(rows: Range, cols: Range, block_m: int, block_n: int, group_m: int) -> Iterator[tuple[int, int]]:
    """First (row, column) of every tile of a rectangle: groups of `group_m` tile rows, each column by column."""
    group = block_m * group_m
    for first in range(rows[0], rows[1], group):
        together = range(first, min(first + group, rows[1]), block_m)
        for col in range(cols[0], cols[1], block_n):
            for row in together:
                yield row, col
