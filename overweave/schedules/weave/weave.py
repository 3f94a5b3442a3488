"""Weaves the tiles of an author's kernel into the communication of its tensors.

Tiles that touch the same chunks are one `Apply`, which waits for the chunks that its tiles load, and notifies for those
that they store. Applies are in the order in which their chunks arrive, or, if nothing arrives, in which they are sent.
The kernel has one pointer for each tensor: where a template leaves the own shard in the caller's memory, it is copied
into the buffer of the arriving rows, unless the kernel can choose between two pointers and no tile needs both.
SOURCE: AutoOverlap 5.2 (dependences between chunks and tiles, waves in the order of arrival).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.footprint import Dim, Operand, TileSpace
from overweave.ir.schedule import (
    Apply,
    Buffer,
    Copy,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.schedules.assemble_schedule import check_stores, counted, credits, goals, output, queues
from overweave.schedules.communication import (
    MAIN,
    SUMS,
    TILES,
    Communication,
    MatmulChunk,
    common,
    is_empty,
    shifted,
    united,
)
from overweave.schedules.signals import without_implied_waits, without_repeated_waits
from overweave.schedules.weave.exchange import TensorExchange, interleave_puts, notifier_positions, push_from_workspace
from overweave.schedules.weave.transports import GATHER

TileGroupKey = tuple[
    tuple[int, ...], ...
]  # for each exchange that divides the tiles, indices of the chunks that a tile touches


class PlacedExchange(Struct, frozen=True):
    """An exchange whose chunks all lie in one buffer, at the tensor's own rows.

    By rank: chunks; before_tiles, after_tiles: operations launched before or after the kernel; puts: by its tiles.
    """

    exchange: TensorExchange
    buffer: Buffer
    chunks: dict[int, list[MatmulChunk]]
    before_tiles: dict[int, list[Operation]]
    after_tiles: dict[int, list[Operation]]
    puts: dict[int, list[Put]]

    @property
    def operand(self) -> Operand:
        return self.exchange.operand


class TileGroup(Struct, frozen=True):
    """The tiles of a rank that touch the same chunks. numbers: of tiles. blocks: grid axis -> blocks they span."""

    key: TileGroupKey
    numbers: tuple[int, ...]
    blocks: dict[str, tuple[int, ...]]


def weave(name: str, space: TileSpace, exchanges: tuple[PlacedExchange, ...], world_size: int) -> Schedule:
    """Return the schedule in which the tiles of `space` run between the exchanges. It is not yet proven.

    Raises ScheduleError for tiles that straddle chunks which are stored at different ranks, and for tiles that write
    the same elements.
    """
    check_stores(space)
    woven = _Weaver(space, exchanges, world_size)
    operations: list[Operation] = []
    for rank in range(world_size):
        operations += woven.rank(rank)
    queue_list = tuple(chain.from_iterable(placed.exchange.communication.queues for placed in exchanges))
    if woven.replacements:
        operations, queue_list = wait_for_all_writers(operations, woven.replacements), sums_after_tiles(queue_list)
    ordered_queues = queues(queue_list, operations)
    communications = [placed.exchange.communication for placed in exchanges]
    exchanged = {placed.operand.tensor for placed in exchanges}
    outputs = [store for store in space.stores if store.tensor not in exchanged]
    buffers = tuple(buffer for one in communications for buffer in one.buffers)
    pads = _pads(communications, [one for one in woven.read_whole if not is_streamed(one, space)])
    return Schedule(
        name=name,
        world_size=world_size,
        buffers=(*buffers, *map(output, outputs)),
        pads=pads,
        queues=ordered_queues,
        credits=credits(world_size, buffers, pads),
        given=tuple(given for one in communications for given in one.given),
        goal=(*(goal for one in communications for goal in one.goal), *goals(outputs, world_size)),
        operations=counted(tuple(without_repeated_waits(operations, ordered_queues))),
    )


def _pads(communications: list[Communication], read_whole: list[PlacedExchange]) -> tuple[SignalPad, ...]:
    """Return the signal pads, one tensor after the other.

    Tensors that tiles wait for as a whole alternate instead, so that a table row can name their signals as one range.
    """
    if len(read_whole) < 2:
        return tuple(pad for one in communications for pad in one.pads)
    return tuple(pad for pads in zip_longest(*(one.pads for one in communications)) for pad in pads if pad is not None)


def tile_groups(space: TileSpace, exchanges: tuple[PlacedExchange, ...], rank: int) -> list[TileGroup]:
    """Return the tiles of a rank, grouped by the chunks that they touch, in the order in which they should run."""
    dividing = [(placed, _chunks_by_block(placed, space, rank)) for placed in exchanges if _splits_tiles(placed, space)]
    members: dict[TileGroupKey, list[tuple[int, dict[str, int]]]] = {}
    for number, tile in enumerate(space.coordinates()):
        key = tuple(chunks[tile.get(str(placed.operand.dims[0].axis), 0)] for placed, chunks in dividing)
        members.setdefault(key, []).append((number, tile))
    sides = [placed.exchange.transport.side for placed, _ in dividing]

    def launch_position(key: TileGroupKey) -> tuple[int, int]:
        arrived = [chunks[-1] for side, chunks in zip(sides, key, strict=True) if side == GATHER and chunks]
        sent = [chunks[0] for side, chunks in zip(sides, key, strict=True) if side != GATHER and chunks]
        return max(arrived, default=0), min(sent, default=0)

    return [_tile_group(key, members[key], space) for key in sorted(members, key=launch_position)]


def _tile_group(key: TileGroupKey, tiles: list[tuple[int, dict[str, int]]], space: TileSpace) -> TileGroup:
    blocks = {axis.name: tuple(sorted({tile[axis.name] for _, tile in tiles})) for axis in space.grid}
    return TileGroup(key, tuple(number for number, _ in tiles), blocks)


class _Weaver:
    """Builds the operations of one rank after the other.

    dividing: exchanges whose chunks divide the tiles into groups; read_whole: exchanges whose every chunk each tile
    reads. places: (rank, step) -> its position in the launch order. replacements: signal of a chunk -> the signals of
    all tiles that write the chunk, to wait for instead.
    """

    def __init__(self, space: TileSpace, exchanges: tuple[PlacedExchange, ...], world_size: int) -> None:
        self.space, self.exchanges = space, exchanges
        launched = ((rank, [*self._before_tiles(rank), *self._after_tiles(rank)]) for rank in range(world_size))
        self.places = {(rank, one.name): place for rank, steps in launched for place, one in enumerate(steps)}
        self.dividing = [placed for placed in exchanges if _splits_tiles(placed, space)]
        self.read_whole = [placed for placed in exchanges if not _splits_tiles(placed, space)]
        self.replacements: dict[SignalSlot, TileSignals] = {}

    def rank(self, rank: int) -> Iterator[Operation]:
        """Yield the operations of a rank: those before its tiles, the tiles (one launch), those behind them."""
        yield from self._before_tiles(rank)
        groups = tile_groups(self.space, self.exchanges, rank)
        self._check_all_read(rank, groups)
        for index, placed in enumerate(self.dividing):
            touched = (group.key[index] for group in groups)
            self.replacements |= replaced_signals(rank, placed.chunks.get(rank, []), touched)
        applies = [self.apply(rank, position, group) for position, group in enumerate(groups)]
        in_few_waits = without_implied_waits(
            applies, [placed.exchange.communication for placed in self.exchanges], self.places
        )
        yield from interleave_puts(
            in_few_waits, [(placed.puts.get(rank, []), notifier_positions(placed.puts)) for placed in self.exchanges]
        )
        yield from self._after_tiles(rank)

    def _before_tiles(self, rank: int) -> Iterator[Operation]:
        """Return the operations that a rank launches before its tiles, alternating among tensors."""
        before_tiles = [placed.before_tiles.get(rank, []) for placed in self.exchanges]
        return (step for steps in zip_longest(*before_tiles) for step in steps if step is not None)

    def _after_tiles(self, rank: int) -> Iterator[Operation]:
        """Return the operations that a rank launches after its tiles."""
        return chain.from_iterable(placed.after_tiles.get(rank, []) for placed in self.exchanges)

    def apply(self, rank: int, position: int, group: TileGroup) -> Apply:
        """Return the Apply of a tile group: what its tiles wait for, need, store and notify."""
        waits: list[Wait] = []
        notifies: list[Notify] = []
        for placed, touched in zip(self.dividing, group.key, strict=True):
            chunks = [placed.chunks[rank][index] for index in touched]
            waits += (wait for chunk in chunks for wait in chunk.waits)
            notifies += next((chunk.notifies for chunk in chunks if chunk.notifies), ())
        self._check_one_place(rank, group)
        whole_chunks = [(placed, chunk) for placed in self.read_whole for chunk in placed.chunks.get(rank, [])]
        loop_chunks = [pair for pair in whole_chunks if is_streamed(pair[0], self.space)]
        before_chunks = [pair for pair in whole_chunks if not is_streamed(pair[0], self.space)]
        waits += [wait for _, chunk in before_chunks for wait in chunk.waits]
        late_waits = tuple(wait for _, chunk in loop_chunks for wait in chunk.waits)
        return Apply(
            name=f"{self.space.kernel}.{rank}.{position}",
            rank=rank,
            queue=TILES,
            waits=tuple(dict.fromkeys(waits)),
            notifies=tuple(notifies),
            function=self.space.kernel,
            needs=(
                *(
                    need
                    for placed in self.dividing
                    if placed.exchange.transport.side == GATHER
                    for need in self._needs(placed, rank, group)
                ),
                *(_need(placed, chunk) for placed, chunk in (before_chunks if late_waits else whole_chunks)),
            ),
            late_needs=tuple(_need(placed, chunk) for placed, chunk in loop_chunks) if late_waits else (),
            makes=tuple(self._written_goals(rank, group)),
            late_waits=late_waits,
            tiles=_ranges(group.numbers),
        )

    def _check_all_read(self, rank: int, groups: list[TileGroup]) -> None:
        """Raise ScheduleError if no tile waits for a chunk that arrives: its signal could not be used again."""
        for index, placed in enumerate(self.dividing):
            touched = {chunk for group in groups for chunk in group.key[index]}
            for number, chunk in enumerate(placed.chunks[rank]):
                if chunk.waits and number not in touched:
                    asked = f"gather {placed.operand.tensor} for {self.space.kernel}"
                    unread = f"no tile reads its rows [{chunk.rows[0]}:{chunk.rows[1]}]"
                    raise ScheduleError(asked, unread, "Say the dimension that tiles read, an axis or an extent")

    def _check_one_place(self, rank: int, group: TileGroup) -> None:
        """Raise ScheduleError if a tile would notify for chunks of two tensors, or store one tensor in two buffers."""
        notifying: list[tuple[PlacedExchange, MatmulChunk]] = []
        for placed, touched in zip(self.dividing, group.key, strict=True):
            chunks = [placed.chunks[rank][index] for index in touched]
            with_notifies = [(placed, chunk) for chunk in chunks if chunk.notifies]
            has_one = notifies_all_waiters([chunk for _, chunk in with_notifies])
            notifying += with_notifies[: 1 if has_one else None]
            if len(chunks) > 1 and any(chunk.places for chunk in chunks):
                notifying = [(placed, chunk) for chunk in chunks]
        if len(notifying) > 1:
            raise self._straddle_error(*notifying[:2])

    def _straddle_error(
        self, first: tuple[PlacedExchange, MatmulChunk], other: tuple[PlacedExchange, MatmulChunk]
    ) -> ScheduleError:
        """Return the error for tiles that would have to notify for two chunks."""
        asked = f"weave {self.space.kernel}"
        operand, other_operand = first[0].operand, other[0].operand
        if operand != other_operand:
            groups = f"a tile stores {operand.tensor} and {other_operand.tensor}, and can announce one of them"
            return ScheduleError(asked, groups, "Let a collective exchange one of them")
        axis = operand.dims[0].axis
        chunks = " and ".join(f"[{chunk.rows[0]}:{chunk.rows[1]}]" for chunk in (first[1], other[1]))
        groups = f"tiles straddle the chunks {chunks} of the {operand.rows} rows of {operand.tensor}"
        rows = self.space.entries(operand.dims[0])
        whole = f"let every rank's rows, as torch.chunk deals them, be whole blocks of {axis}: of {rows} rows"
        cure = "Let another mover carry them" + (f", or {whole}" if axis else ", or let a tile store rows of one rank")
        return ScheduleError(asked, groups, cure)

    def _needs(self, placed: PlacedExchange, rank: int, group: TileGroup) -> Iterator[InitialContents]:
        """Yield the regions, and their logical contents, that a group's tiles read of an arriving tensor."""
        touched = group.key[self.dividing.index(placed)]
        if not touched:  # its blocks lie beyond the tensor's rows
            return
        first = placed.chunks[rank][touched[0]]
        offset = first.region.rows[0] - first.rows[0]
        for rows in self._touched(placed.operand.dims[0], group):
            region = Region(first.region.buffer, rank, shifted(rows, offset), (0, placed.operand.cols))
            yield InitialContents(region, placed.exchange.read_tensor(rank), rows[0], 0)

    def _written_goals(self, rank: int, group: TileGroup) -> Iterator[Goal]:
        """Yield the regions that a group's tiles store, and the logical contents that they then have."""
        by_tensor = {placed.operand.tensor: placed for placed in self.exchanges}
        for store in self.space.stores:
            placed = by_tensor.get(store.tensor)
            locations = (
                self._store_locations(placed, rank, group)
                if placed
                else [(Region(store.tensor, rank, (0, 0), (0, 0)), 0)]
            )
            for cols in self._column_ranges(store, group):
                touched = self._touched(store.dims[0], group)
                for rows in placed.exchange.split_at_ranks(touched) if placed else touched:
                    value = placed.exchange.written_value(rank, rows[0]) if placed else (store.tensor, 0, ())
                    for location, row_shift in locations:
                        stored = Region(location.buffer, location.rank, shifted(rows, row_shift), cols)
                        yield Goal(stored, value[0], rows[0] + value[1], cols[0], value[2])

    def _store_locations(self, placed: PlacedExchange, rank: int, group: TileGroup) -> list[tuple[Region, int]]:
        """Return where the group's tiles store a tensor: (region of the buffer, its rows minus the tensor's)."""
        if placed in self.dividing:
            for index in group.key[self.dividing.index(placed)]:
                chunk = placed.chunks[rank][index]
                if chunk.places:
                    return [(region, region.rows[0] - chunk.rows[0]) for region in chunk.places]
        return [(Region(placed.buffer.name, rank, (0, 0), (0, 0)), 0)]

    def _column_ranges(self, store: Operand, group: TileGroup) -> tuple[Range, ...]:
        """Return the columns that the group's tiles write, dimensions but the first flattened. Raises ScheduleError."""
        ranges: tuple[Range, ...] = ((0, 1),)
        for dim in store.dims[1:]:
            touched = self._touched(dim, group)
            if touched == ((0, dim.extent),):
                ranges = tuple((lo * dim.extent, hi * dim.extent) for lo, hi in ranges)
                continue
            rows = [row * dim.extent for lo, hi in ranges for row in range(lo, hi)]
            if len(rows) * len(touched) > MOST_RANGES:
                groups = f"some tiles write {len(rows) * len(touched)} pieces of each row of {store.tensor}"
                raise ScheduleError(f"weave {self.space.kernel}", groups, "Let a tile write longer pieces of a row")
            ranges = tuple((row + lo, row + hi) for row in rows for lo, hi in touched)
        return united(ranges)

    def _touched(self, dim: Dim, group: TileGroup) -> tuple[Range, ...]:
        """Return the elements of a dimension that the group's tiles touch, as disjoint ranges."""
        if dim.axis is None or dim.axis not in group.blocks:
            return ((0, dim.extent),)
        ranges = [self.space.touched(dim, {dim.axis: block}) for block in group.blocks[dim.axis]]
        return united(ranges)


