"""Builds the Plan of an author's kernel: weaves its schedule, assigns engines to queues, orders each rank's tiles.

Within an Apply, tiles run in groups of blocks of the last but one axis, column by column, so that a wave reads few
blocks of either operand. The author's own order of tiles is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import cast, get_args

from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.ir.dtype import SUM_DTYPE, Dtype, MovedDtype
from overweave.ir.footprint import TileSpace
from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_KERNEL,
    COPY_WORD_BYTES,
    SPINNING,
    CopyConfig,
    Plan,
    Realization,
    ReduceConfig,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import Apply, Copy, Put, Range, Schedule, Wait
from overweave.ir.tensors import all_to_all_source
from overweave.ir.tile_order import APPLY, NO_SIGNAL, PART, WORKSPACE, TileOrder, TileRow
from overweave.ir.verify.rules.author_tables import slice_claims, source_of
from overweave.schedules.catalog.realized import assigned, packed_config
from overweave.schedules.communication import PACKED, PUSHES, SUMS, TILES
from overweave.schedules.records.record import MODEL_SMS
from overweave.schedules.tiles.order import copy_rows, tile_order
from overweave.schedules.weave.exchange import exchange
from overweave.schedules.weave.transports import SCATTER, ScheduleChoice, Transport, path_of_slices
from overweave.schedules.weave.weave import PlacedExchange, is_streamed, place_exchange, weave

TILE_GROUP = 8  # blocks of the last but one axis that run together, unless a call names another number

Waits = tuple[
    tuple[int, int, int], tuple[int, int]
]  # what a table row waits for: (low, high, count), and (one more signal, its count)


def author_plan(
    space: TileSpace,
    schedules: Mapping[str, ScheduleChoice],
    world_size: int,
    dtype: Dtype | Mapping[str, MovedDtype],
    rank: int | None = None,
    dual_source: str | None = None,
    tile_group: int = TILE_GROUP,
) -> Plan:
    """Return the plan that exchanges tensors as `schedules` says, tensor -> schedule. It is not yet proven.

    A pure function: all ranks build the same. dtype: of all exchanged tensors, or of each by name. rank: build only
    this rank's tile table. dual_source: the tensor whose own shard the kernel reads in place, in the caller's memory.
    tile_group: how many blocks of the last but one axis run together, column by column.
    Raises InputError for bad arguments, ScheduleError for a kernel that cannot be woven, or tiles that wait for more
    than a table row can say.
    """
    if not schedules:
        raise InputError(f"compile {space.kernel}", "no tensor is exchanged", "Name a schedule for one of its tensors")
    if type(tile_group) is not int or tile_group < 1:
        raise InputError(f"compile {space.kernel}", f"tile_group={tile_group}", "Give at least 1")
    if not space.tile_count:
        found = f"it has no tiles: {', '.join(f'{axis.name}={axis.extent}' for axis in space.grid)}"
        raise InputError(f"compile {space.kernel}", found, "There is nothing to compute without")
    unplaced = (exchange(space, tensor, choice, world_size) for tensor, choice in schedules.items())
    exchanges = tuple(place_exchange(one, space, one.operand.tensor == dual_source) for one in unplaced)
    _check_messages(exchanges)
    label = "+".join(str(choice).split()[0].split(".")[0] for choice in schedules.values())
    dtypes = dict.fromkeys(schedules, dtype) if isinstance(dtype, str) else dict(dtype)
    summed = [placed.operand.tensor for placed in exchanges if is_summed(placed.exchange.transport)]
    dtype = plan_dtype([dtypes[tensor] for tensor in (*summed, *schedules)])
    schedule = _with_dtypes(weave(f"{space.kernel}.{label}"[:64], space, exchanges, world_size), dtypes, dtype)
    sums = [operation for operation in schedule.operations if operation.queue == SUMS]
    is_early = any(operation.notifies for operation in sums)  # sums that peers wait for run beside the tiles
    realization = Realization(
        dtype=dtype,
        engines=tuple(assigned(queue, AUTHOR_KERNEL) for queue in schedule.queues),
        reduction=(ReduceConfig(programs=SPINNING) if is_early else ReduceConfig()) if sums else None,
        copy=_copy_config(exchanges) if any(queue.name == PUSHES for queue in schedule.queues) else None,
        slices=path_of_slices(schedules.values()) or "load_store",
        library_sms=max(placed.exchange.library_sms for placed in exchanges),
        partial_sums="result",  # the schedule that the author names says which sums travel, in the tensor's dtype
    )
    moved, ranks = exchanges[0].operand, range(world_size) if rank is None else (rank,)
    problem = Problem(operator=space.kernel, m=moved.rows, n=moved.cols, k=0, world_size=world_size, dtype=dtype)
    if any(queue.name == PACKED for queue in schedule.queues):
        realization = replace(realization, packed=packed_config(schedule, problem, MODEL_SMS))
    _check_row_alignment(schedule, realization)
    tiles = (space, exchanges, tile_group)
    return Plan(
        name=schedule.name,
        problem=problem,
        schedule=schedule,
        realization=realization,
        tile_orders=tuple(table for one in ranks for table in _tables(schedule, realization, tiles, one)),
    )


def _check_messages(exchanges: tuple[PlacedExchange, ...]) -> None:
    """Raise InputError if two tensors would go by packed (LL) messages: a kernel exchanges those of one."""
    queues = {one.operand.tensor: {queue.name for queue in one.exchange.communication.queues} for one in exchanges}
    packed = [tensor for tensor, names in queues.items() if PACKED in names]
    if len(packed) > 1:
        found = "one kernel exchanges the messages of a call, those of one tensor"
        raise InputError(f"exchange {' and '.join(packed)} by packed messages", found, "Use them for one of the two")


def is_summed(transport: Transport) -> bool:
    """Return whether the transport sums the tensor over ranks."""
    return transport.side == SCATTER and not transport.is_traded


def plan_dtype(dtypes: Iterable[MovedDtype]) -> Dtype:
    """Return the dtype of a plan whose tensors have these: the first that kernels compute in, else fp32."""
    return next((cast("Dtype", one) for one in dtypes if one in get_args(Dtype)), SUM_DTYPE)


def _with_dtypes(schedule: Schedule, dtypes: Mapping[str, MovedDtype], dtype: Dtype) -> Schedule:
    """Return the schedule with the dtype of each exchanged tensor's buffers, where it is not the plan's."""
    of = {name: each for name, each in dtypes.items() if each != dtype}
    buffers = (
        replace(one, dtype=of[all_to_all_source(one.name)]) if all_to_all_source(one.name) in of else one
        for one in schedule.buffers
    )
    return replace(schedule, buffers=tuple(buffers)) if of else schedule


def _check_row_alignment(schedule: Schedule, realization: Realization) -> None:
    """Raise InputError if a kernel would move rows that are no multiple of 16 bytes; the copy engine could."""
    row_bytes = {buffer.name: buffer.cols * buffer.itemsize_bytes(realization.dtype) for buffer in schedule.buffers}
    for move in schedule.operations:
        if isinstance(move, Put | Copy) and realization.engine_of(move.queue) in (COPY_KERNEL, AUTHOR_KERNEL):
            for region in (*move.reads, *move.writes):
                if row_bytes[region.buffer] % COPY_WORD_BYTES:
                    asked = f"carry {region.buffer.split('.')[0]} by a kernel"
                    found = (
                        f"its rows are {row_bytes[region.buffer]} bytes, and kernels move words of {COPY_WORD_BYTES}"
                    )
                    raise InputError(asked, found, "Use mover=copy_engine, or pad its rows")


def _copy_config(exchanges: tuple[PlacedExchange, ...]) -> CopyConfig:
    """Return the configuration of the copy kernel. Raises InputError if it would have to move two tensors."""
    movers = {one.operand.tensor: one.exchange.copy for one in exchanges if one.exchange.copy}
    configs = list(movers.values())
    if len({config.path for config in configs}) > 1:
        cure = "Let one kernel move both, or the copy engine one of them"
        raise InputError("move two tensors by kernels of their own", "one by loads and stores, one in bulk", cure)
    if len(movers) > 1:
        found, cure = "one kernel pushes, and it has one source", "Let the copy engine move one of them"
        raise InputError(f"move {' and '.join(movers)} by kernels of their own", found, cure)
    return max(configs, key=lambda config: config.programs)


def _tables(
    schedule: Schedule, realization: Realization, tiles: tuple[TileSpace, tuple[PlacedExchange, ...], int], rank: int
) -> Iterator[TileOrder]:
    """Yield a rank's tile tables: of the author's kernel, then of the reduction and copy kernels that the plan has."""
    space, exchanges, tile_group = tiles
    yield tile_table(schedule, space, exchanges, rank, tile_group)
    for queue, config in ((SUMS, realization.reduction), (PUSHES, realization.copy)):
        if config is not None:
            yield tile_order(schedule, realization, rank, queue)


def tile_table(
    schedule: Schedule, space: TileSpace, exchanges: tuple[PlacedExchange, ...], rank: int, tile_group: int = TILE_GROUP
) -> TileOrder:
    """Return the tile table of a rank's author kernel: tiles in the order of its Applies, loop rows, then slices."""
    first_signal = dict(
        zip((pad.name for pad in schedule.pads), accumulate((p.size for p in schedule.pads), initial=0), strict=False)
    )
    operations = [operation for operation in schedule.of_rank(rank) if operation.queue == TILES]
    applies = [operation for operation in operations if isinstance(operation, Apply)]
    homes = {buffer.name: buffer.home for buffer in schedule.buffers}
    rows: list[TileRow] = []
    slices: list[TileRow] = []
    for position, apply in enumerate(operations):
        if not isinstance(apply, Apply):
            slices += copy_rows(schedule, rank, position, apply)
            continue
        waits = _packed_waits(f"tile order of {apply.name}", apply.waits, first_signal)
        signals = [first_signal[notify.pad] + notify.signal for notify in apply.notifies] or [NO_SIGNAL]
        source, source_row = source_of(apply, homes)
        numbers = (number for lo, hi in apply.tiles for number in range(lo, hi))
        for number in sorted(numbers, key=lambda number: _launch_key(space, number, tile_group)):
            row = _row(APPLY, (number, number + 1), waits, signals[0], position)
            rows.append(row._replace(source=source, source_row=source_row, col=len(slices)))
    rows = [row._replace(**slice_claims(at, row, len(slices))) for at, row in enumerate(rows)]
    return TileOrder(rank, TILES, (*rows, *_loop_rows(space, exchanges, applies, first_signal), *slices))


