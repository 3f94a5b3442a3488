"""A tile program with a static mapping as a Schedule, which is verified and simulated like every other.

Copies, flags and waits of a call are its own; what a kernel's tiles wait for and announce follows from the mapping of
its channels. What tiles read and make is the author's word (`TileEffect`), as it is of annotated kernels. A mapping
that is filled at run time is no static one: its channels' waits are bounded, and nothing more is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.schedule import (
    Apply,
    Buffer,
    Copy,
    Credit,
    Get,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Region,
    Retire,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.shards import shard_rows
from overweave.lang.mapping import TileChannel
from overweave.ops.author.tile_program import TileCall
from overweave.runtime.handwritten import (
    Await,
    ChannelArgument,
    Declared,
    Part,
    Raise,
    Reads,
    Sent,
    SymmetricBuffer,
    TaskTile,
    TileEffect,
    TileLaunch,
    TileMove,
    TileRetire,
    TileRows,
    TileTask,
)

Write = Callable[..., None]


@dataclass(frozen=True)
class CallersMatrix:
    """A matrix that a caller passes, or, a result, is given. tensor: its logical name.

    is_shard: each rank has its rows of `[rows, cols]`, as torch.chunk deals them; else it has all.
    shift: they are those of the rank so many before it.
    """

    rows: int
    cols: int
    tensor: str
    is_shard: bool = False
    is_result: bool = False
    shift: int = 0

    def held(self, rank: int, world_size: int) -> tuple[int, int]:
        """The rows that a rank has."""
        owner = (rank - self.shift) % world_size
        return shard_rows(self.rows, world_size, owner) if self.is_shard else (0, self.rows)


class _Program(NamedTuple):
    """A program on paper."""

    rank: int
    world_size: int
    declared: Declared


@dataclass
class _Launched:
    """What a rank has launched so far, in order; of each queue its last operation, and what its next one waits for."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    waits: dict[str, list[Wait]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        self.last[operation.queue] = len(self.operations)
        self.operations.append(operation)

    def add_idle(self, queue: str) -> None:
        """An operation that moves nothing, and waits for what the queue is to wait for."""
        name, waits = f"idle.{self.rank}.{len(self.operations)}", self.taken_waits(queue)
        self.add(Copy(name=name, rank=self.rank, queue=queue, waits=waits, sources=(), destinations=()))

    def taken_waits(self, queue: str) -> tuple[Wait, ...]:
        return tuple(self.waits.pop(queue, ()))

    def tell(self, queue: str, notify: Notify) -> None:
        """What the queue did before is done: its last operation says so, or an idle one behind a kernel or a wait."""
        if self.waits.get(queue) or self.last.get(queue, -1) < max(
            (at for name, at in self.last.items() if name.startswith(f"{queue}.")), default=0
        ):
            self.add_idle(queue)
        at = self.last[queue]
        told = self.operations[at].notifies
        self.operations[at] = replace(self.operations[at], notifies=(*told, notify))


def tile_schedule(
    name: str, declared: Declared, callers: Mapping[str, CallersMatrix], world_size: int, write: Write
) -> Schedule:
    """The Schedule of a call that `write(call, **matrices)` writes down on each of `world_size` ranks.

    callers: matrices of the caller, passed to `write` by name in place of tensors. Raises InputError for a launch whose
    tiles' effect is not said, or whose mapping is filled at run time.
    """
    paper = _Paper(declared, dict(callers), world_size)
    by_rank = [paper.operations_of(rank, write) for rank in range(world_size)]
    names = list(dict.fromkeys(one.queue for operations in by_rank for one in operations))
    queues = (Queue(name, "issue" if "." in name else "complete", _same_stream(names, name)) for name in names)
    ranks = range(world_size)
    return Schedule(
        name=name,
        world_size=world_size,
        buffers=tuple(paper.buffers()),
        pads=tuple(SignalPad(pad, channel.signals) for pad, channel in declared.channels.items()),
        queues=tuple(queues),
        credits=tuple(Credit(giver, taker) for giver in ranks for taker in ranks if giver != taker),
        given=tuple(paper.given()),
        goal=tuple(paper.goals()),
        operations=tuple(operation for operations in by_rank for operation in operations),
    )