MOST_RANGES = 1024  # pieces of a row that tiles of one group write


def place_exchange(exchange: TensorExchange, space: TileSpace, is_dual_source: bool = False) -> PlacedExchange:
    """Bring an exchange's chunks into one buffer, at the rows of the whole tensor. Raises ScheduleError if it cannot.

    is_dual_source: the kernel can read the own shard in the caller's memory.
    """
    communication = exchange.communication
    chunks = [step for step in communication.steps if isinstance(step, MatmulChunk)]
    buffers = {buffer.name: buffer for buffer in communication.buffers}
    in_workspace = [chunk for chunk in chunks if not _is_callers(chunk, buffers)]
    targets = dict.fromkeys(chunk.region.buffer for chunk in in_workspace or chunks)
    if len(targets) != 1 or any(chunk.region.rows != chunk.rows for chunk in in_workspace or chunks):
        found = f"its chunks lie in {', '.join(targets)}, at other rows than the tensor's"
        raise ScheduleError(
            f"give {space.kernel} one pointer to {exchange.operand.tensor}", found, "Use another schedule"
        )
    (target,) = targets
    placed = PlacedExchange(exchange, buffers[target], {}, {}, {}, {})
    reads_caller = is_dual_source and _are_whole_blocks(
        [chunk for chunk in chunks if chunk not in in_workspace], exchange.operand, space
    )
    for step in communication.steps:
        if isinstance(step, MatmulChunk):
            placed.chunks.setdefault(step.rank, []).append(step if reads_caller else _move_to_buffer(step, placed))
        elif isinstance(step, Put) and step.queue == TILES:
            own = next((one for one in chunks if one.rank == step.rank and one not in in_workspace), None)
            put = step if reads_caller and own else push_from_workspace(step, own, target)
            placed.puts.setdefault(step.rank, []).append(put)
        else:
            steps = (
                placed.after_tiles
                if step.rank in placed.chunks or exchange.transport.side != GATHER
                else placed.before_tiles
            )
            steps.setdefault(step.rank, []).append(step)
    return placed


