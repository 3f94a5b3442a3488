"""Weaves the tiles of an author's kernel into the exchanges of its tensors.

Tiles that touch the same chunks are one `Apply`: it waits for the chunks that it reads, and announces those that it
writes. Applies stand in the order in which their chunks arrive, or, where nothing arrives, in which they are sent.
The kernel has one pointer for a tensor: where a template leaves the own shard with the caller, it is copied beside
what arrives, unless the kernel can choose between two pointers and no tile needs both.
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
from overweave.schedules.weave.exchange import TensorExchange, announced_by, from_workspace, with_puts
from overweave.schedules.weave.transports import GATHER

TileGroupKey = tuple[tuple[int, ...], ...]  # for each exchange that tells tiles apart, the chunks that a tile touches


class PlacedExchange(Struct, frozen=True):
    """An exchange whose chunks all lie in one buffer, at the rows that the kernel knows. puts: what tiles carry."""

    exchange: TensorExchange
    buffer: Buffer
    chunks: dict[int, list[MatmulChunk]]
    before: dict[int, list[Operation]]
    behind: dict[int, list[Operation]]
    puts: dict[int, list[Put]]

    @property
    def operand(self) -> Operand:
        return self.exchange.operand


class TileGroup(Struct, frozen=True):
    """The tiles of a rank that touch the same chunks. blocks: of every grid axis, those that its tiles are made of."""

    key: TileGroupKey
    numbers: tuple[int, ...]
    blocks: dict[str, tuple[int, ...]]


def weave(name: str, space: TileSpace, bounds: tuple[PlacedExchange, ...], world_size: int) -> Schedule:
    """The schedule in which the tiles of `space` compute between the exchanges. Prove it before you use it.

    Raises ScheduleError for tiles that straddle chunks which are stored at different ranks, and for tiles that write
    the same.
    """
    check_stores(space)
    woven = _Weaver(space, bounds, world_size)
    operations: list[Operation] = []
    for rank in range(world_size):
        operations += woven.rank(rank)
    listed = tuple(chain.from_iterable(bound.exchange.communication.queues for bound in bounds))
    if woven.replaced:
        operations, listed = with_waits(operations, woven.replaced), behind_tiles(listed)
    ordered = queues(listed, operations)
    communications = [bound.exchange.communication for bound in bounds]
    moved = {bound.operand.tensor for bound in bounds}
    outputs = [store for store in space.stores if store.tensor not in moved]
    buffers = tuple(buffer for one in communications for buffer in one.buffers)
    pads = _pads(communications, [one for one in woven.wholes if not is_streamed(one, space)])
    return Schedule(
        name=name,
        world_size=world_size,
        buffers=(*buffers, *map(output, outputs)),
        pads=pads,
        queues=ordered,
        credits=credits(world_size, buffers, pads),
        given=tuple(given for one in communications for given in one.given),
        goal=(*(goal for one in communications for goal in one.goal), *goals(outputs, world_size)),
        operations=counted(tuple(without_repeated_waits(operations, ordered))),
    )


def _pads(communications: list[Communication], wholes: list[PlacedExchange]) -> tuple[SignalPad, ...]:
    """Those of one tensor after the other; where tiles wait for all of several, like ones beside each other, so that a
    row of the table tells them as one range."""
    if len(wholes) < 2:
        return tuple(pad for one in communications for pad in one.pads)
    return tuple(pad for pads in zip_longest(*(one.pads for one in communications)) for pad in pads if pad is not None)


def groups(space: TileSpace, bounds: tuple[PlacedExchange, ...], rank: int) -> list[TileGroup]:
    """Return the tiles of a rank, grouped by the chunks that they touch, in the order in which they should run."""
    splitting = [(bound, _chunks_by_block(bound, space, rank)) for bound in bounds if _splits_tiles(bound, space)]
    members: dict[TileGroupKey, list[tuple[int, dict[str, int]]]] = {}
    for number, tile in enumerate(space.coordinates()):
        key = tuple(chunks[tile.get(str(bound.operand.dims[0].axis), 0)] for bound, chunks in splitting)
        members.setdefault(key, []).append((number, tile))
    sides = [bound.exchange.transport.side for bound, _ in splitting]

    def turn(key: TileGroupKey) -> tuple[int, int]:
        arrived = [chunks[-1] for side, chunks in zip(sides, key, strict=True) if side == GATHER and chunks]
        sent = [chunks[0] for side, chunks in zip(sides, key, strict=True) if side != GATHER and chunks]
        return max(arrived, default=0), min(sent, default=0)

    return [_group(key, members[key], space) for key in sorted(members, key=turn)]


def _group(key: TileGroupKey, tiles: list[tuple[int, dict[str, int]]], space: TileSpace) -> TileGroup:
    blocks = {axis.name: tuple(sorted({tile[axis.name] for _, tile in tiles})) for axis in space.grid}
    return TileGroup(key, tuple(number for number, _ in tiles), blocks)


class _Weaver:
    """Makes the operations of one rank after the other.

    splitting: exchanges whose chunks divide the tiles into groups; wholes: exchanges of which every tile needs all.
    places: (rank, step) -> its position in the launch order. replaced: signal of a chunk -> the signals to wait for in
    its place, of all tiles that write the chunk.
    """

    def __init__(self, space: TileSpace, bounds: tuple[PlacedExchange, ...], world_size: int) -> None:
        self.space, self.bounds = space, bounds
        launched = ((rank, [*self._before(rank), *self._behind(rank)]) for rank in range(world_size))
        self.places = {(rank, one.name): place for rank, steps in launched for place, one in enumerate(steps)}
        self.splitting = [bound for bound in bounds if _splits_tiles(bound, space)]
        self.wholes = [bound for bound in bounds if not _splits_tiles(bound, space)]
        self.replaced: dict[SignalSlot, TileSignals] = {}

    def rank(self, rank: int) -> Iterator[Operation]:
        """Yield the operations of a rank: those before its tiles, the tiles (one launch), those behind them."""
        yield from self._before(rank)
        found = groups(self.space, self.bounds, rank)
        self._check_all_read(rank, found)
        for at, bound in enumerate(self.splitting):
            touched = (group.key[at] for group in found)
            self.replaced |= replaced_signals(rank, bound.chunks.get(rank, []), touched)
        applies = [self.apply(rank, place, group) for place, group in enumerate(found)]
        in_few_waits = without_implied_waits(
            applies, [bound.exchange.communication for bound in self.bounds], self.places
        )
        yield from with_puts(
            in_few_waits, [(bound.puts.get(rank, []), announced_by(bound.puts)) for bound in self.bounds]
        )
        yield from self._behind(rank)

    def _before(self, rank: int) -> Iterator[Operation]:
        """What is launched before its tiles, of all tensors by turns."""
        before = [bound.before.get(rank, []) for bound in self.bounds]
        return (step for steps in zip_longest(*before) for step in steps if step is not None)

    def _behind(self, rank: int) -> Iterator[Operation]:
        return chain.from_iterable(bound.behind.get(rank, []) for bound in self.bounds)

    def apply(self, rank: int, place: int, group: TileGroup) -> Apply:
        waits: list[Wait] = []
        notifies: list[Notify] = []
        for bound, touched in zip(self.splitting, group.key, strict=True):
            chunks = [bound.chunks[rank][at] for at in touched]
            waits += (wait for chunk in chunks for wait in chunk.waits)
            notifies += next((chunk.notifies for chunk in chunks if chunk.notifies), ())
        self._check_one_place(rank, group)
        late = [(bound, chunk) for bound in self.wholes for chunk in bound.chunks.get(rank, [])]
        streamed = [pair for pair in late if is_streamed(pair[0], self.space)]
        whole = [pair for pair in late if not is_streamed(pair[0], self.space)]
        waits += [wait for _, chunk in whole for wait in chunk.waits]
        late_waits = tuple(wait for _, chunk in streamed for wait in chunk.waits)
        return Apply(
            name=f"{self.space.kernel}.{rank}.{place}",
            rank=rank,
            queue=TILES,
            waits=tuple(dict.fromkeys(waits)),
            notifies=tuple(notifies),
            function=self.space.kernel,
            needs=(
                *(
                    need
                    for bound in self.splitting
                    if bound.exchange.transport.side == GATHER
                    for need in self._needs(bound, rank, group)
                ),
                *(_need(bound, chunk) for bound, chunk in (whole if late_waits else late)),
            ),
            late_needs=tuple(_need(bound, chunk) for bound, chunk in streamed) if late_waits else (),
            makes=tuple(self._makes(rank, group)),
            late_waits=late_waits,
            tiles=_runs(group.numbers),
        )

    def _check_all_read(self, rank: int, found: list[TileGroup]) -> None:
        """Raise ScheduleError if no tile waits for a chunk that arrives: its signal could not be used again."""
        for at, bound in enumerate(self.splitting):
            touched = {chunk for group in found for chunk in group.key[at]}
            for number, chunk in enumerate(bound.chunks[rank]):
                if chunk.waits and number not in touched:
                    asked = f"gather {bound.operand.tensor} for {self.space.kernel}"
                    unread = f"no tile reads its rows [{chunk.rows[0]}:{chunk.rows[1]}]"
                    raise ScheduleError(asked, unread, "Say the dimension that tiles read, an axis or an extent")

    def _check_one_place(self, rank: int, group: TileGroup) -> None:
        """Raise ScheduleError if a tile would notify for chunks of two tensors, or store one tensor at two places."""
        notifying: list[tuple[PlacedExchange, MatmulChunk]] = []
        for bound, touched in zip(self.splitting, group.key, strict=True):
            chunks = [bound.chunks[rank][at] for at in touched]
            with_notifies = [(bound, chunk) for chunk in chunks if chunk.notifies]
            has_one = notifies_all_waiters([chunk for _, chunk in with_notifies])
            notifying += with_notifies[: 1 if has_one else None]
            if len(chunks) > 1 and any(chunk.places for chunk in chunks):
                notifying = [(bound, chunk) for chunk in chunks]
        if len(notifying) > 1:
            raise self._straddling(*notifying[:2])

    def _straddling(
        self, one: tuple[PlacedExchange, MatmulChunk], other: tuple[PlacedExchange, MatmulChunk]
    ) -> ScheduleError:
        asked = f"weave {self.space.kernel}"
        operand, also = one[0].operand, other[0].operand
        if operand != also:
            found = f"a tile stores {operand.tensor} and {also.tensor}, and can announce one of them"
            return ScheduleError(asked, found, "Let a collective exchange one of them")
        axis = operand.dims[0].axis
        chunks = " and ".join(f"[{chunk.rows[0]}:{chunk.rows[1]}]" for chunk in (one[1], other[1]))
        found = f"tiles straddle the chunks {chunks} of the {operand.rows} rows of {operand.tensor}"
        rows = self.space.entries(operand.dims[0])
        whole = f"let every rank's rows, as torch.chunk deals them, be whole blocks of {axis}: of {rows} rows"
        cure = "Let another mover carry them" + (f", or {whole}" if axis else ", or let a tile store rows of one rank")
        return ScheduleError(asked, found, cure)

    def _needs(self, bound: PlacedExchange, rank: int, group: TileGroup) -> Iterator[InitialContents]:
        touched = group.key[self.splitting.index(bound)]
        if not touched:  # its blocks lie beyond the tensor's rows
            return
        first = bound.chunks[rank][touched[0]]
        offset = first.region.rows[0] - first.rows[0]
        for rows in self._touched(bound.operand.dims[0], group):
            region = Region(first.region.buffer, rank, shifted(rows, offset), (0, bound.operand.cols))
            yield InitialContents(region, bound.exchange.read(rank), rows[0], 0)

    def _makes(self, rank: int, group: TileGroup) -> Iterator[Goal]:
        moved = {bound.operand.tensor: bound for bound in self.bounds}
        for store in self.space.stores:
            bound = moved.get(store.tensor)
            places = self._places(bound, rank, group) if bound else [(Region(store.tensor, rank, (0, 0), (0, 0)), 0)]
            for cols in self._columns(store, group):
                touched = self._touched(store.dims[0], group)
                for rows in bound.exchange.apart(touched) if bound else touched:
                    made = bound.exchange.made(rank, rows[0]) if bound else (store.tensor, 0, ())
                    for place, by in places:
                        stored = Region(place.buffer, place.rank, shifted(rows, by), cols)
                        yield Goal(stored, made[0], rows[0] + made[1], cols[0], made[2])

    def _places(self, bound: PlacedExchange, rank: int, group: TileGroup) -> list[tuple[Region, int]]:
        """Where the group's tiles store a tensor: a buffer of some rank, and how far on its rows lie there."""
        if bound in self.splitting:
            for at in group.key[self.splitting.index(bound)]:
                chunk = bound.chunks[rank][at]
                if chunk.places:
                    return [(place, place.rows[0] - chunk.rows[0]) for place in chunk.places]
        return [(Region(bound.buffer.name, rank, (0, 0), (0, 0)), 0)]

    def _columns(self, store: Operand, group: TileGroup) -> tuple[Range, ...]:
        """Those of a row that the group's tiles write, whatever dimensions it has."""
        made: tuple[Range, ...] = ((0, 1),)
        for dim in store.dims[1:]:
            touched = self._touched(dim, group)
            if touched == ((0, dim.extent),):
                made = tuple((lo * dim.extent, hi * dim.extent) for lo, hi in made)
                continue
            rows = [row * dim.extent for lo, hi in made for row in range(lo, hi)]
            if len(rows) * len(touched) > MOST_RANGES:
                found = f"some tiles write {len(rows) * len(touched)} pieces of each row of {store.tensor}"
                raise ScheduleError(f"weave {self.space.kernel}", found, "Let a tile write longer pieces of a row")
            made = tuple((row + lo, row + hi) for row in rows for lo, hi in touched)
        return united(made)

    def _touched(self, dim: Dim, group: TileGroup) -> tuple[Range, ...]:
        """Elements of a dimension that the group's tiles touch, as ranges that leave gaps between them."""
        if dim.axis is None or dim.axis not in group.blocks:
            return ((0, dim.extent),)
        ranges = [self.space.touched(dim, {dim.axis: block}) for block in group.blocks[dim.axis]]
        return united(ranges)


