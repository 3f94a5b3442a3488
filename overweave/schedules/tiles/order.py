"""Tile tables: the order in which a kernel runs its tiles, which signals each waits for, and which it notifies.

Kernels and the simulator read them. Tiles follow the order of the schedule's Computes, which holds the rotation over
peers. Tiles of one Compute are swizzled for L2: groups of `group_m` tile rows, column by column, so that a wave reads
few distinct rows of `a` and columns of `b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

BEHIND_SOURCE_ROW = TileRow._fields.index("source_row") + 1
EVEN_PIECES = "Use pieces=1, or pieces of equally many tiles; by hand, one range of signals and one signal at most"


class _Blocks(Struct, frozen=True):
    """The tile shape, and how many tile rows a swizzle group has. matmul: set if its last tiles may be narrower."""

    block_m: int
    block_n: int
    group_m: int
    matmul: MatmulConfig | None = None


class _Context(Struct, frozen=True):
    """Lookups of a schedule for the rows of one rank's tables.

    first_signal: pad -> the index of its first signal. homes: buffer -> input, symmetric, ... notified_by: signal ->
    the queues of this rank that notify it, None for another rank. outs: weight -> its outputs. permuted: buffer of
    permuted blocks -> its declaration.
    """

    world_size: int
    first_signal: dict[str, int]
    homes: dict[str, str]
    notified_by: dict[tuple[str, int], set[str | None]]
    weights: tuple[str, ...]
    outs: dict[str, tuple[str, ...]]
    permuted: dict[str, Buffer]


def tile_orders(schedule: Schedule, realization: Realization, ranks: Sequence[int] = ()) -> tuple[TileOrder, ...]:
    """Return the tables of all kernel queues, of every rank or of some.

    Raises ScheduleError for an operation that does not fit a row: it waits for more than a range of signals and one
    signal, notifies another rank, or does not belong to its queue's kernel.
    """
    ranks = ranks or range(schedule.world_size)
    queues = [queue.name for queue in schedule.queues if realization.engine_of(queue.name) in KERNELS]
    return tuple(tile_order(schedule, realization, one, queue) for one in ranks for queue in queues)


def tile_order(schedule: Schedule, realization: Realization, rank: int, queue: str) -> TileOrder:
    """Return the table of one rank's kernel queue. Raises as `tile_orders` does."""
    context = _context(schedule, rank)
    after = next(candidate.after for candidate in schedule.queues if candidate.name == queue)
    engine = realization.engine_of(queue)
    matmul, reduction = realization.matmul or MatmulConfig(), realization.reduction or ReduceConfig()
    rows: list[TileRow] = []
    operations = (operation for operation in schedule.of_rank(rank) if operation.queue == queue)
    for position, operation in enumerate(operations):
        if engine == TILE_KERNEL and isinstance(operation, Compute):
            blocks = _Blocks(matmul.block_m, matmul.block_n, matmul.group_m, matmul)
            rows += _multiply_rows(operation, position, blocks, _signals(operation, context, after), context)
        elif engine == COPY_KERNEL and isinstance(operation, Put | Copy):
            rows += _copy_rows(operation, position, _signals(operation, context, after), context)
        elif engine == REDUCE_KERNEL and isinstance(operation, Reduce):
            blocks = _Blocks(reduction.block_m, reduction.block_n, 1)
            rows += _reduce_rows(operation, position, blocks, _signals(operation, context, after))
        else:
            raise ScheduleError(f"tile order of queue {queue}", f"{operation.name} is none of its tiles", "Move it")
    return TileOrder(rank, queue, tuple(rows))


def copy_rows(schedule: Schedule, rank: int, position: int, move: Operation) -> tuple[TileRow, ...]:
    """Return the rows of one Put of a queue that holds other operations as well. Raises as `tile_orders` does."""
    if not isinstance(move, Put):
        raise ScheduleError(f"tile order of {move.name}", "it is none of the kernel's tiles", "Move it")
    context = _context(schedule, rank)
    return tuple(_copy_rows(move, position, _signals(move, context, ()), context))


