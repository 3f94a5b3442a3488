"""A woven schedule as a Plan: the engine of every queue, and the table of each rank's tiles.

Within an Apply, tiles run in groups of rows of the last two axes, so that a wave reads few rows of either side. Which
tile runs when is the table's affair alone: the author's own order of tiles is not kept.
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
from overweave.schedules.weave.weave import PlacedExchange, bound, is_streamed, weave

TILE_GROUP = 8  # blocks of the last but one axis that run together, unless a call names another number

Waits = tuple[tuple[int, int, int], tuple[int, int]]  # a range with its count, one more signal with its own


def author_plan(
    space: TileSpace,
    wanted: Mapping[str, ScheduleChoice],
    world_size: int,
    dtype: Dtype | Mapping[str, MovedDtype],
    rank: int | None = None,
    chosen: str | None = None,
    tile_group: int = TILE_GROUP,
) -> Plan:
    """The plan that exchanges tensors as `wanted` says, tensor -> schedule. A pure function: all ranks build the same.

    dtype: of the tensors that are exchanged, or of each. rank: build only this rank's table. chosen: whose own shard
    the kernel can read where the caller has it. tile_group: how many blocks of the last but one axis run together,
    column by column. The plan is not yet proven.
    Raises InputError for what is asked, ScheduleError for what cannot be woven or told in a table.
    """
    if not wanted:
        raise InputError(f"compile {space.kernel}", "no tensor is exchanged", "Name a schedule for one of its tensors")
    if type(tile_group) is not int or tile_group < 1:
        raise InputError(f"compile {space.kernel}", f"tile_group={tile_group}", "Give at least 1")
    if not space.tile_count:
        found = f"it has no tiles: {', '.join(f'{axis.name}={axis.extent}' for axis in space.grid)}"
        raise InputError(f"compile {space.kernel}", found, "There is nothing to compute without")
    exchanges = (exchange(space, tensor, words, world_size) for tensor, words in wanted.items())
    bounds = tuple(bound(one, space, one.operand.tensor == chosen) for one in exchanges)
    _check_messages(bounds)
    asked = "+".join(str(words).split()[0].split(".")[0] for words in wanted.values())
    dtypes = dict.fromkeys(wanted, dtype) if isinstance(dtype, str) else dict(dtype)
    summed = [one.operand.tensor for one in bounds if is_summed(one.exchange.transport)]
    dtype = plan_dtype([dtypes[tensor] for tensor in (*summed, *wanted)])
    schedule = _typed(weave(f"{space.kernel}.{asked}"[:64], space, bounds, world_size), dtypes, dtype)
    sums = [one for one in schedule.operations if one.queue == SUMS]
    is_early = any(one.notifies for one in sums)  # some sums are passed on while tiles are computed
    realization = Realization(
        dtype=dtype,
        engines=tuple(assigned(queue, AUTHOR_KERNEL) for queue in schedule.queues),
        reduction=(ReduceConfig(programs=SPINNING) if is_early else ReduceConfig()) if sums else None,
        copy=_copy_config(bounds) if any(queue.name == PUSHES for queue in schedule.queues) else None,
        slices=path_of_slices(wanted.values()) or "load_store",
        library_sms=max(one.exchange.library_sms for one in bounds),
        partial_sums="result",  # the schedule that the author names says which sums travel, in the tensor's dtype
    )
    moved, ranks = bounds[0].operand, range(world_size) if rank is None else (rank,)
    problem = Problem(operator=space.kernel, m=moved.rows, n=moved.cols, k=0, world_size=world_size, dtype=dtype)
    if any(queue.name == PACKED for queue in schedule.queues):
        realization = replace(realization, packed=packed_config(schedule, problem, MODEL_SMS))
    _check_words(schedule, realization)
    tiles = (space, bounds, tile_group)
    return Plan(
        name=schedule.name,
        problem=problem,
        schedule=schedule,
        realization=realization,
        tile_orders=tuple(table for one in ranks for table in _tables(schedule, realization, tiles, one)),
    )


def _check_messages(bounds: tuple[PlacedExchange, ...]) -> None:
    """Raises InputError for two tensors that one kernel would exchange by packed messages."""
    queues = {one.operand.tensor: {queue.name for queue in one.exchange.communication.queues} for one in bounds}
    packed = [tensor for tensor, names in queues.items() if PACKED in names]
    if len(packed) > 1:
        found = "one kernel exchanges the messages of a call, those of one tensor"
        raise InputError(f"exchange {' and '.join(packed)} by packed messages", found, "Use them for one of the two")


def is_summed(transport: Transport) -> bool:
    """Whether ranks add what they have of a tensor."""
    return transport.side == SCATTER and not transport.is_traded


def plan_dtype(dtypes: Iterable[MovedDtype]) -> Dtype:
    """In which a plan reckons whose tensors have these: the first that is no dtype of what is only moved."""
    return next((cast("Dtype", one) for one in dtypes if one in get_args(Dtype)), SUM_DTYPE)


def _typed(schedule: Schedule, dtypes: Mapping[str, MovedDtype], dtype: Dtype) -> Schedule:
    """With the dtype of each buffer of an exchanged tensor that is not the plan's."""
    of = {name: each for name, each in dtypes.items() if each != dtype}
    buffers = (
        replace(one, dtype=of[all_to_all_source(one.name)]) if all_to_all_source(one.name) in of else one
        for one in schedule.buffers
    )
    return replace(schedule, buffers=tuple(buffers)) if of else schedule