MOST_RANGES = 1024  # pieces of a row that tiles of one group write


def bound(exchange: TensorExchange, space: TileSpace, chooses: bool = False) -> PlacedExchange:
    """Brings all chunks into one buffer, at the rows of the whole tensor. Raises ScheduleError where they lie apart.

    chooses: the kernel can read the own shard where the caller has it.
    """
    communication = exchange.communication
    chunks = [step for step in communication.steps if isinstance(step, MatmulChunk)]
    known = {buffer.name: buffer for buffer in communication.buffers}
    moved = [chunk for chunk in chunks if not _stays_with_caller(chunk, known)]
    targets = dict.fromkeys(chunk.region.buffer for chunk in moved or chunks)
    if len(targets) != 1 or any(chunk.region.rows != chunk.rows for chunk in moved or chunks):
        found = f"its chunks lie in {', '.join(targets)}, at other rows than the tensor's"
        raise ScheduleError(
            f"give {space.kernel} one pointer to {exchange.operand.tensor}", found, "Use another schedule"
        )
    (target,) = targets
    made = PlacedExchange(exchange, known[target], {}, {}, {}, {})
    stays = chooses and _are_blocks([chunk for chunk in chunks if chunk not in moved], exchange.operand, space)
    for step in communication.steps:
        if isinstance(step, MatmulChunk):
            made.chunks.setdefault(step.rank, []).append(step if stays else _in_place(step, made))
        elif isinstance(step, Put) and step.queue == TILES:
            own = next((one for one in chunks if one.rank == step.rank and one not in moved), None)
            put = step if stays and own else from_workspace(step, own, target)
            made.puts.setdefault(step.rank, []).append(put)
        else:
            side = made.behind if step.rank in made.chunks or exchange.transport.side != GATHER else made.before
            side.setdefault(step.rank, []).append(step)
    return made