def _move_to_buffer(chunk: MatmulChunk, placed: PlacedExchange) -> MatmulChunk:
    """Return the chunk in the exchange's buffer; add a copy of rows that the caller holds, if no step copies them."""
    if chunk.region.buffer == placed.buffer.name:
        return chunk
    region = Region(placed.buffer.name, chunk.rank, chunk.rows, chunk.region.cols)
    steps = placed.exchange.communication.steps
    if any(isinstance(step, Copy) and region in step.destinations for step in steps):
        return replace(chunk, region=region)
    own = Copy(
        name=f"{placed.operand.tensor}.own.{chunk.rank}",
        rank=chunk.rank,
        queue=MAIN,
        sources=(chunk.region,),
        destinations=(region,),
    )
    placed.before_tiles.setdefault(chunk.rank, []).insert(0, own)
    return replace(chunk, region=region)


def _are_whole_blocks(chunks: list[MatmulChunk], operand: Operand, space: TileSpace) -> bool:
    """Return whether chunks are whole blocks of the operand's axis, so that no tile has rows of two chunks.

    A tile that reaches beyond the last row may wrap round to the first, which the caller's shard does not have.
    """
    dim = operand.dims[0]
    if dim.axis is None or space.axis(dim.axis).is_streamed or (dim.scale, dim.shift) != (1, 0):
        return False
    block = space.entries(dim)
    return all(lo % block == 0 and hi % block == 0 for lo, hi in (chunk.rows for chunk in chunks))