def _check_words(schedule: Schedule, realization: Realization) -> None:
    """Kernels move rows in whole words: told here, while another back end can still be asked for. Raises InputError."""
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


def _copy_config(bounds: tuple[PlacedExchange, ...]) -> CopyConfig:
    """Of the one kernel that moves chunks, of one tensor: SMs for the most that is asked."""
    movers = {one.operand.tensor: one.exchange.copy for one in bounds if one.exchange.copy}
    asked = list(movers.values())
    if len({config.path for config in asked}) > 1:
        cure = "Let one kernel move both, or the copy engine one of them"
        raise InputError("move two tensors by kernels of their own", "one by loads and stores, one in bulk", cure)
    if len(movers) > 1:
        found, cure = "one kernel pushes, and it has one source", "Let the copy engine move one of them"
        raise InputError(f"move {' and '.join(movers)} by kernels of their own", found, cure)
    return max(asked, key=lambda config: config.programs)


def _tables(
    schedule: Schedule, realization: Realization, tiles: tuple[TileSpace, tuple[PlacedExchange, ...], int], rank: int
) -> Iterator[TileOrder]:
    space, bounds, tile_group = tiles
    yield tile_table(schedule, space, bounds, rank, tile_group)
    for queue, config in ((SUMS, realization.reduction), (PUSHES, realization.copy)):
        if config is not None:
            yield tile_order(schedule, realization, rank, queue)


def tile_table(
    schedule: Schedule, space: TileSpace, bounds: tuple[PlacedExchange, ...], rank: int, tile_group: int = TILE_GROUP
) -> TileOrder:
    """The tiles of a rank in the order of its Applies, then the parts of what is read part by part."""
    first = dict(
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
        waits = _told(f"tile order of {apply.name}", apply.waits, first)
        signals = [first[notify.pad] + notify.signal for notify in apply.notifies] or [NO_SIGNAL]
        source, source_row = source_of(apply, homes)
        numbers = (number for lo, hi in apply.tiles for number in range(lo, hi))
        for number in sorted(numbers, key=lambda number: _turn(space, number, tile_group)):
            row = _row(APPLY, (number, number + 1), waits, signals[0], position)
            rows.append(row._replace(source=source, source_row=source_row, col=len(slices)))
    rows = [row._replace(**slice_claims(at, row, len(slices))) for at, row in enumerate(rows)]
    return TileOrder(rank, TILES, (*rows, *_parts(space, bounds, applies, first), *slices))


def _row(kind: int, rows: Range, waits: Waits, signal: int, position: int) -> TileRow:
    return TileRow(kind, *rows, 0, WORKSPACE, 0, *waits[0], signal, position, *waits[1])


def _turn(space: TileSpace, number: int, tile_group: int) -> tuple[int, ...]:
    """Sorts tiles: by the leading axes, then in groups of rows of the last but one axis, each column by column."""
    blocks: list[int] = []
    for axis in reversed(space.grid):
        number, block = divmod(number, axis.count)
        blocks.insert(0, block)
    if len(blocks) < 2:
        return tuple(blocks)
    *leading, row, col = blocks
    return (*leading, row // tile_group, col, row)


def _parts(
    space: TileSpace, bounds: tuple[PlacedExchange, ...], applies: list[Apply], first: Mapping[str, int]
) -> Iterator[TileRow]:
    """One row for each range of rows that tiles read late, with the waits of all tensors for those rows."""
    rank = applies[0].rank
    counted = {(wait.pad, wait.signals): wait for apply in applies for wait in apply.late_waits}
    streamed = [
        one for one in bounds if is_streamed(one, space) and any(chunk.waits for chunk in one.chunks.get(rank, []))
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
        yield _row(PART, rows, _told(asked, waits, first), NO_SIGNAL, 0)


def _told(asked: str, waits: tuple[Wait, ...], first: Mapping[str, int]) -> Waits:
    """A range of signals, and one more signal with a count of its own, is all that a row can wait for.

    The signals of two tensors follow each other where tiles wait for all of both.
    """
    each = sorted((first[w.pad] + w.signals[0], first[w.pad] + w.signals[1], w.count) for w in waits)
    joined: list[tuple[int, int, int]] = []
    for lo, hi, count in each:
        if joined and joined[-1][1:] == (lo, count):
            joined[-1] = (joined[-1][0], hi, count)
        else:
            joined.append((lo, hi, count))
    ranges = sorted(joined, key=_shorter)
    if len(ranges) > 2 or any(hi - lo > 1 for lo, hi, _ in ranges[1:]):
        found = f"it waits for {', '.join(map(str, waits))}: more than a range and one signal"
        raise ScheduleError(asked, found, "Use another schedule, or fewer pieces")
    lo, hi, count = ranges[0] if ranges else (0, 0, 0)
    return (lo, hi, count), ((ranges[1][0], ranges[1][2]) if len(ranges) > 1 else (NO_SIGNAL, 0))


def _shorter(signals: tuple[int, int, int]) -> int:
    return signals[0] - signals[1]