def _in_place(chunk: MatmulChunk, bound: PlacedExchange) -> MatmulChunk:
    """The chunk in the bound buffer; the rows that the caller holds are copied there, if no step does so."""
    if chunk.region.buffer == bound.buffer.name:
        return chunk
    region = Region(bound.buffer.name, chunk.rank, chunk.rows, chunk.region.cols)
    steps = bound.exchange.communication.steps
    if any(isinstance(step, Copy) and region in step.destinations for step in steps):
        return replace(chunk, region=region)
    own = Copy(
        name=f"{bound.operand.tensor}.own.{chunk.rank}",
        rank=chunk.rank,
        queue=MAIN,
        sources=(chunk.region,),
        destinations=(region,),
    )
    bound.before.setdefault(chunk.rank, []).insert(0, own)
    return replace(chunk, region=region)


def _are_blocks(chunks: list[MatmulChunk], operand: Operand, space: TileSpace) -> bool:
    """Whether chunks are made of whole blocks of the operand's axis, so that no tile has rows of two, or none at all.

    A tile that reaches beyond the last row may wrap round to the first, which the caller's shard does not have.
    """
    dim = operand.dims[0]
    if dim.axis is None or space.axis(dim.axis).is_streamed or (dim.scale, dim.shift) != (1, 0):
        return False
    block = space.entries(dim)
    return all(lo % block == 0 and hi % block == 0 for lo, hi in (chunk.rows for chunk in chunks))