def _is_callers(chunk: MatmulChunk, buffers: dict[str, Buffer]) -> bool:
    """Return whether a chunk lies in the caller's tensor. buffers: by name."""
    return buffers[chunk.region.buffer].home == "input"


def _need(placed: PlacedExchange, chunk: MatmulChunk) -> InitialContents:
    return InitialContents(chunk.region, placed.exchange.read_tensor(chunk.rank), chunk.rows[0], 0)


def _splits_tiles(placed: PlacedExchange, space: TileSpace) -> bool:
    """Return whether an exchange's chunks divide the tiles into groups: not if each tile reads all of them.

    Tiles that each store into all of them do divide so, like tiles that straddle some.
    """
    axis = placed.operand.dims[0].axis
    return placed.exchange.transport.side != GATHER if axis is None else not space.axis(axis).is_streamed


def is_streamed(placed: PlacedExchange, space: TileSpace) -> bool:
    """Return whether a loop inside every tile walks the exchanged rows, chunk after chunk."""
    axis = placed.operand.dims[0].axis
    return axis is not None and space.axis(axis).is_streamed


def _chunks_by_block(placed: PlacedExchange, space: TileSpace, rank: int) -> list[tuple[int, ...]]:
    """Return for each block of the exchange's axis the indices of the rank's chunks that it touches.

    An extent without an axis is one block, of all chunks.
    """
    dim = placed.operand.dims[0]
    chunks = placed.chunks.get(rank, [])
    if dim.axis is None:
        return [tuple(range(len(chunks)))]
    touched = (space.touched(dim, {str(dim.axis): block}) for block in range(space.axis(str(dim.axis)).count))
    return [
        tuple(index for index, chunk in enumerate(chunks) if not is_empty(common(rows, chunk.rows))) for rows in touched
    ]


