"""How one tensor of an author's kernel is exchanged: a template of this room, under the tensor's own name.

`all_gather.push pieces=2` moves what every rank holds of a tensor that the kernel reads; `reduce_scatter.scatter` sums
what every rank's kernel writes. Rows are those of the tensor's first dimension. Templates speak of `x`, `y`, `a`; here
every buffer, pad and operation gets the tensor's name in front, so that several can stand in one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import CopyConfig, DataPath
from overweave.ir.schedule import (
    Range,
    product,
)
from overweave.schedules.all_gather import all_gather
from overweave.schedules.all_reduce import all_reduce
from overweave.schedules.all_to_all import receive, received, send
from overweave.schedules.back_ends import check_mover
from overweave.schedules.beside_tiles import carried_by_tiles, slice_rows
from overweave.schedules.chunked_gather import chunked_gather
from overweave.schedules.chunks import Gather
from overweave.schedules.communication import (
    CARRYING_TILES,
    COPIES,
    MAIN,
    SUMS,
    A,
    B,
    Chunk,
    Communication,
    Mover,
    Split,
    X,
    Y,
)
from overweave.schedules.gather_templates import TEMPLATES as GATHERS
from overweave.schedules.gather_templates import gather_moves
from overweave.schedules.mesh import mesh_of
from overweave.schedules.mover import copy_config
from overweave.schedules.options import (
    ANY_MOVER,
    AXIS,
    COL_PIECES,
    COPY_PROGRAMS,
    ISLAND,
    LANES,
    ORDER,
    OWN_PIECES,
    PIECES,
    Option,
    Settings,
    settle,
)
from overweave.schedules.reduce_scatter import reduce_scatter
from overweave.schedules.reduced import Summing
from overweave.schedules.renamed import renamed
from overweave.schedules.spread import Spread, spread
from overweave.schedules.stored_at_peers import stored_at_peers

Side = Literal["gather", "scatter", "spread"]
Asked = str | Gather  # a schedule by name and options, or written by hand
MOVED_TILE = 32 << 10  # elements that a copy kernel moves between two signals
PUSHES = f"{COPIES}.kernel"
KERNEL_COLS = 8  # the kernel that sums reads words of 16 bytes; other rows the library sums
GATHER: Final = "gather"
SCATTER: Final = "scatter"
SPREAD: Final = "spread"


class Transport(Struct, frozen=True):
    """A way to exchange a tensor.

    side: gather, for what a kernel reads; scatter, for what it writes and ranks sum; spread, for what it writes and
    ranks get as it is. gathers_sums: every rank gets all of the sum.
    """

    side: Side
    method: str
    summary: str
    options: tuple[Option, ...] = ()
    gathers_sums: bool = False

    @property
    def is_woven(self) -> bool:
        """Whether chunks move beside tiles, which then wait or signal; else all moves before the kernel, or behind."""
        return not self.method.endswith("collective")

    @property
    def direction(self) -> str:
        """`receive` or `send`, of an all-to-all."""
        direction = self.method.split("_")[0]
        return direction if direction in ("receive", "send") else ""


TRANSPORTS: dict[str, Transport] = {
    "all_gather.push": Transport(
        GATHER, "push", "each rank puts its pieces to its peers", (PIECES, ORDER, ANY_MOVER, COPY_PROGRAMS)
    ),
    "all_gather.pull": Transport(GATHER, "pull", "each rank gets its peers' pieces", (PIECES, ORDER, ANY_MOVER)),
    "all_gather.mesh": Transport(
        GATHER,
        "mesh",
        "chunks by rows and columns go straight to every rank of a mesh, line by line",
        (PIECES, COL_PIECES, ISLAND, AXIS, LANES),
    ),
    "all_gather.ring": Transport(
        GATHER, "ring", "every rank passes on what came from the next one", (PIECES, COL_PIECES, LANES)
    ),
    "all_gather.double_ring": Transport(
        GATHER, "double_ring", "two rings, one each way, take chunks by turns", (PIECES, COL_PIECES)
    ),
    "all_gather.islands": Transport(
        GATHER,
        "islands",
        "inside islands, while each shard crosses to others once and is passed on there",
        (PIECES, COL_PIECES, ISLAND),
    ),
    "all_gather.collective": Transport(GATHER, "collective", "the library's, before the kernel"),
    "reduce_scatter.scatter": Transport(
        SCATTER,
        "scatter",
        "pieces are put to their owner, who sums in rank order",
        (PIECES, ORDER, OWN_PIECES, ANY_MOVER),
    ),
    "reduce_scatter.ring": Transport(
        SCATTER, "ring", "pieces travel round the ring, summed on the way", (PIECES, ANY_MOVER)
    ),
    "reduce_scatter.collective": Transport(SCATTER, "collective", "the library's, behind the kernel"),
    "all_reduce.two_shot": Transport(
        SCATTER,
        "two_shot",
        "owners sum pieces in rank order and put them to all",
        (PIECES, ANY_MOVER),
        gathers_sums=True,
    ),
    "all_reduce.one_shot": Transport(
        SCATTER, "one_shot", "partials are put to every peer, and every rank sums them", (ORDER,), gathers_sums=True
    ),
    "all_reduce.collective": Transport(SCATTER, "collective", "the library's, behind the kernel", gathers_sums=True),
    "all_to_all.receive": Transport(
        GATHER,
        "receive",
        "block p of each rank is put to rank p, piece by piece",
        (PIECES, ORDER, ANY_MOVER, COPY_PROGRAMS),
    ),
    "all_to_all.send": Transport(SPREAD, "send", "what tiles store of block p is put to rank p", (PIECES, ANY_MOVER)),
    "all_to_all.receive_collective": Transport(GATHER, "receive_collective", "the library's, before the kernel"),
    "all_to_all.send_collective": Transport(SPREAD, "send_collective", "the library's, behind the kernel"),
    "spread.push": Transport(
        SPREAD, "spread", "what tiles store is put to every peer, piece by piece", (PIECES, ANY_MOVER)
    ),
}


BY_HAND = Transport(GATHER, "by_hand", "moves of chunks that the caller wrote down")


class Exchange(Struct, frozen=True, kw_only=True):
    """A tensor of a kernel and the communication that brings it here or takes it away."""

    operand: Operand
    method: str
    side: Side
    communication: Communication
    mover: Mover = "copy_engine"
    copy: CopyConfig | None = None  # of the kernel that moves it, if one does

    def read(self, rank: int) -> str:
        """The tensor that a rank's tiles read: after an all-to-all every rank has one of its own."""
        return received(self.operand.tensor, rank) if self.method.startswith("receive") else self.operand.tensor

    def made(self, rank: int, row: int) -> tuple[str, int, tuple[Range, ...]]:
        """What a rank's tiles write at a row: of which tensor, how many rows further there, its terms of a sum."""
        name = self.operand.tensor
        if self.method.startswith("send"):
            block = self.operand.rows // self.communication.world_size
            return received(name, row // block), (rank - row // block) * block, ()
        return (name, rank * self.operand.rows, ()) if self.side == SPREAD else (name, 0, ((rank, rank + 1),))


def exchange(space: TileSpace, tensor: str, words: Asked, world_size: int) -> Exchange:
    """The exchange that `words` ask for, such as `all_gather.push pieces=2`, or that a caller wrote by hand.

    Raises InputError for an unknown transport, option or tensor, ScheduleError for moves that do not gather it.
    """
    transport = transport_of(words)
    if not isinstance(words, str):
        return _by_hand(_operand(space, tensor, transport), words, world_size)
    name, *pairs = words.split()
    operand = _operand(space, tensor, transport)
    settings = settle(name, transport.options, _options(name, pairs))
    check_mover(name, transport.method, settings.mover)
    axis = operand.dims[0].axis
    split = Split(
        rows=operand.rows,
        world_size=world_size,
        order=settings.order,
        pieces=settings.pieces,
        alignment=space.axis(axis).block if axis else 1,
        mover=settings.mover if transport.side == GATHER else "copy_engine",
        tile_rows=_moved_rows(operand, settings, (space.tile_count, world_size)),
    )
    return Exchange(
        operand=operand,
        method=transport.method,
        side=transport.side,
        communication=_carried(_communication(split, operand, transport, settings), transport.side, settings.mover),
        mover=settings.mover,
        copy=copy_config(settings),
    )


def _moved_rows(operand: Operand, settings: Settings, tiles_of_ranks: tuple[int, int]) -> int:
    """Rows that a kernel moves between two signals."""
    tiles, ranks = tiles_of_ranks
    if settings.mover in CARRYING_TILES:
        return slice_rows(-(-operand.rows // ranks), operand.cols, tiles // ranks)
    return max(1, MOVED_TILE // max(1, operand.cols))


def _by_hand(operand: Operand, gather: Gather, world_size: int) -> Exchange:
    if gather.world_size != world_size:
        found = f"the group has {world_size} ranks"
        raise InputError(
            f"gather {operand.tensor} on {gather.world_size} ranks", found, "Write its moves for this group"
        )
    name = operand.tensor
    made = renamed(chunked_gather(gather, operand.rows, operand.cols), name, {X: name}, {A: name})
    return Exchange(operand=operand, method=BY_HAND.method, side=BY_HAND.side, communication=made)


def transport_of(words: object) -> Transport:
    """What a schedule's first word names. Raises InputError."""
    if isinstance(words, Gather):
        return BY_HAND
    if not isinstance(words, str):
        found = f"a {type(words).__name__}"
        raise InputError("schedule", found, "Give a name with options, or a Gather")
    name = words.split(maxsplit=1)[0] if words.strip() else ""
    if name not in TRANSPORTS:
        raise InputError(f"schedule {name[:40]!r}", "unknown", f"Schedules: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name]


def mover_of(words: Asked) -> Mover:
    """Who carries what a schedule moves. Raises InputError."""
    if not isinstance(words, str):
        return "copy_engine"
    name, *pairs = words.split()
    return settle(name, transport_of(words).options, _options(name, pairs)).mover


def path_of_slices(schedules: Iterable[Asked]) -> DataPath | None:
    """How the tiles of a kernel carry what goes to peers, if a schedule lets them."""
    movers: set[str] = set()
    for words in schedules:
        if transport_of(words).side == GATHER:
            movers.add(mover_of(words))
    carrying = sorted(movers.intersection(CARRYING_TILES))
    if len(carrying) > 1:
        raise InputError("let tiles carry two tensors", f"by {' and '.join(carrying)}", "Name one of them for both")
    return ("bulk" if carrying == ["bulk_tiles"] else "load_store") if carrying else None


def wanted_of(loads: Sequence[str], stores: Sequence[str], schedule: Asked | Mapping[str, Asked]) -> dict[str, Asked]:
    """tensor -> schedule, all of it checked and written anew. Raises InputError.

    One schedule alone stands for the first tensor that is read, or written.
    """
    if isinstance(schedule, str | Gather):
        side = loads if transport_of(schedule).side == GATHER else stores
        if not side:
            raise InputError(f"schedule {str(schedule)[:40]!r}", "the kernel reads no tensor", "Annotate a load")
        schedule = {side[0]: schedule}
    for tensor, words in schedule.items():
        known = loads if transport_of(words).side == GATHER else stores
        if tensor not in known:
            found = f"the kernel {'reads' if known is loads else 'writes'} {', '.join(known) or 'none'}"
            raise InputError(f"schedule {str(words)[:40]!r} for {tensor[:40]!r}", found, "Name one of its tensors")
    return {tensor: _rewritten(words) for tensor, words in schedule.items()}


def _rewritten(words: Asked) -> Asked:
    """The same schedule from what was parsed: nothing of a caller's text is kept."""
    if not isinstance(words, str):
        return words
    name, *pairs = words.split()
    asked = _options(name, pairs)
    settings = settle(name, TRANSPORTS[name].options, asked)
    check_mover(name, TRANSPORTS[name].method, settings.mover)
    return " ".join([name, *(f"{option}={getattr(settings, option)}" for option in asked)])


def _options(name: str, pairs: list[str]) -> dict[str, str | int]:
    options: dict[str, str | int] = {}
    for pair in pairs:
        option, separator, value = pair.partition("=")
        if not separator or option in options:
            raise InputError(f"schedule {name}", f"{pair[:40]!r} is no option, or stands twice", "Write option=value")
        options[option] = value
    return options


def _operand(space: TileSpace, tensor: str, transport: Transport) -> Operand:
    side, word = (space.loads, "loads") if transport.side == GATHER else (space.stores, "stores")
    for operand in side:
        if operand.tensor == tensor:
            return operand
    known = ", ".join(operand.tensor for operand in side) or "none"
    raise InputError(f"exchange {tensor[:40]}", f"{space.kernel} {word} {known}", f"Name a tensor that it {word}")


def _communication(split: Split, operand: Operand, transport: Transport, settings: Settings) -> Communication:
    name, ranks = operand.tensor, range(split.world_size)
    if transport.direction:
        template = receive if transport.direction == "receive" else send
        made = template(split, operand.cols, by_library=not transport.is_woven)
        tensors = {received(A, rank): received(name, rank) for rank in ranks}
        return renamed(made, name, {X: name, Y: name}, tensors)
    if transport.side == GATHER and transport.method in GATHERS:
        made = chunked_gather(
            gather_moves(transport.method, mesh_of(split, operand.cols, settings)), split.rows, operand.cols
        )
        return renamed(made, name, {X: name}, {A: name})
    if transport.side == GATHER:
        made = all_gather(split, operand.cols, transport.method)
        return renamed(made, operand.tensor, {X: operand.tensor}, {A: operand.tensor})
    if transport.side == SPREAD:
        how = Spread(
            rows=split.rows,
            cols=operand.cols,
            world_size=split.world_size,
            pieces=split.pieces,
            alignment=split.alignment,
        )
        return renamed(spread(how), operand.tensor, {Y: operand.tensor}, {A: operand.tensor})
    held = tuple((rank, rank + 1) for rank in range(split.world_size))
    if transport.gathers_sums:
        reduced = all_reduce(split, operand.cols, transport.method, held, Summing())
        return renamed(reduced, name, {Y: name}, {product(A, B): name})
    by_kernel = transport.method == "scatter" and operand.cols % KERNEL_COLS == 0
    sums, own_pieces = (SUMS, settings.own_pieces) if by_kernel else (MAIN, 1)
    made = reduce_scatter(split, operand.cols, transport.method, held, sums, own_pieces)
    return renamed(made, operand.tensor, {Y: operand.tensor}, {product(A, B): operand.tensor})


def _carried(made: Communication, side: Side, mover: Mover) -> Communication:
    """What a kernel carries has a queue of its own, beside those of the copy engine; what tiles store has none."""
    if mover == "copy_engine":
        return made
    if side != GATHER:
        return stored_at_peers(made)
    if mover in CARRYING_TILES:
        return carried_by_tiles(made)
    return replace(
        made,
        queues=tuple(replace(queue, name=PUSHES) if queue.name == COPIES else queue for queue in made.queues),
        steps=tuple(
            step if isinstance(step, Chunk) or step.queue != COPIES else replace(step, queue=PUSHES)
            for step in made.steps
        ),
    )
