"""What sums of every rank's partial have in common: where each part lies, who adds it, and in which order.

A partial `[rows, cols]` on every rank becomes their sum: on every rank, the same bits on all, or each rank's shard of
rows `[S, cols]`, S = ceil(rows / W). A family says what each rank does, in launch order, by what steps read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.plan import LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, TILE_KERNEL, Engine, ReduceConfig
from overweave.ir.schedule import (
    Buffer,
    Clear,
    Collective,
    Goal,
    Operation,
    Put,
    Range,
    Reduce,
    ReducePut,
    Region,
)
from overweave.ir.shards import piece_rows
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    EXCHANGES,
    MAIN,
    PACKED,
    PARTIAL,
    PUSHES,
    SLOTS,
    SUMS,
    TOTAL,
    A,
    B,
    Communication,
    MatmulChunk,
    Split,
    Y,
    communicated,
    in_parts,
    is_empty,
    queues_of,
    shifted,
)
from overweave.schedules.moves.peer_stores import stored_at_peers
from overweave.schedules.records.record import AddingOrder, MethodInputs

Steps = Iterator[Operation | MatmulChunk]


class SumFamily(NamedTuple):
    """What a rank of a group of several does. beside: whether a kernel that sums may run beside the tiles."""

    steps: Callable[[SumSpec, int], Steps]
    beside: bool = True


class SumSpec(Struct, frozen=True, kw_only=True):
    """One sum. everywhere: whether all ranks get all of it. by, order: who ends sums, and how, as a method says.

    own_pieces: parts of the own shard, each summed beside the tiles of the next one. held: the range of the reduced
    axis that each rank's partial holds. blocks: the tiles of a kernel that sums. is_normed: whether whoever moves a sum
    to the caller's `y` norms its rows. behind: as of a Communication.
    """

    split: Split
    cols: int
    held: tuple[Range, ...]
    everywhere: bool = False
    by: Engine = REDUCE_KERNEL
    order: AddingOrder = "rank"
    own_pieces: int = 1
    blocks: ReduceConfig = ReduceConfig()
    is_normed: bool = False
    behind: dict[str, tuple[Region, ...]] = {}

    @property
    def rows(self) -> Range:
        """All of them."""
        return 0, self.split.rows

    @property
    def is_by_tiles(self) -> bool:
        """Whether tiles add what arrived to their products."""
        return self.by == TILE_KERNEL

    def region(self, buffer: str, rank: int, rows: Range) -> Region:
        """Whole rows of a rank's instance of a buffer."""
        return Region(buffer, rank, rows, (0, self.cols))

    def slot(self, rank: int, source: int, rows: Range) -> Region:
        """Where rows of a rank's own shard lie there until they are added, from a source; what is added as it arrives
        has one place."""
        place = 0 if self.order == "arrival" else source * self.split.shard_size
        return self.region(SLOTS, rank, shifted(rows, place - self.split.shard(rank)[0]))

    def whole(self, rank: int, rows: Range) -> Region:
        """Where the sum of rows of a rank's own shard is left: in its `y`, or where peers get it from."""
        if self.everywhere:
            return self.region(TOTAL, rank, rows)
        return self.region(Y, rank, shifted(rows, -self.split.shard(rank)[0]))

    def parts(self, rank: int, pieces: int | None = None) -> Iterator[tuple[int, Range]]:
        """The pieces of a rank's shard, numbered. None is empty."""
        cut = piece_rows(self.split.shard(rank), pieces or self.split.pieces, self.split.alignment)
        return ((piece, rows) for piece, rows in enumerate(cut) if not is_empty(rows))

    def multiplied(self, name: str, out: Region) -> MatmulChunk:
        """Rows of the partial, computed into a region of as many rows of the tensor."""
        return MatmulChunk(name=name, rank=out.rank, rows=out.rows, region=out)

    def put(self, name: str, step: int, source: Region, to: Region) -> Put:
        """What tiles write to the peer that is so many steps further, by whoever carries it."""
        how = {"name": name, "rank": source.rank, "queue": self.split.put_queue(step)}
        if self.order == "arrival":
            return ReducePut(**how, sources=(source,), destinations=(to,), unordered=True)  # type: ignore[arg-type]
        return Put(**how, sources=(source,), destinations=(to,))  # type: ignore[arg-type]

    def sum(self, name: str, operands: tuple[Region, ...], out: Region) -> Reduce:
        """The ordered sum of parts."""
        queue = {LIBRARY: MAIN, PACKED_KERNEL: PACKED}.get(self.by, SUMS)
        (height, width), blocks = out.shape, self.blocks
        tiles = -(-height // blocks.block_m) * -(-width // blocks.block_n) if queue == SUMS else 1
        return Reduce(name=name, rank=out.rank, queue=queue, operands=operands, out=out, tiles=tiles)

    def moved(self, rank: int, owner: int, piece: int, rows: Range) -> Reduce:
        """An owner's sum of a piece from the own workspace to the caller's `y`."""
        name = f"move.{rank}-{owner}.{piece}"
        return self.sum(name, (self.region(TOTAL, rank, rows),), self.region(Y, rank, rows))

    def goals(self, rank: int) -> Iterator[Goal]:
        """What a rank has in the end: sums in rank order; of a ring, of each shard from its owner's successor on."""
        split, is_ring = self.split, self.order == "ring"
        unordered = self.order == "arrival" and split.world_size > 1
        owners = range(split.world_size) if self.everywhere and is_ring else (rank,)
        for owner in owners:
            rows = self.rows if self.everywhere and not is_ring else split.shard(owner)
            first = owner + 1 if is_ring else 0
            terms = tuple(self.held[(first + hop) % split.world_size] for hop in range(split.world_size))
            out = self.region(Y, rank, rows if self.everywhere else shifted(rows, -rows[0]))
            if not is_empty(rows):
                yield Goal(out, product(A, B), rows[0], 0, terms, unordered)


def summed(family: SumFamily, how: SumSpec) -> Communication:
    """The moves of a sum, with a `MatmulChunk` where each part of a partial is written."""
    split = how.split
    ranks = range(split.world_size if split.rows else 0)
    is_alone = split.world_size == 1
    steps = [step for rank in ranks for step in (_alone if is_alone else family.steps)(how, rank)]
    y = Buffer(Y, split.rows if how.everywhere else split.shard_size, how.cols, "output")
    goal, has_messages = (goal for rank in ranks for goal in how.goals(rank)), how.by == PACKED_KERNEL and not is_alone
    made = communicated(split.world_size, steps, (y,), goal=goal, has_messages=has_messages)
    # One sum of all own rows waits for all tiles.
    is_behind = not family.beside or (not how.everywhere and how.own_pieces == 1)
    queues = queues_of(steps, sums_behind=is_behind, pushes_behind=split.is_one_wave)
    made = replace(made, queues=queues or made.queues, behind=how.behind)
    if how.order == "arrival":
        of_sums = (replace(one, dtype=SUM_DTYPE) if one.name == SLOTS else one for one in made.buffers)
        made = replace(made, buffers=tuple(of_sums))
    return stored_at_peers(in_parts(made, {PUSHES: split.tile_rows}))


def sums_by(family: SumFamily) -> Callable[[MethodInputs], Communication]:
    """What writes a family, for a method's `write`; who adds, and in which order, is the method's to say."""
    return partial(_written, family)


def _written(family: SumFamily, work: MethodInputs) -> Communication:
    adds, settings, problem = work.method.adds, work.settings, work.problem
    assert adds is not None, f"{work.method.full_name} does not say how it adds"
    how = SumSpec(
        split=work.split,
        cols=problem.n,
        held=work.held,
        everywhere=problem.record.shares_sums,
        by=TILE_KERNEL if settings.sums == "epilogue" else adds.by,
        order=adds.order,
        own_pieces=settings.own_pieces,
        blocks=work.sums,
        is_normed=problem.of_rows is not None,
    )
    return summed(family, how)


def _alone(how: SumSpec, rank: int) -> Steps:
    """A group of one: the product is the result."""
    yield how.multiplied(f"multiply.{rank}", how.region(Y, rank, how.rows))


# Sums whose parts go straight to who adds them: scatters, two-shots and one-shots, and the library's own.
#
# Peers' parts are computed first and the own ones last, so that a part travels while the next one is computed. A two-
# shot is a scatter, and behind each sum its way to every rank. A one-shot moves every partial to every rank, which adds
# them all: few messages, for small results. SOURCE: Flux (arXiv 2406.06858) 4.1 for scatter, rotation, and tiles that
# add at their owner, 4.2 for sums that load what peers' tiles have stored; torch's Async-TP for one matmul per shard;
# the one- and two-shot all-reduces of TensorRT-LLM and of torch's symmetric memory.


def _straight(is_pulled: bool, how: SumSpec, rank: int) -> Steps:
    """Each part to its owner, who adds what came in rank order, or, in no order, has it added to what it clears.

    is_pulled: nothing moves, and sums read partials where they lie.
    """
    split, own = how.split, how.split.shard(rank)
    if how.order == "arrival" and not is_empty(own):
        yield Clear(name=f"clear.{rank}", rank=rank, queue=MAIN, destinations=(how.slot(rank, 0, own),))
    for step, piece in split.steps(by_piece=how.everywhere):
        owner = split.peer(rank, step)
        rows = split.piece(owner, piece)
        part = how.region(PARTIAL, rank, rows)
        if not is_empty(rows):
            yield how.multiplied(f"multiply.{rank}-{owner}.{piece}", part)
            if not is_pulled:
                name = f"{'add' if how.order == 'arrival' else 'scatter'}.{rank}-{owner}.{piece}"
                yield how.put(name, step, part, how.slot(owner, rank, rows))
    yield from _added_by_tiles(how, rank) if how.is_by_tiles else _added(is_pulled, how, rank)
    if how.everywhere:
        yield from _shared(how, rank)


def _added(is_pulled: bool, how: SumSpec, rank: int) -> Steps:
    """The own rows, in parts, and the sum of each."""
    parts = list(how.parts(rank, None if how.everywhere else how.own_pieces))
    for piece, rows in parts:
        yield how.multiplied(f"multiply.{rank}-{rank}.{piece}", how.region(PARTIAL, rank, rows))
    for piece, rows in parts:
        own = how.region(PARTIAL, rank, rows)
        if how.order == "arrival":
            operands: tuple[Region, ...] = (how.slot(rank, 0, rows), own)
        else:
            operands = tuple(_lies(is_pulled, how, (rank, by), rows) for by in range(how.split.world_size))
        yield how.sum(f"sum.{rank}.{piece}", operands, how.whole(rank, rows))


def _lies(is_pulled: bool, how: SumSpec, ranks: tuple[int, int], rows: Range) -> Region:
    """ranks: an owner, and a source. Where the part of the one is that the other adds."""
    owner, source = ranks
    return how.region(PARTIAL, source, rows) if is_pulled or owner == source else how.slot(owner, source, rows)


def _added_by_tiles(how: SumSpec, rank: int) -> Iterator[MatmulChunk]:
    """The own rows, piece by piece: each tile adds what the peers sent for its rows, in rank order, to its product."""
    peers = [source for source in range(how.split.world_size) if source != rank]
    for piece, rows in how.parts(rank):
        yield MatmulChunk(
            name=f"multiply.{rank}-{rank}.{piece}",
            rank=rank,
            rows=rows,
            region=how.whole(rank, rows),
            addends=tuple(how.slot(rank, source, rows) for source in peers),
            place=rank,
        )


def _shared(how: SumSpec, rank: int) -> Steps:
    """The sum of each own piece to all peers, and the sums of all to `y`, in which order they should come.

    A rank without a shard waits for its own part of a sum too, so that its moves are not launched before its tiles run.
    """
    split, peers = how.split, how.split.peers(rank)
    for piece in range(split.pieces):
        rows = split.piece(rank, piece)
        for step, peer in enumerate(peers, 1) if not is_empty(rows) else ():
            yield Put(
                name=f"share.{rank}-{peer}.{piece}",
                rank=rank,
                queue=split.copy_queue(step),
                sources=(how.region(TOTAL, rank, rows),),
                destinations=(how.region(TOTAL, peer, rows),),
            )
        for owner in (rank, *reversed(peers)):
            rows = split.piece(owner, piece)
            if not is_empty(rows):
                move = how.moved(rank, owner, piece, rows)
                if is_empty(split.shard(rank)):
                    how.behind[move.name] = (how.region(PARTIAL, rank, rows),)
                yield move


def _one_shot(how: SumSpec, rank: int) -> Steps:
    own = how.region(PARTIAL, rank, how.rows)
    yield how.multiplied(f"multiply.{rank}", own)
    for step, peer in enumerate(how.split.peers(rank), 1):
        yield how.put(f"push.{rank}-{peer}", step, own, slot_of_all(how, peer, rank))
    slots = (slot_of_all(how, rank, source) for source in range(how.split.world_size))
    operands = tuple(own if source == rank else slot for source, slot in enumerate(slots))
    yield how.sum(f"sum.{rank}", operands, how.region(Y, rank, how.rows))


def slot_of_all(how: SumSpec, rank: int, source: int) -> Region:
    """Where all rows of a source lie on a rank until they are added."""
    return how.region(SLOTS, rank, shifted(how.rows, source * how.split.rows))


def _collective(how: SumSpec, rank: int) -> Steps:
    """The library's: an all-reduce in place, or a reduce-scatter."""
    ranks, function = tuple(range(how.split.world_size)), "all_reduce" if how.everywhere else "reduce_scatter"
    out = how.region(Y if how.everywhere else PARTIAL, rank, how.rows)
    shards = tuple(how.region(PARTIAL, rank, how.split.shard(peer)) for peer in ranks)
    yield how.multiplied(f"multiply.{rank}", out)
    yield Collective(
        name=f"{function}.{rank}",
        rank=rank,
        queue=MAIN,
        function="all_reduce" if how.everywhere else "reduce_scatter",
        label=function,
        ranks=ranks,
        sources=(out,) if how.everywhere else shards,
        destinations=(out if how.everywhere else how.whole(rank, how.split.shard(rank)),),
    )


STRAIGHT, PULLED = SumFamily(partial(_straight, False)), SumFamily(partial(_straight, True))
ONE_SHOT = SumFamily(_one_shot, beside=False)
COLLECTIVE = SumFamily(_collective)


# Sums round a ring: each piece travels from its owner's successor to the owner, and tiles on the way add their own.
#
# Each hop's sum is rounded, the owner's partial comes last. Of a sum that a copy brings tiles wait late: it was
# computed one step ago, and travels while they multiply. Tiles that store at the next rank themselves send their sum
# with the end of a tile; an owner's then store the whole sum at every rank that wants it, and what remains is to move
# peers' sums to `y`. SOURCE: the ring of the libraries' own collectives (NCCL); Flux (arXiv 2406.06858) 4.1 for stores
# at a peer.


def _ring(how: SumSpec, rank: int) -> Steps:
    """The pieces of the rank before it start here, the own ones end here."""
    split, size = how.split, how.split.world_size
    following = (rank + 1) % size
    for step in range(1, size + 1):
        owner = (rank - step) % size
        for piece, rows in how.parts(owner):
            name, out = f"{rank}-{owner}.{piece}", how.region(PARTIAL, rank, rows)
            if step == size:
                out = how.region(Y, rank, rows) if how.everywhere and not how.is_normed else how.whole(rank, rows)
            addends = () if step == 1 else (how.region(SLOTS, rank, rows),)
            yield MatmulChunk(
                name=f"multiply.{name}", rank=rank, rows=rows, region=out, addends=addends, place=len(addends)
            )
            if step < size:
                yield how.put(f"pass.{name}", 1, out, how.region(SLOTS, following, rows))
            for away, peer in enumerate(split.peers(rank) if how.everywhere and step == size else (), 1):
                yield how.put(f"share.{rank}-{peer}.{piece}", away, out, how.region(TOTAL, peer, rows))
    # Own sums are in `y`, or, where who moves them norms them, come first, as they are surely here.
    own = (rank,) if how.is_normed else ()
    for owner in (*own, *reversed(split.peers(rank))) if how.everywhere else ():
        yield from (how.moved(rank, owner, piece, rows) for piece, rows in how.parts(owner))


RING = SumFamily(_ring, beside=False)


# Sums by the library, piece by piece: one matmul for each piece, and beside the next one a collective of the piece.
#
# A piece is a stretch of rows of an all-reduce, and the same stretch of every shard of a reduce-scatter, whose partials
# lie one behind the other in memory; so nothing moves but by the library.
# SOURCE: the decomposition that FlashOverlap (arXiv 2504.19519), 6.1, is held against.


class _Piece(NamedTuple):
    """parts: the rows that are multiplied for each member of the collective, and where to. total: where sums go."""

    parts: tuple[tuple[Range, Region], ...]
    total: Region


def _decomposed(how: SumSpec, rank: int) -> Steps:
    """Each piece: its products, then this rank's part of its sum."""
    function = "all_reduce" if how.everywhere else "reduce_scatter"
    for at, piece in enumerate(_reduced(how, rank) if how.everywhere else _scattered(how, rank)):
        for part, (rows, out) in enumerate(piece.parts):
            if not is_empty(rows):
                yield MatmulChunk(name=f"multiply.{rank}.{at}.{part}", rank=rank, rows=rows, region=out)
        yield Collective(
            name=f"{function}.{rank}.{at}",
            rank=rank,
            queue=EXCHANGES,
            function="all_reduce" if how.everywhere else "reduce_scatter",
            label=f"{function}.{at}",
            ranks=tuple(range(how.split.world_size)),
            sources=tuple(out for _, out in piece.parts),
            destinations=(piece.total,),
        )


def _reduced(how: SumSpec, rank: int) -> Iterator[_Piece]:
    """In place, in `y`."""
    for rows in piece_rows(how.rows, how.split.pieces, how.split.alignment):
        if not is_empty(rows):
            out = how.region(Y, rank, rows)
            yield _Piece(((rows, out),), out)


def _scattered(how: SumSpec, rank: int) -> Iterator[_Piece]:
    """The partials of all owners side by side."""
    split, top = how.split, 0
    for piece in range(split.pieces):
        parts: list[tuple[Range, Region]] = []
        for owner in range(split.world_size):
            rows = split.piece(owner, piece)
            height = max(0, rows[1] - rows[0])
            parts.append((rows, how.region(PARTIAL, rank, (top, top + height))))
            top += height
        if any(not is_empty(rows) for rows, _ in parts):
            yield _Piece(tuple(parts), how.whole(rank, split.piece(rank, piece)))


DECOMPOSED = SumFamily(_decomposed)