def _ranges(numbers: Iterable[int]) -> tuple[Range, ...]:
    return united((number, number + 1) for number in sorted(numbers))


# Tiles that write rows of two chunks, if shards are not whole blocks, notify for the chunk that is sent first.
# Operations that wait for a chunk then wait for the signals of all tiles that write it. Sums run after the tiles, so
# that a row of their table waits for arriving chunks, and one own signal at most.

Touched = tuple[int, ...]  # indices of the chunks that a tile writes, in the order in which they are sent


class SignalSlot(NamedTuple):
    """A signal of a rank."""

    rank: int
    pad: str
    signal: int


class TileSignals(NamedTuple):
    """The signals `at` that the tiles of rank `by` notify."""

    by: int
    at: tuple[SignalSlot, ...]


ReplacedSignals = Mapping[SignalSlot, TileSignals]  # signal of a chunk -> those of all its tiles


def replaced_signals(rank: int, chunks: list[MatmulChunk], touched: Iterable[Touched]) -> dict[SignalSlot, TileSignals]:
    """Return what replaces the signals of chunks that are written by tiles which notify for another chunk.

    A tile that straddles chunks notifies for the first of them alone. touched: the chunks of each group of tiles.
    """
    notified: dict[int, dict[int, None]] = {}  # chunk -> the chunks for which the tiles that write it notify
    for notifying in ([index for index in each if chunks[index].notifies] for each in touched):
        for index in notifying:
            notified.setdefault(index, {})[notifying[0]] = None
    replacements: dict[SignalSlot, TileSignals] = {}
    for index, notified_for in notified.items():
        if list(notified_for) != [index]:
            for notify in chunks[index].notifies:
                signals = [
                    _signal_slot(one)
                    for other in notified_for
                    for one in chunks[other].notifies
                    if one.rank == notify.rank
                ]
                replacements[_signal_slot(notify)] = TileSignals(rank, tuple(signals))
    return replacements


