"""Derives a Schedule from a tile program with static mappings, so that it is verified and simulated like any other.

Copies, signals and waits are those of the call; what a kernel's tiles wait for and signal follows from the mapping of
its channels. What tiles read and write is what the author declares (`TileEffect`), as for annotated kernels. A mapping
that is filled at run time cannot be verified: its waits have deadlines, and no more is guaranteed.
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
    ChannelArgument,
    Declared,
    Part,
    Reads,
    Sent,
    SymmetricBuffer,
    TaskTile,
    TileEffect,
    TileLaunch,
    TileMove,
    TileNotify,
    TileRetire,
    TileRows,
    TileTask,
    TileWait,
)

WriteCall = Callable[..., None]


@dataclass(frozen=True)
class CallersMatrix:
    """An operand that the caller passes, or a result that it gets. tensor: its logical name.

    is_shard: each rank has its rows of `[rows, cols]`, split as by torch.chunk; else all ranks have all rows.
    shift: a rank has the shard of rank - shift.
    """

    rows: int
    cols: int
    tensor: str
    is_shard: bool = False
    is_result: bool = False
    shift: int = 0

    def row_range(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the rows `[low, high)` that a rank has."""
        owner = (rank - self.shift) % world_size
        return shard_rows(self.rows, world_size, owner) if self.is_shard else (0, self.rows)


class _PlannedProgram(NamedTuple):
    """Stands for the TileProgram of one rank, without memory or peers."""

    rank: int
    world_size: int
    declared: Declared


@dataclass
class _RankProgram:
    """The operations of a rank in launch order. last: queue -> index of its last operation. waits: of its next one."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    waits: dict[str, list[Wait]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        self.last[operation.queue] = len(self.operations)
        self.operations.append(operation)

    def add_no_op(self, queue: str) -> None:
        """Add an empty Copy that takes the pending waits of a queue."""
        name, waits = f"idle.{self.rank}.{len(self.operations)}", self.pop_waits(queue)
        self.add(Copy(name=name, rank=self.rank, queue=queue, waits=waits, sources=(), destinations=()))

    def pop_waits(self, queue: str) -> tuple[Wait, ...]:
        """Return the pending waits of a queue, and clear them."""
        return tuple(self.waits.pop(queue, ()))

    def add_notify(self, queue: str, notify: Notify) -> None:
        """Let the queue's last operation signal that it is done; after a kernel or a wait, a new empty Copy does."""
        # The tiles of a kernel that is launched in `queue` have a queue of their own, `queue.N`.
        if self.waits.get(queue) or self.last.get(queue, -1) < max(
            (at for name, at in self.last.items() if name.startswith(f"{queue}.")), default=0
        ):
            self.add_no_op(queue)
        at = self.last[queue]
        notifies = self.operations[at].notifies
        self.operations[at] = replace(self.operations[at], notifies=(*notifies, notify))


def tile_schedule(
    name: str, declared: Declared, callers: Mapping[str, CallersMatrix], world_size: int, write: WriteCall
) -> Schedule:
    """Return the Schedule of the call that `write(call, **matrices)` records, on each of `world_size` ranks.

    callers: the caller's operands and results; `write` gets a Part of each, by name. Raises InputError for a launch
    without declared effects, or whose mapping is filled at run time.
    """
    builder = _ScheduleBuilder(declared, dict(callers), world_size)
    by_rank = [builder.operations_of(rank, write) for rank in range(world_size)]
    names = list(dict.fromkeys(one.queue for operations in by_rank for one in operations))
    queues = (Queue(name, "issue" if "." in name else "complete", _same_stream(names, name)) for name in names)
    ranks = range(world_size)
    return Schedule(
        name=name,
        world_size=world_size,
        buffers=tuple(builder.buffers()),
        pads=tuple(SignalPad(pad, channel.signals) for pad, channel in declared.channels.items()),
        queues=tuple(queues),
        credits=tuple(Credit(giver, taker) for giver in ranks for taker in ranks if giver != taker),
        given=tuple(builder.initial_contents()),
        goal=tuple(builder.goals()),
        operations=tuple(operation for operations in by_rank for operation in operations),
    )