def _stays_with_caller(chunk: MatmulChunk, known: dict[str, Buffer]) -> bool:
    return known[chunk.region.buffer].home == "input"


def _need(bound: PlacedExchange, chunk: MatmulChunk) -> InitialContents:
    return InitialContents(chunk.region, bound.exchange.read(chunk.rank), chunk.rows[0], 0)


def _splits_tiles(bound: PlacedExchange, space: TileSpace) -> bool:
    """Whether tiles are told apart by the chunks they touch: not if each tile reads all of them.

    Tiles that each store into all of them do so, too, as those do that straddle some.
    """
    axis = bound.operand.dims[0].axis
    return bound.exchange.transport.side != GATHER if axis is None else not space.axis(axis).is_streamed


def is_streamed(bound: PlacedExchange, space: TileSpace) -> bool:
    """Whether a loop inside every tile walks the rows, chunk after chunk."""
    axis = bound.operand.dims[0].axis
    return axis is not None and space.axis(axis).is_streamed


def _chunks_by_block(bound: PlacedExchange, space: TileSpace, rank: int) -> list[tuple[int, ...]]:
    """For each block of the exchange's axis, the chunks of the rank that it touches, by their place in the order.

    An extent without an axis is one block, of all chunks.
    """
    dim = bound.operand.dims[0]
    chunks = bound.chunks.get(rank, [])
    if dim.axis is None:
        return [tuple(range(len(chunks)))]
    touched = (space.touched(dim, {str(dim.axis): block}) for block in range(space.axis(str(dim.axis)).count))
    return [tuple(at for at, chunk in enumerate(chunks) if not is_empty(common(rows, chunk.rows))) for rows in touched]


