"""The exchange of one tensor of an author's kernel: the communication of a method or a hand-written list, renamed.

`all_gather.push pieces=2` moves what every rank holds of a tensor that the kernel loads; `reduce_scatter.scatter` sums
what every rank's kernel stores. Rows are those of the tensor's first dimension. Templates name their tensors `x`, `y`,
`a`; every buffer, pad and operation is renamed after the tensor, so that several stand in one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import LIBRARY, REDUCE_KERNEL, CopyConfig
from overweave.ir.schedule import Apply, Collective, Notify, Operation, Put, Range, Region, SignalPad, Wait
from overweave.ir.tensors import all_to_all_result, product
from overweave.schedules.communication import (
    CARRYING_TILES,
    EXCHANGES,
    PUSHES,
    TILES,
    A,
    B,
    Communication,
    MatmulChunk,
    Split,
    X,
    Y,
    in_parts,
    shifted,
    stored_at_peers,
)
from overweave.schedules.moves.moves import Gather, Reduction, Sum, Written, is_by_library
from overweave.schedules.moves.reduction import Placing, reduced
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.records.movers import by_hand_config, copy_config
from overweave.schedules.records.options import Settings, settle
from overweave.schedules.records.record import Method
from overweave.schedules.signals import with_signals
from overweave.schedules.weave.transports import (
    GATHER,
    SPREAD,
    ScheduleChoice,
    Transport,
    check_mover,
    held_of,
    moves_of,
    options_of,
    transport_of,
)

REDUCE_COLS_ALIGNMENT = 8  # columns that the reduction kernel needs a multiple of: it reads 16 bytes at once
COPY_TILE_ELEMENTS = 32 << 10  # elements that the copy kernel moves for each signal


class TensorExchange(Struct, frozen=True, kw_only=True):
    """A tensor of a kernel and the communication that gathers it, or sends or sums what the kernel stores."""

    operand: Operand
    transport: Transport
    communication: Communication
    copy: CopyConfig | None = None  # of the copy kernel, if one moves it
    library_sms: int = 0  # SMs that tiles leave to concurrent NCCL kernels

    def read_tensor(self, rank: int) -> str:
        """Return the logical tensor that a rank's tiles read: after an all-to-all each rank has its own."""
        return all_to_all_result(self.operand.tensor, rank) if self.transport.is_traded else self.operand.tensor

    def split_at_ranks(self, touched: Iterable[Range]) -> Iterator[Range]:
        """Yield ranges of rows that tiles store, split where the destination rank changes, as in an all-to-all."""
        block = self.operand.rows // self.communication.world_size
        for lo, hi in touched:
            is_split = self.transport.is_traded and block
            edges = [lo, *range(-(-(lo + 1) // block) * block, hi, block), hi] if is_split else [lo, hi]
            yield from pairwise(edges)

    def written_value(self, rank: int, row: int) -> tuple[str, int, tuple[Range, ...]]:
        """Return what a rank's tiles store at a row: (logical tensor, row offset in it, ranks of its terms of a
        sum)."""
        name = self.operand.tensor
        if self.transport.is_traded:
            block = self.operand.rows // self.communication.world_size
            return all_to_all_result(name, row // block), (rank - row // block) * block, ()
        return (name, rank * self.operand.rows, ()) if self.transport.side == SPREAD else (name, 0, ((rank, rank + 1),))


def exchange(space: TileSpace, tensor: str, choice: ScheduleChoice, world_size: int) -> TensorExchange:
    """Return the exchange of a tensor by a named schedule, such as `all_gather.push pieces=2`, or a hand-written one.

    Raises InputError for an unknown transport, option or tensor, ScheduleError for moves that do not gather it.
    """
    transport = transport_of(choice)
    operand = _find_operand(space, tensor, transport)
    if not isinstance(choice, str):
        _check_by_hand(operand, choice, world_size)
        return _exchange_by_hand(operand, choice, transport, space.tile_count)
    name, *pairs = choice.split()
    settings = settle(name, transport.options, options_of(name, pairs))
    check_mover(name, settings.mover)
    is_spread = transport.side == SPREAD and not transport.is_traded
    split = Split(
        rows=operand.rows * (world_size if is_spread else 1),
        world_size=world_size,
        order=settings.order,
        pieces=settings.pieces,
        alignment=space.entries(operand.dims[0]),
        mover=settings.mover,
        tile_rows=_rows_per_signal(operand, settings, (space.tile_count, world_size)),
    )
    assert transport.method is not None, f"{name} is no method"
    communication = _with_tensor_names(_method_communication(transport.method, settings, split, operand.cols), operand)
    library_sms = settings.library_sms if any(queue.name == EXCHANGES for queue in communication.queues) else 0
    return TensorExchange(
        operand=operand,
        transport=transport,
        communication=communication,
        copy=copy_config(settings),
        library_sms=library_sms,
    )


def _method_communication(method: Method, settings: Settings, split: Split, cols: int) -> Communication:
    """Return a method's communication; sums by torch if columns do not fit the reduction kernel, or library calls
    carry partial sums."""
    by_torch = cols % REDUCE_COLS_ALIGNMENT != 0 or (method.has_levels and settings.carrier == LIBRARY)
    if method.adds and method.adds.by == REDUCE_KERNEL and by_torch:
        method, settings = replace(method, adds=replace(method.adds, by=LIBRARY)), replace(settings, own_pieces=1)
    return moves_of(method, split, settings, cols)


def _rows_per_signal(operand: Operand, settings: Settings, tiles_of_ranks: tuple[int, int]) -> int:
    """Return how many rows a kernel moves for each signal."""
    tiles, ranks = tiles_of_ranks
    if settings.mover in CARRYING_TILES:
        return slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    return max(1, COPY_TILE_ELEMENTS // max(1, operand.cols))


def _check_by_hand(operand: Operand, moves: Written, world_size: int) -> None:
    """Raise InputError or ScheduleError for a hand-written list that an author's kernel cannot be woven into."""
    if moves.world_size != world_size:
        found, asked = f"the group has {world_size} ranks", f"exchange {operand.tensor} on {moves.world_size} ranks"
        raise InputError(asked, found, "Write its moves for this group")
    if isinstance(moves, Gather) and moves.ranges > 1:
        found = f"its shards are {moves.ranges} ranges of rows each, and an author's tiles read one"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Gather shards of one range")
    if any(isinstance(move, Sum) and move.by == "tiles" for move in moves.moves):
        found = "its tiles are to add, and an author's store what they compute"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Let a kernel add: leave `by` out")
    if any(getattr(move, word, False) for move in moves.moves for word in ("adds", "in_place")):
        found = "what moves is to be added on its way, or read where it lies, and only kernels of operators do that"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Leave `adds` and `in_place` out")


def _exchange_by_hand(operand: Operand, moves: Written, transport: Transport, tiles: int) -> TensorExchange:
    """Return the exchange of a hand-written list of moves. tiles: the number of the kernel's tiles."""
    ranks, is_store = moves.world_size, transport.side != GATHER
    slice_height = slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    rows_per_chunk = {PUSHES: max(1, COPY_TILE_ELEMENTS // max(1, operand.cols)), TILES: slice_height}
    has_calls = any(map(is_by_library, moves.moves))
    if isinstance(moves, Reduction):
        options = Placing(by_library=has_calls or operand.cols % REDUCE_COLS_ALIGNMENT != 0)
        communication = reduced(moves, (operand.rows, operand.cols), held_of(ranks), rows_per_chunk, options)
    else:
        rows = operand.rows * (ranks if transport.side == SPREAD and not transport.is_traded else 1)
        communication = in_parts(transferred(moves, rows, operand.cols, sends=is_store), rows_per_chunk)
        communication = stored_at_peers(communication) if is_store else communication
    return TensorExchange(
        operand=operand,
        transport=transport,
        communication=_with_tensor_names(communication, operand),
        copy=by_hand_config(moves),
        library_sms=Settings().library_sms if has_calls else 0,
    )


def _with_tensor_names(communication: Communication, operand: Operand) -> Communication:
    """Return the communication with its signals, renamed after the tensor."""
    name = operand.tensor
    tensors = {all_to_all_result(A, rank): all_to_all_result(name, rank) for rank in range(communication.world_size)}
    return rename_communication(
        with_signals(communication), name, {X: name, Y: name}, {A: name, product(A, B): name} | tensors
    )


def _find_operand(space: TileSpace, tensor: str, transport: Transport) -> Operand:
    """Return the kernel's load (of a gather) or store of a tensor. Raises InputError if there is none, or it is
    empty."""
    operands, verb = (space.loads, "loads") if transport.side == GATHER else (space.stores, "stores")
    for operand in operands:
        if operand.tensor == tensor:
            if not operand.rows * operand.cols:
                found = f"it has {operand.rows} rows of {operand.cols} elements"
                raise InputError(f"exchange {tensor}", found, "There is nothing to exchange")
            return operand
    known = ", ".join(operand.tensor for operand in operands) or "none"
    raise InputError(f"exchange {tensor[:40]}", f"{space.kernel} {verb} {known}", f"Name a tensor that it {verb}")


def rename_communication(
    communication: Communication, prefix: str, buffers: dict[str, str], tensors: dict[str, str]
) -> Communication:
    """Return the communication with `prefix` before every name but the mapped ones, and those of queues."""
    names = _Renaming(prefix, buffers, tensors)
    return Communication(
        world_size=communication.world_size,
        buffers=tuple(replace(buffer, name=names.buffer(buffer.name)) for buffer in communication.buffers),
        pads=tuple(SignalPad(names.prefixed(pad.name), pad.size) for pad in communication.pads),
        queues=communication.queues,
        given=tuple(
            replace(contents, region=names.region(contents.region), tensor=names.tensor(contents.tensor))
            for contents in communication.given
        ),
        goal=tuple(
            replace(contents, region=names.region(contents.region), tensor=names.tensor(contents.tensor))
            for contents in communication.goal
        ),
        steps=tuple(names.step(step) for step in communication.steps),
    )


class _Renaming(Struct, frozen=True):
    prefix: str
    buffers: dict[str, str]
    tensors: dict[str, str]

    def prefixed(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def buffer(self, name: str) -> str:
        return self.buffers.get(name, self.prefixed(name))

    def tensor(self, name: str) -> str:
        return self.tensors.get(name, name)

    def region(self, region: Region) -> Region:
        return replace(region, buffer=self.buffer(region.buffer))

    def step(self, step: Operation | MatmulChunk) -> Any:
        """Return a step with all names in its regions, waits and notifies renamed."""
        changed: dict[str, Any] = {"name": self.prefixed(step.name)}
        if isinstance(step, Collective):
            changed["label"] = self.prefixed(step.label)
        for field in step.__struct_fields__:
            value = getattr(step, field)
            if isinstance(value, Region):
                changed[field] = self.region(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Region | Wait | Notify):
                changed[field] = tuple(self._rename(part) for part in value)
        return replace(step, **changed)

    def _rename(self, part: Region | Wait | Notify) -> Region | Wait | Notify:
        return self.region(part) if isinstance(part, Region) else replace(part, pad=self.prefixed(part.pad))


# Puts by the tiles of a kernel: a program that has claimed a tile first pushes a slice of what goes to peers.
#
# Slices are claimed in order, one by every program that claims a tile; a program about to wait claims more, until all
# slices that its tile may depend on are in flight. Slices wait for nothing, so they progress however few programs run:
# when an Apply waits, every Put before it is done or in flight.
# SOURCE: AutoOverlap 5 (communication on co-located SMs); Flux for tiles that serve their peers.


NotifierPositions = Mapping[
    tuple[int, str, int], int
]  # (rank, pad, signal) -> position of the Put that notifies it, among its sender's
LEAST_SLICE = 8 << 10  # elements: a release to a peer should take little beside the slice's own time


def slice_rows(rows: int, cols: int, tiles: int) -> int:
    """Return the rows of a slice of a shard of `rows` rows, so that `tiles` tiles push one slice each.

    A slice has at least LEAST_SLICE elements; then some tiles push none.
    """
    return max(1, -(-rows // max(1, tiles)), -(-LEAST_SLICE // max(1, cols)))


def push_from_workspace(put: Put, own_chunk: MatmulChunk | None, buffer: str) -> Put:
    """Return the Put with its sources in workspace buffer `buffer`, where the kernel's own rows are copied first.

    own_chunk: the rows of the tensor that the caller holds; None if the schedule copies them itself, or there are none.
    Raises ScheduleError for rows that the workspace does not have.
    """
    if own_chunk is None:
        return replace(
            put, sources=tuple(Region(buffer, put.rank, target.rows, target.cols) for target in put.destinations)
        )
    (lo, hi), row_shift = own_chunk.region.rows, own_chunk.rows[0] - own_chunk.region.rows[0]
    for source in put.sources:
        if not source.is_empty and not lo <= source.rows[0] <= source.rows[1] <= hi:
            found = f"{put.name} sends {source}, to which the kernel has no pointer"
            cure = "Use mover=copy_engine, or a kernel that loads by pointers, with shards of whole tiles"
            raise ScheduleError("let tiles carry a transfer", found, cure)
    sources = (Region(buffer, put.rank, shifted(source.rows, row_shift), source.cols) for source in put.sources)
    return replace(put, sources=tuple(sources))


def notifier_positions(puts: Mapping[int, list[Put]]) -> NotifierPositions:
    """Return for each signal the position of its notifying Put among its sender's Puts. puts: by rank, in order."""
    return {
        (notify.rank, notify.pad, notify.signal): position
        for of_rank in puts.values()
        for position, put in enumerate(of_rank)
        for notify in put.notifies
    }


def interleave_puts(
    applies: Iterable[Apply], tensors: list[tuple[list[Put], NotifierPositions]]
) -> Iterator[Operation]:
    """Yield a rank's Applies, each after the rank's own Puts up to the positions of the Puts that the Apply waits for.

    So all ranks send alike before they wait, and none waits for a Put that its sender issues after a wait of its own.
    tensors: of each, this rank's Puts, and `notifier_positions`. All Puts come before the last Apply.
    """
    listed, yielded = list(applies), [0] * len(tensors)
    for at, apply in enumerate(listed):
        signals = [(apply.rank, wait.pad, one) for wait in apply.all_waits for one in range(*wait.signals)]
        for index, (puts, positions) in enumerate(tensors):
            ends = [positions[signal] + 1 for signal in signals if signal in positions]
            end = len(puts) if at == len(listed) - 1 else max(ends, default=0)
            yield from puts[yielded[index] : end]
            yielded[index] = max(yielded[index], end)
        yield apply