def _same_stream(names: list[str], name: str) -> tuple[str, ...]:
    """Work on one stream runs in launch order, kernels too: hence each queue of a stream names the others."""
    stream = name.partition(".")[0]
    return tuple(other for other in names if other != name and other.partition(".")[0] == stream)


class _Paper:
    """What is the same on all ranks of a program on paper."""

    def __init__(self, declared: Declared, callers: dict[str, CallersMatrix], world_size: int) -> None:
        self.declared, self.callers, self.world_size = declared, callers, world_size
        self.with_rows = {name: _counters_with_rows(channel) for name, channel in declared.channels.items()}

    def operations_of(self, rank: int, write: Write) -> list[Operation]:
        """What a rank does, in the order in which its host launches it."""
        places = {name: SymmetricBuffer(*self._extent(name, rank), torch.float32) for name in self.callers}
        both = Declared({**self.declared.buffers, **places}, self.declared.channels)
        call = TileCall(_Program(rank, self.world_size, both))
        write(call, **{name: call.part(name) for name in self.callers})
        launched = _Launched(rank)
        for queue, action in call.steps:
            self._add(launched, queue, action)
        for queue in list(launched.waits):
            launched.add_idle(queue)
        return launched.operations

    def _add(self, launched: _Launched, queue: str, action: object) -> None:
        if isinstance(action, Await):
            launched.waits.setdefault(queue, []).extend(_waits_of(action))
        elif isinstance(action, Raise):
            launched.tell(queue, Notify(action.channel, action.rank, action.counter))
        elif isinstance(action, TileMove):
            launched.add(self._moved(launched, queue, action))
        elif isinstance(action, TileRetire):
            launched.add(self._retired(launched, queue, action))
        elif isinstance(action, TileTask):
            if launched.waits.get(queue):
                launched.add_idle(queue)
            kernel = f"{queue}.{len(launched.operations)}"
            for number, its in enumerate(action.tiles):
                self._compute(launched, kernel, action.name, (number, its))
        elif isinstance(action, TileRows):
            self._add_rows(launched, queue, action)
        elif isinstance(action, TileLaunch):
            if launched.waits.get(queue):
                launched.add_idle(queue)
            for tile in self._tiles(launched, f"{queue}.{len(launched.operations)}", action):
                launched.add(tile)

    def _add_rows(self, launched: _Launched, queue: str, rows: TileRows) -> None:
        """Each peer's part as a Put of all rows that there can be, and what is computed as one tile of a kernel."""
        for name, shard in rows.awaits:
            channel = self._channel(name)
            counters = range(shard * channel.channels, (shard + 1) * channel.channels)
            waits = [Wait(name, (at, at + 1), channel.count_of(at)) for at in counters]
            launched.waits.setdefault(queue, []).extend(waits)
        if launched.waits.get(queue):
            launched.add_idle(queue)
        for sent in rows.sends:
            launched.add(self._sent(launched, queue, sent))
        if rows.makes:
            kernel = f"{queue}.{len(launched.operations)}"
            self._compute(launched, kernel, rows.name, (0, TaskTile(rows.reads, rows.makes)))

    def _sent(self, launched: _Launched, queue: str, sent: Sent) -> Put:
        rank = launched.rank
        return Put(
            name=f"{sent.channel}.{rank}.{len(launched.operations)}",
            rank=rank,
            queue=queue,
            notifies=(Notify(sent.channel, sent.peer, sent.counter),),
            sources=tuple(self._region(source) for source, _ in sent.moves),
            destinations=tuple(self._region(target) for _, target in sent.moves),
            tiles=sent.programs,
        )

    def _moved(self, launched: _Launched, queue: str, move: TileMove) -> Operation:
        source, target = self._region(move.source), self._region(move.target)
        rank, waits = launched.rank, launched.taken_waits(queue)
        kind: type[Put | Get | Copy] = Copy if source.rank == target.rank else Put if source.rank == rank else Get
        name = f"{kind.__name__.lower()}.{rank}.{len(launched.operations)}"
        sides = ((), ()) if source.is_empty else ((source,), (target,))
        return kind(name=name, rank=rank, queue=queue, waits=waits, sources=sides[0], destinations=sides[1])

    def _retired(self, launched: _Launched, queue: str, ended: TileRetire) -> Retire:
        rank, region = launched.rank, self._region(ended.part)
        name, waits = f"retire.{rank}.{len(launched.operations)}", launched.taken_waits(queue)
        return Retire(name=name, rank=rank, queue=queue, waits=waits, regions=() if region.is_empty else (region,))

    def _compute(self, launched: _Launched, kernel: str, name: str, numbered: tuple[int, TaskTile]) -> None:
        """Torch's operations as tiles of a kernel. numbered: a tile with its number."""
        rank, queue, (number, tile) = launched.rank, kernel.partition(".")[0], numbered
        if not tile.makes and not tile.reads:
            found = "nobody says what it reads and makes"
            raise InputError(f"prove {name}", found, "Pass reads= and makes= of rank_compute")
        reads, makes = ([each for each in uses if each.part.shape[0]] for uses in (tile.reads, tile.makes))
        waits = tuple(_waits_of(tile.shard)) if tile.shard else ()
        needs = (InitialContents(self._region(each.part), each.tensor, each.row, each.col) for each in reads)
        if not reads and not makes:
            launched.waits.setdefault(queue, []).extend(waits)
            return
        launched.add(
            Apply(
                name=f"{name}.{kernel}.{number}@{rank}",
                rank=rank,
                queue=kernel,
                function=name,
                waits=waits,
                needs=tuple(needs),
                makes=tuple(Goal(self._region(each.part), each.tensor, each.row, each.col) for each in makes),
                tiles=((number, number + 1),),
            )
        )

    def _region(self, part: Part | torch.Tensor) -> Region:
        if not isinstance(part, Part):
            found = f"a tensor {list(part.shape)}"
            raise InputError("write a tile program on paper", found, "Copy what is declared: matrices and buffers")
        return Region(part.buffer, part.rank, part.rows, part.cols)

    def _tiles(self, launched: _Launched, queue: str, launch: TileLaunch) -> Iterator[Operation]:
        rank = launched.rank
        asked = f"prove the tiles of {launch.name}"
        if not launch.effects:
            raise InputError(asked, "nobody says what they read and make", "Pass tile_effects=(TileEffect(...), ...)")
        if any(isinstance(one, ChannelArgument) and one.is_dynamic for one in launch.arguments):
            raise InputError(asked, "their mapping is filled at run time", "Its waits are bounded; no more is proven")
        first = 0
        for effect in launch.effects:
            for tile in range(effect.tiles.count):
                if not effect.own or effect.tiles.rank_of(tile) == rank:
                    yield self._tile(launch.name, rank, queue, effect, (tile, first + tile))
            first += effect.tiles.count

    def _tile(self, function: str, rank: int, queue: str, effect: TileEffect, numbers: tuple[int, int]) -> Apply:
        """numbers: of the tile among those of its effect, and among all of the launch."""
        tile, number = numbers
        low, high = effect.tiles.rows_of(tile)
        return Apply(
            name=f"{function}.{rank}.{queue}.{number}",
            rank=rank,
            queue=queue,
            function=function,
            waits=tuple(wait for reads in effect.reads for wait in self._waits(reads, low, high)),
            notifies=tuple(self._notifies(effect, tile, rank)),
            needs=tuple(self._needed(reads, rank, (low, high)) for reads in effect.reads),
            makes=tuple(self._made(effect, tile, rank)),
            tiles=((number, number + 1),),
        )

    def _waits(self, reads: Reads, low: int, high: int) -> Iterator[Wait]:
        if reads.channel is not None:
            channel = self._channel(reads.channel)
            whole = (0, channel.tiles.rows)
            for counter in range(*channel.counters_of_rows(*(whole if reads.all_rows else (low, high)))):
                if channel.count_of(counter):
                    yield Wait(reads.channel, (counter, counter + 1), channel.count_of(counter))

    def _needed(self, reads: Reads, rank: int, rows: tuple[int, int]) -> InitialContents:
        height, cols = self._extent(reads.matrix, rank)
        first = self._first(reads.matrix, rank)
        low, high = (first, first + height) if reads.all_rows else rows
        return InitialContents(Region(reads.matrix, rank, (low - first, high - first), (0, cols)), reads.tensor, low, 0)

    def _targets(self, effect: TileEffect, tile: int, rank: int) -> Iterable[int]:
        owner = {"local": rank, "p2p": effect.tiles.rank_of(tile)}
        return range(self.world_size) if effect.mode == "broadcast" else (owner[effect.mode],)

    def _made(self, effect: TileEffect, tile: int, rank: int) -> Iterator[Goal]:
        low, high = effect.tiles.rows_of(tile)
        left = tile % effect.tiles.across * effect.tiles.tile_cols
        cols = (left, min(left + effect.tiles.tile_cols, effect.tiles.cols))
        for target in self._targets(effect, tile, rank):
            first = self._first(effect.makes, effect.tiles.rank_of(tile) if self._is_shard(effect.makes) else target)
            region = Region(effect.makes, target, (low - first, high - first), cols)
            yield Goal(region, effect.tensor, low, left)

    def _notifies(self, effect: TileEffect, tile: int, rank: int) -> Iterator[Notify]:
        """Nobody waits for a counter that stands for no rows."""
        if effect.tells is not None:
            channel = self._channel(effect.tells)
            counter = channel.counter_of(tile)
            if counter not in self.with_rows[effect.tells]:
                return
            yield from (Notify(effect.tells, target, counter) for target in self._targets(effect, tile, rank))

    def buffers(self) -> Iterator[Buffer]:
        for name, matrix in self.callers.items():
            rows = -(-matrix.rows // self.world_size) if matrix.is_shard else matrix.rows
            yield Buffer(name, rows, matrix.cols, "output" if matrix.is_result else "input")
        for name, buffer in self.declared.buffers.items():
            yield Buffer(name, buffer.rows, buffer.cols, "symmetric")

    def given(self) -> Iterator[InitialContents]:
        for name, matrix in self.callers.items():
            if not matrix.is_result:
                yield from (InitialContents(region, matrix.tensor, row, 0) for region, row in self._held(name))

    def goals(self) -> Iterator[Goal]:
        for name, matrix in self.callers.items():
            if matrix.is_result:
                yield from (Goal(region, matrix.tensor, row, 0) for region, row in self._held(name))

    def _held(self, name: str) -> Iterator[tuple[Region, int]]:
        for rank in range(self.world_size):
            rows, cols = self._extent(name, rank)
            if rows:
                yield Region(name, rank, (0, rows), (0, cols)), self._first(name, rank)

    def _is_shard(self, name: str) -> bool:
        known = self.callers.get(name) or self.declared.buffers[name]
        return known.is_shard

    def _extent(self, name: str, rank: int) -> tuple[int, int]:
        """Rows and columns that a rank has of a matrix."""
        if name in self.declared.buffers:
            buffer = self.declared.buffers[name]
            return buffer.rows, buffer.cols
        matrix = self.callers[name]
        low, high = matrix.held(rank, self.world_size)
        return high - low, matrix.cols

    def _first(self, name: str, rank: int) -> int:
        """The row of the whole matrix that a rank's first is."""
        if name in self.declared.buffers:
            buffer = self.declared.buffers[name]
            return rank * buffer.rows if buffer.is_shard else 0
        matrix = self.callers[name]
        return matrix.held(rank, self.world_size)[0]

    def _channel(self, name: str) -> TileChannel:
        if name not in self.declared.channels:
            known = ", ".join(self.declared.channels)
            raise InputError(f"channel {name!r}", "unknown", f"Name one of {known}")
        return self.declared.channels[name]


def _waits_of(action: Await) -> Iterator[Wait]:
    return (Wait(action.channel, (at, at + 1), count) for at, count in action.counts if count)


def _counters_with_rows(channel: TileChannel) -> set[int]:
    """The counters that stand for any rows."""
    spans = (channel.counters_of_rows(*channel.tiles.rows_of(tile)) for tile in range(channel.tiles.count))
    return {counter for low, high in spans for counter in range(low, high)}