def _runs(numbers: Iterable[int]) -> tuple[Range, ...]:
    return united((number, number + 1) for number in sorted(numbers))


# Tiles that write rows of two chunks, where shards are no whole blocks: they announce the chunk that is sent first.
#
# Whoever waits for a chunk waits for the signals of all its tiles then. Sums stand behind the tiles, so that a row of
# their table tells what arrives, and one own signal at most.

Touched = tuple[int, ...]  # the chunks that a tile writes, by their place in the order in which they are sent


class SignalSlot(NamedTuple):
    """Where a signal is counted."""

    rank: int
    pad: str
    signal: int


class TileSignals(NamedTuple):
    """The signals that tiles of rank `by` notify."""

    by: int
    at: tuple[SignalSlot, ...]


ReplacedSignals = Mapping[SignalSlot, TileSignals]  # signal of a chunk -> those of all its tiles


def replaced_signals(rank: int, chunks: list[MatmulChunk], touched: Iterable[Touched]) -> dict[SignalSlot, TileSignals]:
    """Return what replaces the signals of chunks that are written by tiles which notify for another chunk.

    A tile that straddles chunks notifies for the first of them alone. touched: the chunks of each group of tiles.
    """
    notified: dict[int, dict[int, None]] = {}  # chunk -> the chunks for which the tiles that write it notify
    for together in ([at for at in each if chunks[at].notifies] for each in touched):
        for at in together:
            notified.setdefault(at, {})[together[0]] = None
    found: dict[SignalSlot, TileSignals] = {}
    for at, by in notified.items():
        if list(by) != [at]:
            for notify in chunks[at].notifies:
                signals = [_place(one) for other in by for one in chunks[other].notifies if one.rank == notify.rank]
                found[_place(notify)] = TileSignals(rank, tuple(signals))
    return found


def notifies_all_waiters(chunks: list[MatmulChunk]) -> bool:
    """Return whether a notify for the first of these chunks reaches all ranks that wait for any of them."""
    ranks = {notify.rank for chunk in chunks[:1] for notify in chunk.notifies}
    return all(notify.rank in ranks for chunk in chunks[1:] for notify in chunk.notifies)


def with_waits(operations: Iterable[Operation], replaced: ReplacedSignals) -> list[Operation]:
    """Return the operations, waiting for the signals of all tiles that write what they read."""
    return [replace(one, waits=tuple(dict.fromkeys(_waits(one, replaced)))) for one in operations]


def _waits(operation: Operation, replaced: ReplacedSignals) -> Iterator[Wait]:
    """Yield the waits of an operation. A sum runs behind its own rank's tiles: it needs no more waits for them."""
    for wait in operation.waits:
        own = {SignalSlot(operation.rank, wait.pad, signal) for signal in range(*wait.signals)}
        if not own & replaced.keys():
            yield wait
            continue
        for place in sorted(own):
            instead = replaced.get(place, TileSignals(operation.rank, (place,)))
            is_behind = operation.queue == SUMS and instead.by == operation.rank
            for _, pad, signal in instead.at:
                if not is_behind or signal == place.signal:
                    yield Wait(pad, (signal, signal + 1), wait.count)


def behind_tiles(queues: Iterable[Queue]) -> tuple[Queue, ...]:
    """Return the queues with the sums' behind the tiles'."""
    return tuple(
        replace(queue, after=tuple(dict.fromkeys((*queue.after, TILES)))) if queue.name == SUMS else queue
        for queue in queues
    )


def _place(notify: Notify) -> SignalSlot:
    return SignalSlot(notify.rank, notify.pad, notify.signal)