def tile_count(schedule: Schedule, realization: Realization) -> int:
    """Return an upper bound of the rows of all ranks' tables without making them; exact if every rank has rows."""
    matmul, reduction = realization.matmul or MatmulConfig(), realization.reduction or ReduceConfig()
    count = 0
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
    """Return the lookups for the tables of a rank."""
    starts = accumulate((pad.size for pad in schedule.pads), initial=0)
    notified_by: dict[tuple[str, int], set[str | None]] = {}
    for operation in schedule.operations:
        for notify in operation.notifies:
            if notify.rank == rank:
                queue = operation.queue if operation.rank == rank else None
                notified_by.setdefault((notify.pad, notify.signal), set()).add(queue)
    return _Context(
        schedule.world_size,
        {pad.name: start for pad, start in zip(schedule.pads, starts, strict=False)},
        {buffer.name: buffer.home for buffer in schedule.buffers},
        notified_by,
        schedule.weights,
        {weight: outputs(schedule, rank, weight) for weight in schedule.weights},
        {buffer.name: buffer for buffer in schedule.buffers if buffer.blocks},
    )


class _Signals(NamedTuple):
    """The signals that every tile of an operation waits for and notifies; see TileRow."""

    wait: tuple[int, int, int]
    also: tuple[int, int]
    signal: int


def _signals(operation: Operation, context: _Context, after: tuple[str, ...]) -> _Signals:
    """Return the signals of an operation's rows. A row waits for one range of signals, and one more signal that has a
    count of its own. Raises ScheduleError for an operation that needs more."""
    waits = [wait for wait in operation.waits if not _is_implied(wait, context, after)]
    waits.sort(key=lambda wait: wait.signals[1] - wait.signals[0], reverse=True)
    more, signals = waits[1:], {context.first_signal[one.pad] + one.signal for one in operation.notifies}
    if len(more) > 1 or any(wait.signals[1] - wait.signals[0] > 1 for wait in more) or len(signals) > 1:
        found = "it waits for more than a range and one signal, or signals twice"
        raise ScheduleError(f"tile order of {operation.name}", found, EVEN_PIECES)
    notified = [notify.rank for notify in operation.notifies]
    may_notify = set(notified) == _notified_ranks(operation) or isinstance(operation, Reduce)  # sums notify any ranks
    if notified and not (may_notify and len(set(notified)) == len(notified)):
        raise ScheduleError(f"tile order of {operation.name}", "it signals a peer", "Let the copy engine announce it")
    first = context.first_signal
    ranges = [(first[w.pad] + w.signals[0], first[w.pad] + w.signals[1], w.count) for w in waits]
    return _Signals(
        wait=ranges[0] if ranges else (0, 0, 0),
        also=(ranges[1][0], ranges[1][2]) if more else (NO_SIGNAL, 0),
        signal=next(iter(signals), NO_SIGNAL),
    )


def _notified_ranks(operation: Operation) -> set[int]:
    """Return the ranks that the tiles of an operation notify once they are stored."""
    if isinstance(operation, Put):
        return {operation.peer}
    return ranks_to_notify(operation) if isinstance(operation, Compute) else {operation.rank}


def _is_implied(wait: Wait, context: _Context, after: tuple[str, ...]) -> bool:
    """Return whether kernels that end before this one starts notify all signals of the wait."""
    notifiers = (context.notified_by.get((wait.pad, signal), {None}) for signal in range(*wait.signals))
    return all(queue in after for queues in notifiers for queue in queues)


def _multiply_rows(
    compute: Compute, position: int, blocks: _Blocks, signals: _Signals, context: _Context
) -> list[TileRow]:
    """Return the rows of a Compute. It has more instances than tiles if the last whole tiles are cut in `split_n`."""
    if [part.shape[0] for part in compute.a] != [part.shape[0] for part in compute.out]:
        raise ScheduleError(f"tile order of {compute.name}", "rows of `a` and `out` differ", "Cut both alike")
    shared = _fields_of_product(compute, position, signals, context)
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


def _shared_fields(kind: int, position: int, signals: _Signals) -> TileRow:
    """Return a row with the fields that all tiles of an operation share."""
    return TileRow(kind, 0, 0, 0, WORKSPACE, 0, *signals.wait, signals.signal, position, *signals.also)


def _fields_of_product(compute: Compute, position: int, signals: _Signals, context: _Context) -> TileRow:
    """Return a row with the fields that all tiles of a Compute share. Raises ScheduleError for unsupported stores."""
    weight = context.weights.index(compute.b.buffer)
    into = context.outs[compute.b.buffer].index(compute.out[0].buffer) if compute.out else 0
    to = store_target(compute, context.world_size) if compute.out else 0
    if to is None:
        found, cure = f"it is stored at ranks {sorted(compute.stored_at)}", "Store at one rank, or at every rank"
        raise ScheduleError(f"tile order of {compute.name}", found, cure)
    shared = _shared_fields(MULTIPLY, position, signals)._replace(weight=weight, into=into, to=to)
    if not compute.addends:
        return shared
    late = _late(compute, context.first_signal)
    return shared._replace(place=compute.place, finishes=int(compute.finishes), **late)


