"""How one tensor of an author's kernel is exchanged: a template of this room, under the tensor's own name.

`all_gather.push pieces=2` moves what every rank holds of a tensor that the kernel reads; `reduce_scatter.scatter` sums
what every rank's kernel writes. Rows are those of the tensor's first dimension. Templates speak of `x`, `y`, `a`; here
every buffer, pad and operation gets the tensor's name in front, so that several can stand in one schedule.
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

KERNEL_COLS = 8  # the kernel that sums reads words of 16 bytes
MOVED_TILE = 32 << 10  # elements that a copy kernel moves between two signals


class TensorExchange(Struct, frozen=True, kw_only=True):
    """A tensor of a kernel and the communication that brings it here or takes it away."""

    operand: Operand
    transport: Transport
    communication: Communication
    copy: CopyConfig | None = None  # of the kernel that moves it, if one does
    library_sms: int = 0  # that tiles leave to the library's calls beside them

    def read(self, rank: int) -> str:
        """The tensor that a rank's tiles read: after an all-to-all every rank has one of its own."""
        return all_to_all_result(self.operand.tensor, rank) if self.transport.is_traded else self.operand.tensor

    def apart(self, touched: Iterable[Range]) -> Iterator[Range]:
        """Rows that tiles write, cut where they are another rank's: in an all-to-all every block is."""
        block = self.operand.rows // self.communication.world_size
        for lo, hi in touched:
            is_cut = self.transport.is_traded and block
            edges = [lo, *range(-(-(lo + 1) // block) * block, hi, block), hi] if is_cut else [lo, hi]
            yield from pairwise(edges)

    def made(self, rank: int, row: int) -> tuple[str, int, tuple[Range, ...]]:
        """What a rank's tiles write at a row: of which tensor, how many rows further there, its terms of a sum."""
        name = self.operand.tensor
        if self.transport.is_traded:
            block = self.operand.rows // self.communication.world_size
            return all_to_all_result(name, row // block), (rank - row // block) * block, ()
        return (name, rank * self.operand.rows, ()) if self.transport.side == SPREAD else (name, 0, ((rank, rank + 1),))


def exchange(space: TileSpace, tensor: str, words: ScheduleChoice, world_size: int) -> TensorExchange:
    """The exchange that `words` ask for, such as `all_gather.push pieces=2`, or that a caller wrote by hand.

    Raises InputError for an unknown transport, option or tensor, ScheduleError for moves that do not gather it.
    """
    transport = transport_of(words)
    operand = _operand(space, tensor, transport)
    if not isinstance(words, str):
        _check_by_hand(operand, words, world_size)
        return _written(operand, words, transport, space.tile_count)
    name, *pairs = words.split()
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
        tile_rows=_moved_rows(operand, settings, (space.tile_count, world_size)),
    )
    assert transport.method is not None, f"{name} is no method"
    made = _named(_by_method(transport.method, settings, split, operand.cols), operand)
    beside = settings.library_sms if any(queue.name == EXCHANGES for queue in made.queues) else 0
    return TensorExchange(
        operand=operand, transport=transport, communication=made, copy=copy_config(settings), library_sms=beside
    )


def _by_method(method: Method, settings: Settings, split: Split, cols: int) -> Communication:
    """A method's moves. A library adds rows that a kernel cannot read, and what its own calls carry."""
    is_left = cols % KERNEL_COLS != 0 or (method.has_levels and settings.carrier == LIBRARY)
    if method.adds and method.adds.by == REDUCE_KERNEL and is_left:
        method, settings = replace(method, adds=replace(method.adds, by=LIBRARY)), replace(settings, own_pieces=1)
    return moves_of(method, split, settings, cols)


def _moved_rows(operand: Operand, settings: Settings, tiles_of_ranks: tuple[int, int]) -> int:
    """Rows that a kernel moves between two signals."""
    tiles, ranks = tiles_of_ranks
    if settings.mover in CARRYING_TILES:
        return slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    return max(1, MOVED_TILE // max(1, operand.cols))


def _check_by_hand(operand: Operand, written: Written, world_size: int) -> None:
    if written.world_size != world_size:
        found, asked = f"the group has {world_size} ranks", f"exchange {operand.tensor} on {written.world_size} ranks"
        raise InputError(asked, found, "Write its moves for this group")
    if isinstance(written, Gather) and written.ranges > 1:
        found = f"its shards are {written.ranges} ranges of rows each, and an author's tiles read one"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Gather shards of one range")
    if any(isinstance(move, Sum) and move.by == "tiles" for move in written.moves):
        found = "its tiles are to add, and an author's store what they compute"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Let a kernel add: leave `by` out")
    if any(getattr(move, word, False) for move in written.moves for word in ("adds", "in_place")):
        found = "what moves is to be added on its way, or read where it lies, and only kernels of operators do that"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Leave `adds` and `in_place` out")


def _written(operand: Operand, written: Written, transport: Transport, tiles: int) -> TensorExchange:
    """tiles: of the kernel."""
    ranks, is_written = written.world_size, transport.side != GATHER
    slices = slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    parts = {PUSHES: max(1, MOVED_TILE // max(1, operand.cols)), TILES: slices}
    has_calls = any(map(is_by_library, written.moves))
    if isinstance(written, Reduction):
        how = Placing(by_library=has_calls or operand.cols % KERNEL_COLS != 0)
        made = reduced(written, (operand.rows, operand.cols), held_of(ranks), parts, how)
    else:
        rows = operand.rows * (ranks if transport.side == SPREAD and not transport.is_traded else 1)
        made = in_parts(transferred(written, rows, operand.cols, sends=is_written), parts)
        made = stored_at_peers(made) if is_written else made
    return TensorExchange(
        operand=operand,
        transport=transport,
        communication=_named(made, operand),
        copy=by_hand_config(written),
        library_sms=Settings().library_sms if has_calls else 0,
    )


def _named(made: Communication, operand: Operand) -> Communication:
    """With its signals, under the tensor's own name."""
    name = operand.tensor
    tensors = {all_to_all_result(A, rank): all_to_all_result(name, rank) for rank in range(made.world_size)}
    return renamed(with_signals(made), name, {X: name, Y: name}, {A: name, product(A, B): name} | tensors)


def _operand(space: TileSpace, tensor: str, transport: Transport) -> Operand:
    side, word = (space.loads, "loads") if transport.side == GATHER else (space.stores, "stores")
    for operand in side:
        if operand.tensor == tensor:
            if not operand.rows * operand.cols:
                found = f"it has {operand.rows} rows of {operand.cols} elements"
                raise InputError(f"exchange {tensor}", found, "There is nothing to exchange")
            return operand
    known = ", ".join(operand.tensor for operand in side) or "none"
    raise InputError(f"exchange {tensor[:40]}", f"{space.kernel} {word} {known}", f"Name a tensor that it {word}")


# A communication under other names, so that several can stand in one schedule.


def renamed(made: Communication, prefix: str, buffers: dict[str, str], tensors: dict[str, str]) -> Communication:
    """The same communication with every name its own. Queues keep their names: they are shared."""
    names = _Names(prefix, buffers, tensors)
    return Communication(
        world_size=made.world_size,
        buffers=tuple(replace(buffer, name=names.buffer(buffer.name)) for buffer in made.buffers),
        pads=tuple(SignalPad(names.own(pad.name), pad.size) for pad in made.pads),
        queues=made.queues,
        given=tuple(replace(g, region=names.region(g.region), tensor=names.tensor(g.tensor)) for g in made.given),
        goal=tuple(replace(g, region=names.region(g.region), tensor=names.tensor(g.tensor)) for g in made.goal),
        steps=tuple(names.step(step) for step in made.steps),
    )


class _Names(Struct, frozen=True):
    prefix: str
    buffers: dict[str, str]
    tensors: dict[str, str]

    def own(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def buffer(self, name: str) -> str:
        return self.buffers.get(name, self.own(name))

    def tensor(self, name: str) -> str:
        return self.tensors.get(name, name)

    def region(self, region: Region) -> Region:
        return replace(region, buffer=self.buffer(region.buffer))

    def step(self, step: Operation | MatmulChunk) -> Any:
        """Every field that holds regions, waits or notifies, whatever kind of step it is."""
        changed: dict[str, Any] = {"name": self.own(step.name)}
        if isinstance(step, Collective):
            changed["label"] = self.own(step.label)
        for field in step.__struct_fields__:
            value = getattr(step, field)
            if isinstance(value, Region):
                changed[field] = self.region(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Region | Wait | Notify):
                changed[field] = tuple(self._part(part) for part in value)
        return replace(step, **changed)

    def _part(self, part: Region | Wait | Notify) -> Region | Wait | Notify:
        return self.region(part) if isinstance(part, Region) else replace(part, pad=self.own(part.pad))


# Puts that the tiles of a kernel carry: a program that has claimed a tile first moves a slice of what goes to peers.
#
# Slices are claimed in order, one by every program that claims a tile, and whoever is about to wait claims more until
# all that its tile may depend on are under way. Slices wait for nothing, so whatever few programs run, they move: a Put
# that stands before an Apply has been moved, or is being moved, when that Apply waits.
# SOURCE: AutoOverlap 5 (communication on co-located SMs); Flux for tiles that serve their peers.


Announced = Mapping[tuple[int, str, int], int]  # of a rank's pad and signal: the place of its Put among its sender's
LEAST_SLICE = 8 << 10  # elements, as a release to a peer should be short beside what it announces


def slice_rows(rows: int, cols: int, tiles: int) -> int:
    """The rows of a slice of a shard of `rows` rows: `tiles` tiles carry one slice each, and together the whole shard.

    A slice has at least LEAST_SLICE elements; then some tiles carry none.
    """
    return max(1, -(-rows // max(1, tiles)), -(-LEAST_SLICE // max(1, cols)))


def from_workspace(put: Put, own: MatmulChunk | None, buffer: str) -> Put:
    """The same push, from where the kernel's own rows are copied before it. own: the caller's rows of the tensor; None
    where the schedule itself copies them, for peers that come for them, or where the rank has none.
    """
    if own is None:
        return replace(put, sources=tuple(Region(buffer, put.rank, to.rows, to.cols) for to in put.destinations))
    (lo, hi), by = own.region.rows, own.rows[0] - own.region.rows[0]
    for source in put.sources:
        if not source.is_empty and not lo <= source.rows[0] <= source.rows[1] <= hi:
            found = f"{put.name} sends {source}, to which the kernel has no pointer"
            cure = "Use mover=copy_engine, or a kernel that loads by pointers, with shards of whole tiles"
            raise ScheduleError("let tiles carry a transfer", found, cure)
    moved = (Region(buffer, put.rank, shifted(source.rows, by), source.cols) for source in put.sources)
    return replace(put, sources=tuple(moved))


def announced_by(puts: Mapping[int, list[Put]]) -> Announced:
    """Where among its sender's Puts each signal's stands. puts: of each rank, in launch order."""
    return {
        (notify.rank, notify.pad, notify.signal): place
        for of_rank in puts.values()
        for place, put in enumerate(of_rank)
        for notify in put.notifies
    }


def with_puts(applies: Iterable[Apply], moved: list[tuple[list[Put], Announced]]) -> Iterator[Operation]:
    """A rank's Applies, and in front of each what peers send by the same Puts that it waits for.

    So ranks send alike before they wait, and none waits for what only comes behind its own wait. moved: for each
    tensor, the rank's Puts, and where every signal's stands.
    """
    listed, sent = list(applies), [0] * len(moved)
    for at, apply in enumerate(listed):
        signals = [(apply.rank, wait.pad, one) for wait in apply.all_waits for one in range(*wait.signals)]
        for index, (puts, announced) in enumerate(moved):
            due = [announced[signal] + 1 for signal in signals if signal in announced]
            until = len(puts) if at == len(listed) - 1 else max(due, default=0)
            yield from puts[sent[index] : until]
            sent[index] = max(sent[index], until)
        yield apply
