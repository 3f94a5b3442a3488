"""How one tensor of an author's kernel is exchanged: a template of this room, under the tensor's own name.

`all_gather.push pieces=2` moves what every rank holds of a tensor that the kernel reads; `reduce_scatter.scatter` sums
what every rank's kernel writes. Rows are those of the tensor's first dimension. Templates speak of `x`, `y`, `a`; here
every buffer, pad and operation gets the tensor's name in front, so that several can stand in one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import CopyConfig
from overweave.ir.schedule import Range
from overweave.ir.tensors import product, received
from overweave.schedules.catalog.options import Settings, settle
from overweave.schedules.catalog.with_mover import by_hand_config, copy_config
from overweave.schedules.communication import (
    CARRYING_TILES,
    MAIN,
    SUMS,
    TILES,
    A,
    B,
    Communication,
    Split,
    X,
    Y,
)
from overweave.schedules.families.all_reduce import ReduceWay, all_reduce
from overweave.schedules.families.behind_tiles import carried_behind_tiles, in_parts
from overweave.schedules.families.beside_tiles import slice_rows
from overweave.schedules.families.reduce_scatter import ScatterWay, reduce_scatter
from overweave.schedules.families.reduced import Summing
from overweave.schedules.families.stored_at_peers import stored_at_peers
from overweave.schedules.moves.all_to_all import chunked_all_to_all
from overweave.schedules.moves.back_ends import PUSHES
from overweave.schedules.moves.gather import chunked_gather
from overweave.schedules.moves.mesh import mesh_of
from overweave.schedules.moves.moves import AllToAll, Gather, Reduction, Written, movers_in
from overweave.schedules.moves.reduction import KERNEL_COLS, chunked_reduction
from overweave.schedules.weave.renamed import renamed
from overweave.schedules.weave.spread import spread
from overweave.schedules.weave.transports import (
    GATHER,
    SPREAD,
    Asked,
    Transport,
    check_mover,
    options_of,
    transport_of,
)

MOVED_TILE = 32 << 10  # elements that a copy kernel moves between two signals


class Exchange(Struct, frozen=True, kw_only=True):
    """A tensor of a kernel and the communication that brings it here or takes it away."""

    operand: Operand
    transport: Transport
    communication: Communication
    copy: CopyConfig | None = None  # of the kernel that moves it, if one does

    def read(self, rank: int) -> str:
        """The tensor that a rank's tiles read: after an all-to-all every rank has one of its own."""
        return received(self.operand.tensor, rank) if self.transport.is_traded else self.operand.tensor

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
            return received(name, row // block), (rank - row // block) * block, ()
        return (name, rank * self.operand.rows, ()) if self.transport.side == SPREAD else (name, 0, ((rank, rank + 1),))


def exchange(space: TileSpace, tensor: str, words: Asked, world_size: int) -> Exchange:
    """The exchange that `words` ask for, such as `all_gather.push pieces=2`, or that a caller wrote by hand.

    Raises InputError for an unknown transport, option or tensor, ScheduleError for moves that do not gather it.
    """
    transport = transport_of(words)
    if not isinstance(words, str):
        return _by_hand(_operand(space, tensor, transport), words, space.tile_count, world_size)
    name, *pairs = words.split()
    operand = _operand(space, tensor, transport)
    settings = settle(name, transport.options, options_of(name, pairs))
    check_mover(name, settings.mover)
    axis = operand.dims[0].axis
    split = Split(
        rows=operand.rows,
        world_size=world_size,
        order=settings.order,
        pieces=settings.pieces,
        alignment=space.axis(axis).block if axis else 1,
        tile_rows=_moved_rows(operand, settings, (space.tile_count, world_size)),
    )
    if transport.written and not isinstance(transport.written, ScatterWay | ReduceWay):
        moves = transport.written(mesh_of(split, operand.cols, settings))
        return _written(operand, moves, transport, space.tile_count)
    made = _communication(split, operand, transport, settings)
    if settings.mover in CARRYING_TILES:
        made = stored_at_peers(made)
    elif settings.mover != "copy_engine":
        made = carried_behind_tiles(made, split.tile_rows)
    return Exchange(
        operand=operand,
        transport=transport,
        communication=made,
        copy=copy_config(settings),
    )


def _moved_rows(operand: Operand, settings: Settings, tiles_of_ranks: tuple[int, int]) -> int:
    """Rows that a kernel moves between two signals."""
    tiles, ranks = tiles_of_ranks
    if settings.mover in CARRYING_TILES:
        return slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    return max(1, MOVED_TILE // max(1, operand.cols))


def _by_hand(operand: Operand, written: Written, tiles: int, world_size: int) -> Exchange:
    if written.world_size != world_size:
        found, asked = f"the group has {world_size} ranks", f"exchange {operand.tensor} on {written.world_size} ranks"
        raise InputError(asked, found, "Write its moves for this group")
    if isinstance(written, Gather) and written.ranges > 1:
        found = f"its shards are {written.ranges} ranges of rows each, and an author's tiles read one"
        raise ScheduleError(f"exchange {operand.tensor} by hand", found, "Gather shards of one range")
    return _written(operand, written, transport_of(written), tiles)


def _written(operand: Operand, written: Written, transport: Transport, tiles: int) -> Exchange:
    """tiles: of the kernel."""
    made = _communicated(written, operand)
    ranks = written.world_size
    slices = slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    made = in_parts(made, {PUSHES: max(1, MOVED_TILE // max(1, operand.cols)), TILES: slices})
    is_away = transport.side != GATHER and "tiles" in movers_in(written)
    return Exchange(
        operand=operand,
        transport=transport,
        communication=stored_at_peers(made) if is_away else made,
        copy=by_hand_config(written),
    )


def _communicated(written: Written, operand: Operand) -> Communication:
    if isinstance(written, AllToAll):
        name = operand.tensor
        tensors = {received(A, rank): received(name, rank) for rank in range(written.world_size)}
        made = chunked_all_to_all(written, operand.rows, operand.cols)
        return renamed(made, name, {X: name, Y: name}, tensors)
    return _gathered(written, operand) if isinstance(written, Gather) else _reduced(written, operand)


def _gathered(gather: Gather, operand: Operand) -> Communication:
    name = operand.tensor
    return renamed(chunked_gather(gather, operand.rows, operand.cols), name, {X: name}, {A: name})


def _reduced(reduction: Reduction, operand: Operand) -> Communication:
    name, held = operand.tensor, tuple((rank, rank + 1) for rank in range(reduction.world_size))
    made = chunked_reduction(reduction, operand.rows, operand.cols, held)
    return renamed(made, name, {Y: name}, {product(A, B): name})


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


def _communication(split: Split, operand: Operand, transport: Transport, settings: Settings) -> Communication:
    name = operand.tensor
    if transport.side == SPREAD:
        whole = replace(split, rows=split.world_size * split.rows)
        made = spread(whole, operand.cols, by_library=not transport.is_woven)
        return renamed(made, name, {Y: name}, {A: name})
    held = tuple((rank, rank + 1) for rank in range(split.world_size))
    if isinstance(transport.written, ReduceWay):
        reduced = all_reduce(split, operand.cols, transport.written, held, Summing())
        return renamed(reduced, name, {Y: name}, {product(A, B): name})
    assert isinstance(transport.written, ScatterWay)
    by_kernel = operand.cols % KERNEL_COLS == 0
    sums, own_pieces = (SUMS, settings.own_pieces) if by_kernel else (MAIN, 1)
    made = reduce_scatter(split, operand.cols, transport.written, held, sums, own_pieces)
    return renamed(made, name, {Y: name}, {product(A, B): name})