def notifies_all_waiters(chunks: list[MatmulChunk]) -> bool:
    """Return whether a notify for the first of these chunks reaches all ranks that wait for any of them."""
    ranks = {notify.rank for chunk in chunks[:1] for notify in chunk.notifies}
    return all(notify.rank in ranks for chunk in chunks[1:] for notify in chunk.notifies)


def wait_for_all_writers(operations: Iterable[Operation], replaced: ReplacedSignals) -> list[Operation]:
    """Return the operations, with waits for the signals of all tiles that write what they read."""
    return [replace(one, waits=tuple(dict.fromkeys(_waits(one, replaced)))) for one in operations]


def _waits(operation: Operation, replaced: ReplacedSignals) -> Iterator[Wait]:
    """Yield the waits of an operation, where tiles notify for other chunks than their own.

    A tile that lies across several chunks notifies for the first of them alone. So a wait for a chunk becomes waits for
    the signals of every chunk for which its tiles notify. A sum starts after all tiles of its rank: of those it keeps
    the wait for the chunk's own signal, if there is one.
    """
    for wait in operation.waits:
        own = {SignalSlot(operation.rank, wait.pad, signal) for signal in range(*wait.signals)}
        if not own & replaced.keys():
            yield wait
            continue
        for slot in sorted(own):
            replacement = replaced.get(slot, TileSignals(operation.rank, (slot,)))
            runs_after_tiles = operation.queue == SUMS and replacement.by == operation.rank
            for _, pad, signal in replacement.at:
                if not runs_after_tiles or signal == slot.signal:
                    yield Wait(pad, (signal, signal + 1), wait.count)


def sums_after_tiles(queues: Iterable[Queue]) -> tuple[Queue, ...]:
    """Return the queues; that of sums runs after the tiles."""
    return tuple(
        replace(queue, after=tuple(dict.fromkeys((*queue.after, TILES)))) if queue.name == SUMS else queue
        for queue in queues
    )


def _signal_slot(notify: Notify) -> SignalSlot:
    return SignalSlot(notify.rank, notify.pad, notify.signal)