def _stored_rows(
    shared: TileRow, part: tuple[Compute, Region, Region], buffer: Buffer, group_m: int
) -> Iterator[TileRow]:
    """Yield the rows of a part of a product whose blocks are permuted: each tile stores a whole cell of the stack."""
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
    """Return the fields of the range of signals that a tile waits for before it adds. Raises ScheduleError for more
    than one range."""
    if len(compute.late_waits) > 1:
        found = "it waits late for more than a range"
        raise ScheduleError(f"tile order of {compute.name}", found, "Give it one range of signals at most")
    for wait in compute.late_waits:
        lo, hi = (first[wait.pad] + signal for signal in wait.signals)
        return {"late_lo": lo, "late_hi": hi, "late_count": wait.count}
    return {}


def _with_last_cut(rows: list[TileRow], count: int, config: MatmulConfig) -> list[TileRow]:
    """Cut each of the last `count` whole tiles in `split_n`, behind the narrow tiles among them, which take longer."""
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


def _reduce_rows(reduce: Reduce, position: int, blocks: _Blocks, signals: _Signals) -> list[TileRow]:
    """Return the rows of a Reduce. `source_row` counts from the first row of each operand; addresses are arguments."""
    shared = _shared_fields(REDUCE, position, signals)._replace(finishes=int(reduce.finishes))
    return _rows(shared, reduce.out, 0, blocks)


def _copy_rows(move: Put | Copy, position: int, signals: _Signals, context: _Context) -> Iterator[TileRow]:
    """Yield one row for each tile of a Put; for a Put without data, one row that only waits and notifies."""
    wait, also, signal = signals
    if len(move.sources) > 1:
        found, cure = f"it moves {len(move.sources)} rectangles", "Give each a Put of its own"
        raise ScheduleError(f"tile order of {move.name}", found, cure)
    if not move.sources:
        yield TileRow(COPY, 0, 0, 0, WORKSPACE, 0, *wait, signal, position, *also)
    for source, target in zip(move.sources, move.destinations, strict=True):
        source_kind = OWN_SHARD if context.homes[source.buffer] == "input" else WORKSPACE
        offset = source.rows[0] - target.rows[0]
        for lo, hi in tile_parts(target.rows, move.instances):
            yield TileRow(COPY, lo, hi, target.cols[0], source_kind, lo + offset, *wait, signal, position, *also)


def _rows(shared: TileRow, out: Region, source_row: int, blocks: _Blocks) -> list[TileRow]:
    """Return the rows of a rectangle of tiles.

    A table has up to a million rows, which differ in five of 27 fields: so tuples are made without lookups of names.
    """
    kind, source_kind, narrow = shared.kind, shared.source, blocks.matmul
    last_col = out.cols[1] - (out.cols[1] - out.cols[0] - 1) % blocks.block_n - 1
    last_width = narrow_width(out.cols[1] - last_col, narrow) if narrow else 0
    hi, offset = out.rows[1], source_row - out.rows[0]
    whole, last = (tuple(shared._replace(width=width))[BEHIND_SOURCE_ROW:] for width in (0, last_width))
    ends = {row: min(row + blocks.block_m, hi) for row in range(*out.rows, blocks.block_m)}
    tiles = swizzled(out.rows, out.cols, blocks.block_m, blocks.block_n, blocks.group_m)
    new = tuple.__new__
    return [
        new(TileRow, (kind, row, ends[row], col, source_kind, row + offset, *(last if col == last_col else whole)))
        for row, col in tiles
    ]


def swizzled(rows: Range, cols: Range, block_m: int, block_n: int, group_m: int) -> Iterator[tuple[int, int]]:
    """Yield the first (row, column) of every tile of a rectangle: groups of `group_m` tile rows, column by column."""
    group = block_m * group_m
    for first in range(rows[0], rows[1], group):
        together = range(first, min(first + group, rows[1]), block_m)
        for col in range(cols[0], cols[1], block_n):
            for row in together:
                yield row, col