def _row(kind: int, rows: Range, waits: Waits, signal: int, position: int) -> TileRow:
    return TileRow(kind, *rows, 0, WORKSPACE, 0, *waits[0], signal, position, *waits[1])


def _launch_key(space: TileSpace, number: int, tile_group: int) -> tuple[int, ...]:
    """Return the sort key of a tile: leading axes, group of the last but one axis, then column by column."""
    blocks: list[int] = []
    for axis in reversed(space.grid):
        number, block = divmod(number, axis.count)
        blocks.insert(0, block)
    if len(blocks) < 2:
        return tuple(blocks)
    *leading, row, col = blocks
    return (*leading, row // tile_group, col, row)


def _loop_rows(
    space: TileSpace, exchanges: tuple[PlacedExchange, ...], applies: list[Apply], first_signal: Mapping[str, int]
) -> Iterator[TileRow]:
    """Yield a row for each range of rows that tiles wait for inside their loop, with the waits of all tensors for it.

    Raises ScheduleError if tensors that are read together arrive in different ranges, or a range is no whole blocks.
    """
    rank = applies[0].rank
    counted = {(wait.pad, wait.signals): wait for apply in applies for wait in apply.late_waits}
    streamed = [
        one for one in exchanges if is_streamed(one, space) and any(chunk.waits for chunk in one.chunks.get(rank, []))
    ]
    for together in zip(*(one.chunks[rank] for one in streamed), strict=False):
        rows = together[0].rows
        waits = tuple(counted[wait.pad, wait.signals] for chunk in together for wait in chunk.waits)
        asked = f"read {', '.join(one.operand.tensor for one in streamed)} part by part on rank {rank}"
        if any(chunk.rows != rows for chunk in together) or len({len(one.chunks[rank]) for one in streamed}) > 1:
            raise ScheduleError(asked, "they arrive in other parts than each other", "Exchange them alike")
        block = space.entries(streamed[0].operand.dims[0])
        if rows[0] % block:
            found = f"rows [{rows[0]}:{rows[1]}] arrive together, but begin inside a block of {block}"
            raise ScheduleError(asked, found, "Let every shard be whole blocks of the axis")
        yield _row(PART, rows, _packed_waits(asked, waits, first_signal), NO_SIGNAL, 0)


def _packed_waits(subject: str, waits: tuple[Wait, ...], first_signal: Mapping[str, int]) -> Waits:
    """Pack waits into one range of signals and one more signal, all that a table row holds. Raises ScheduleError.

    Adjacent ranges with equal counts are merged.
    """
    each = sorted((first_signal[w.pad] + w.signals[0], first_signal[w.pad] + w.signals[1], w.count) for w in waits)
    merged: list[tuple[int, int, int]] = []
    for lo, hi, count in each:
        if merged and merged[-1][1:] == (lo, count):
            merged[-1] = (merged[-1][0], hi, count)
        else:
            merged.append((lo, hi, count))
    ranges = sorted(merged, key=_negative_length)
    if len(ranges) > 2 or any(hi - lo > 1 for lo, hi, _ in ranges[1:]):
        found = f"it waits for {', '.join(map(str, waits))}: more than a range and one signal"
        raise ScheduleError(subject, found, "Use another schedule, or fewer pieces")
    lo, hi, count = ranges[0] if ranges else (0, 0, 0)
    return (lo, hi, count), ((ranges[1][0], ranges[1][2]) if len(ranges) > 1 else (NO_SIGNAL, 0))


def _negative_length(signals: tuple[int, int, int]) -> int:
    return signals[0] - signals[1]