def _same_stream(names: list[str], name: str) -> tuple[str, ...]:
    """Return the other queues of the stream of a queue: work of one stream runs in launch order, kernels included."""
    stream = name.partition(".")[0]
    return tuple(other for other in names if other != name and other.partition(".")[0] == stream)


class _ScheduleBuilder:
    """Derives the operations of each rank, and the buffers, initial contents and goals of all.

    nonempty_counters: channel -> its counters to which tiles with rows add; no other is waited for.
    """

    def __init__(self, declared: Declared, callers: dict[str, CallersMatrix], world_size: int) -> None:
        self.declared, self.callers, self.world_size = declared, callers, world_size
        self.nonempty_counters = {name: _nonempty_counters(channel) for name, channel in declared.channels.items()}

    def operations_of(self, rank: int, write: WriteCall) -> list[Operation]:
        """Record the call of a rank, and return its operations in launch order."""
        places = {name: SymmetricBuffer(*self._shape(name, rank), torch.float32) for name in self.callers}
        declared = Declared({**self.declared.buffers, **places}, self.declared.channels)
        call = TileCall(_PlannedProgram(rank, self.world_size, declared))
        write(call, **{name: call.part(name) for name in self.callers})
        program = _RankProgram(rank)
        for queue, action in call.steps:
            self._add_action(program, queue, action)
        for queue in list(program.waits):
            program.add_no_op(queue)
        return program.operations

    def _add_action(self, program: _RankProgram, queue: str, action: object) -> None:
        """Append the operations of one recorded step."""
        if isinstance(action, TileWait):
            program.waits.setdefault(queue, []).extend(_waits_of(action))
        elif isinstance(action, TileNotify):
            program.add_notify(queue, Notify(action.channel, action.rank, action.counter))
        elif isinstance(action, TileMove):
            program.add(self._copy_operation(program, queue, action))
        elif isinstance(action, TileRetire):
            program.add(self._retire_operation(program, queue, action))
        elif isinstance(action, TileTask):
            if program.waits.get(queue):
                program.add_no_op(queue)
            kernel = f"{queue}.{len(program.operations)}"
            for number, tile in enumerate(action.tiles):
                self._add_task_tile(program, kernel, action.name, (number, tile))
        elif isinstance(action, TileRows):
            self._add_rows(program, queue, action)
        elif isinstance(action, TileLaunch):
            if program.waits.get(queue):
                program.add_no_op(queue)
            for apply in self._launch_tiles(program, f"{queue}.{len(program.operations)}", action):
                program.add(apply)

    def _add_rows(self, program: _RankProgram, queue: str, rows: TileRows) -> None:
        """Append one Put a peer, of all rows that may be sent, and one kernel tile for all that is computed."""
        for name, shard in rows.awaits:
            channel = self._channel(name)
            counters = range(shard * channel.channels, (shard + 1) * channel.channels)
            waits = [Wait(name, (at, at + 1), channel.count_of(at)) for at in counters]
            program.waits.setdefault(queue, []).extend(waits)
        if program.waits.get(queue):
            program.add_no_op(queue)
        for sent in rows.sends:
            program.add(self._put_operation(program, queue, sent))
        if rows.makes:
            kernel = f"{queue}.{len(program.operations)}"
            self._add_task_tile(program, kernel, rows.name, (0, TaskTile(rows.reads, rows.makes)))

    def _put_operation(self, program: _RankProgram, queue: str, sent: Sent) -> Put:
        """Return the Put of the rows that go to one peer, which signals it."""
        rank = program.rank
        return Put(
            name=f"{sent.channel}.{rank}.{len(program.operations)}",
            rank=rank,
            queue=queue,
            notifies=(Notify(sent.channel, sent.peer, sent.counter),),
            sources=tuple(self._region(source) for source, _ in sent.moves),
            destinations=tuple(self._region(target) for _, target in sent.moves),
            tiles=sent.programs,
        )

    def _copy_operation(self, program: _RankProgram, queue: str, move: TileMove) -> Operation:
        source, target = self._region(move.source), self._region(move.target)
        rank, waits = program.rank, program.pop_waits(queue)
        kind: type[Put | Get | Copy] = Copy if source.rank == target.rank else Put if source.rank == rank else Get
        name = f"{kind.__name__.lower()}.{rank}.{len(program.operations)}"
        sides = ((), ()) if source.is_empty else ((source,), (target,))
        return kind(name=name, rank=rank, queue=queue, waits=waits, sources=sides[0], destinations=sides[1])

    def _retire_operation(self, program: _RankProgram, queue: str, ended: TileRetire) -> Retire:
        rank, region = program.rank, self._region(ended.part)
        name, waits = f"retire.{rank}.{len(program.operations)}", program.pop_waits(queue)
        return Retire(name=name, rank=rank, queue=queue, waits=waits, regions=() if region.is_empty else (region,))

    def _add_task_tile(self, program: _RankProgram, kernel: str, name: str, numbered: tuple[int, TaskTile]) -> None:
        """Append a tile of torch operations as an Apply. numbered: (index of the tile in its task, tile)."""
        rank, queue, (number, tile) = program.rank, kernel.partition(".")[0], numbered
        if not tile.makes and not tile.reads:
            found = "nobody says what it reads and makes"
            raise InputError(f"prove {name}", found, "Pass reads= and makes= of rank_compute")
        reads, makes = ([each for each in uses if each.part.shape[0]] for uses in (tile.reads, tile.makes))
        waits = tuple(_waits_of(tile.shard)) if tile.shard else ()
        needs = (InitialContents(self._region(each.part), each.tensor, each.row, each.col) for each in reads)
        if not reads and not makes:
            program.waits.setdefault(queue, []).extend(waits)
            return
        program.add(
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

    def _launch_tiles(self, program: _RankProgram, queue: str, launch: TileLaunch) -> Iterator[Operation]:
        """Yield an Apply for each tile of a kernel launch that this rank computes. Raises InputError."""
        rank = program.rank
        asked = f"prove the tiles of {launch.name}"
        if not launch.effects:
            raise InputError(asked, "nobody says what they read and make", "Pass tile_effects=(TileEffect(...), ...)")
        if any(isinstance(one, ChannelArgument) and one.is_dynamic for one in launch.arguments):
            raise InputError(asked, "their mapping is filled at run time", "Its waits are bounded; no more is proven")
        first = 0
        for effect in launch.effects:
            for tile in range(effect.tiles.count):
                if not effect.own or effect.tiles.rank_of(tile) == rank:
                    yield self._launch_tile(launch.name, rank, queue, effect, (tile, first + tile))
            first += effect.tiles.count

    def _launch_tile(self, function: str, rank: int, queue: str, effect: TileEffect, numbers: tuple[int, int]) -> Apply:
        """Return the Apply of a tile. numbers: its index in its TileEffect, and in the launch."""
        tile, number = numbers
        low, high = effect.tiles.rows_of(tile)
        return Apply(
            name=f"{function}.{rank}.{queue}.{number}",
            rank=rank,
            queue=queue,
            function=function,
            waits=tuple(wait for reads in effect.reads for wait in self._waits(reads, low, high)),
            notifies=tuple(self._notifies(effect, tile, rank)),
            needs=tuple(self._initial_contents(reads, rank, (low, high)) for reads in effect.reads),
            makes=tuple(self._results(effect, tile, rank)),
            tiles=((number, number + 1),),
        )

    def _waits(self, reads: Reads, low: int, high: int) -> Iterator[Wait]:
        """Yield the waits of a tile with rows `[low, high)` for a matrix that it reads."""
        if reads.channel is not None:
            channel = self._channel(reads.channel)
            all_rows = (0, channel.tiles.rows)
            for counter in range(*channel.counters_of_rows(*(all_rows if reads.all_rows else (low, high)))):
                if channel.count_of(counter):
                    yield Wait(reads.channel, (counter, counter + 1), channel.count_of(counter))

    def _initial_contents(self, reads: Reads, rank: int, rows: tuple[int, int]) -> InitialContents:
        height, cols = self._shape(reads.matrix, rank)
        first = self._first_row(reads.matrix, rank)
        low, high = (first, first + height) if reads.all_rows else rows
        return InitialContents(Region(reads.matrix, rank, (low - first, high - first), (0, cols)), reads.tensor, low, 0)

    def _destination_ranks(self, effect: TileEffect, tile: int, rank: int) -> Iterable[int]:
        """Return the ranks on which `rank` stores and signals a tile."""
        owner = {"local": rank, "p2p": effect.tiles.rank_of(tile)}
        return range(self.world_size) if effect.mode == "broadcast" else (owner[effect.mode],)

    def _results(self, effect: TileEffect, tile: int, rank: int) -> Iterator[Goal]:
        """Yield what a tile makes, and where it is stored, on each of its destination ranks."""
        low, high = effect.tiles.rows_of(tile)
        left = tile % effect.tiles.across * effect.tiles.tile_cols
        cols = (left, min(left + effect.tiles.tile_cols, effect.tiles.cols))
        for target in self._destination_ranks(effect, tile, rank):
            owner = effect.tiles.rank_of(tile) if self._is_shard(effect.makes) else target
            first = self._first_row(effect.makes, owner)
            region = Region(effect.makes, target, (low - first, high - first), cols)
            yield Goal(region, effect.tensor, low, left)

    def _notifies(self, effect: TileEffect, tile: int, rank: int) -> Iterator[Notify]:
        """Yield the signals of a tile; none for a counter without rows, which is not waited for."""
        if effect.tells is not None:
            channel = self._channel(effect.tells)
            counter = channel.counter_of(tile)
            if counter not in self.nonempty_counters[effect.tells]:
                return
            yield from (Notify(effect.tells, target, counter) for target in self._destination_ranks(effect, tile, rank))

    def buffers(self) -> Iterator[Buffer]:
        for name, matrix in self.callers.items():
            rows = -(-matrix.rows // self.world_size) if matrix.is_shard else matrix.rows
            yield Buffer(name, rows, matrix.cols, "output" if matrix.is_result else "input")
        for name, buffer in self.declared.buffers.items():
            yield Buffer(name, buffer.rows, buffer.cols, "symmetric")

    def initial_contents(self) -> Iterator[InitialContents]:
        for name, matrix in self.callers.items():
            if not matrix.is_result:
                yield from (InitialContents(region, matrix.tensor, row, 0) for region, row in self._held_regions(name))

    def goals(self) -> Iterator[Goal]:
        for name, matrix in self.callers.items():
            if matrix.is_result:
                yield from (Goal(region, matrix.tensor, row, 0) for region, row in self._held_regions(name))

    def _held_regions(self, name: str) -> Iterator[tuple[Region, int]]:
        """Yield (region, its first row in the whole matrix) of each rank that has rows of a caller's matrix."""
        for rank in range(self.world_size):
            rows, cols = self._shape(name, rank)
            if rows:
                yield Region(name, rank, (0, rows), (0, cols)), self._first_row(name, rank)

    def _is_shard(self, name: str) -> bool:
        known = self.callers.get(name) or self.declared.buffers[name]
        return known.is_shard

    def _shape(self, name: str, rank: int) -> tuple[int, int]:
        """Return (rows, columns) of a rank's part of a matrix."""
        if name in self.declared.buffers:
            buffer = self.declared.buffers[name]
            return buffer.rows, buffer.cols
        matrix = self.callers[name]
        low, high = matrix.row_range(rank, self.world_size)
        return high - low, matrix.cols

    def _first_row(self, name: str, rank: int) -> int:
        """Return the index, in the whole matrix, of the first row of a rank's part."""
        if name in self.declared.buffers:
            buffer = self.declared.buffers[name]
            return rank * buffer.rows if buffer.is_shard else 0
        matrix = self.callers[name]
        return matrix.row_range(rank, self.world_size)[0]

    def _channel(self, name: str) -> TileChannel:
        if name not in self.declared.channels:
            known = ", ".join(self.declared.channels)
            raise InputError(f"channel {name!r}", "unknown", f"Name one of {known}")
        return self.declared.channels[name]


def _waits_of(action: TileWait) -> Iterator[Wait]:
    return (Wait(action.channel, (at, at + 1), count) for at, count in action.counts if count)


def _nonempty_counters(channel: TileChannel) -> set[int]:
    """Return the counters to which tiles with rows add."""
    spans = (channel.counters_of_rows(*channel.tiles.rows_of(tile)) for tile in range(channel.tiles.count))
    return {counter for low, high in spans for counter in range(low, high)}
