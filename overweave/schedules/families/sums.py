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
from overweave.ir.plan import LIBRARY, PACKED_KERNEL, REDUCE_KERNEL, Engine, ReduceConfig
from overweave.ir.schedule import (
    Buffer,
    Clear,
    Collective,
    Goal,
    Operation,
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
from overweave.schedules.records.record import AddingOrder, MethodInputs

Steps = Iterator[Operation | MatmulChunk]
StepsOf = Callable[["SumSpec", int], Steps]  # of each rank of a group of several


class SumSpec(Struct, frozen=True, kw_only=True):
    """One sum. everywhere: whether all ranks get all of it. by, order: who ends sums, and how, as a method says.

    own_pieces: parts of the own shard, each summed beside the tiles of the next one. held: the range of the reduced
    axis that each rank's partial holds. blocks: the tiles of a kernel that sums.
    """

    split: Split
    cols: int
    held: tuple[Range, ...]
    everywhere: bool = False
    by: Engine = REDUCE_KERNEL
    order: AddingOrder = "rank"
    own_pieces: int = 1
    blocks: ReduceConfig = ReduceConfig()

    @property
    def rows(self) -> Range:
        """All of them."""
        return 0, self.split.rows

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

    def sum(self, name: str, operands: tuple[Region, ...], out: Region) -> Reduce:
        """The ordered sum of parts."""
        queue = {LIBRARY: MAIN, PACKED_KERNEL: PACKED}.get(self.by, SUMS)
        (height, width), blocks = out.shape, self.blocks
        tiles = -(-height // blocks.block_m) * -(-width // blocks.block_n) if queue == SUMS else 1
        return Reduce(name=name, rank=out.rank, queue=queue, operands=operands, out=out, tiles=tiles)

    def goals(self, rank: int) -> Iterator[Goal]:
        """What a rank has in the end: sums in rank order."""
        rows = self.rows if self.everywhere else self.split.shard(rank)
        out = self.region(Y, rank, rows if self.everywhere else shifted(rows, -rows[0]))
        if not is_empty(rows):
            unordered = self.order == "arrival" and self.split.world_size > 1
            yield Goal(out, product(A, B), rows[0], 0, self.held, unordered)


def summed(steps_of: StepsOf, how: SumSpec) -> Communication:
    """The moves of a sum, with a `MatmulChunk` where each part of a partial is written."""
    split = how.split
    ranks = range(split.world_size if split.rows else 0)
    is_alone = split.world_size == 1
    steps = [step for rank in ranks for step in (_alone if is_alone else steps_of)(how, rank)]
    y = Buffer(Y, split.rows if how.everywhere else split.shard_size, how.cols, "output")
    goal, has_messages = (goal for rank in ranks for goal in how.goals(rank)), how.by == PACKED_KERNEL and not is_alone
    made = communicated(split.world_size, steps, (y,), goal=goal, has_messages=has_messages)
    # One sum of all own rows waits for all tiles.
    is_behind = not how.everywhere and how.own_pieces == 1
    queues = queues_of(steps, sums_behind=is_behind, pushes_behind=split.is_one_wave)
    made = replace(made, queues=queues or made.queues)
    if how.order == "arrival":
        of_sums = (replace(one, dtype=SUM_DTYPE) if one.name == SLOTS else one for one in made.buffers)
        made = replace(made, buffers=tuple(of_sums))
    return in_parts(made, {PUSHES: split.tile_rows})


def sums_by(steps_of: StepsOf) -> Callable[[MethodInputs], Communication]:
    """What writes sums by the steps of each rank, for a method's `write`; who adds, and in which order, is the method's
    to say."""
    return partial(_written, steps_of)


def _written(steps_of: StepsOf, work: MethodInputs) -> Communication:
    adds, settings, problem = work.method.adds, work.settings, work.problem
    assert adds is not None, f"{work.method.full_name} does not say how it adds"
    how = SumSpec(
        split=work.split,
        cols=problem.n,
        held=work.held,
        everywhere=problem.record.shares_sums,
        by=adds.by,
        order=adds.order,
        own_pieces=settings.own_pieces,
        blocks=work.sums,
    )
    return summed(steps_of, how)


def _alone(how: SumSpec, rank: int) -> Steps:
    """A group of one: the product is the result."""
    yield how.multiplied(f"multiply.{rank}", how.region(Y, rank, how.rows))


# Sums that are no list of moves: of what peers' tiles have stored, which owners read there; of parts that are added to
# their owner's sum as they arrive; and the library's own.
#
# Peers' parts are computed first and the own ones last, so that a part travels while the next one is computed.
# SOURCE: Flux (arXiv 2406.06858) 4.1 for tiles that add at their owner, 4.2 for sums that load what tiles have stored.


def pulled(how: SumSpec, rank: int) -> Steps:
    """Nothing moves: owners add partials in rank order where they lie."""
    yield from (chunk for _, _, chunk in _of_peers(how, rank))
    sources = range(how.split.world_size)
    yield from _own(how, rank, lambda rows: tuple(how.region(PARTIAL, source, rows) for source in sources))


def in_any_order(how: SumSpec, rank: int) -> Steps:
    """Each part to its owner, where it is added to what that has cleared."""
    own = how.split.shard(rank)
    if not is_empty(own):
        yield Clear(name=f"clear.{rank}", rank=rank, queue=MAIN, destinations=(how.slot(rank, 0, own),))
    for step, owner, chunk in _of_peers(how, rank):
        yield chunk
        yield ReducePut(
            name=f"add.{chunk.name.partition('.')[2]}",
            rank=rank,
            queue=how.split.put_queue(step),
            sources=(chunk.region,),
            destinations=(how.slot(owner, rank, chunk.rows),),
            unordered=True,
        )
    yield from _own(how, rank, lambda rows: (how.slot(rank, 0, rows), how.region(PARTIAL, rank, rows)))


def _of_peers(how: SumSpec, rank: int) -> Iterator[tuple[int, int, MatmulChunk]]:
    """(step, owner, rows of its shard)."""
    for step, piece in how.split.steps():
        owner = how.split.peer(rank, step)
        rows = how.split.piece(owner, piece)
        if not is_empty(rows):
            part = how.region(PARTIAL, rank, rows)
            yield step, owner, how.multiplied(f"multiply.{rank}-{owner}.{piece}", part)


def _own(how: SumSpec, rank: int, operands: Callable[[Range], tuple[Region, ...]]) -> Steps:
    """The own rows, in parts, and the sum of each."""
    parts = list(how.parts(rank, how.own_pieces))
    for piece, rows in parts:
        yield how.multiplied(f"multiply.{rank}-{rank}.{piece}", how.region(PARTIAL, rank, rows))
    for piece, rows in parts:
        yield how.sum(f"sum.{rank}.{piece}", operands(rows), how.whole(rank, rows))


def slot_of_all(how: SumSpec, rank: int, source: int) -> Region:
    """Where all rows of a source lie on a rank until they are added."""
    return how.region(SLOTS, rank, shifted(how.rows, source * how.split.rows))


def collective(how: SumSpec, rank: int) -> Steps:
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


# Sums by the library, piece by piece: one matmul for each piece, and beside the next one a collective of the piece.
#
# A piece is a stretch of rows of an all-reduce, and the same stretch of every shard of a reduce-scatter, whose partials
# lie one behind the other in memory; so nothing moves but by the library.
# SOURCE: the decomposition that FlashOverlap (arXiv 2504.19519), 6.1, is held against.


class _Piece(NamedTuple):
    """parts: the rows that are multiplied for each member of the collective, and where to. total: where sums go."""

    parts: tuple[tuple[Range, Region], ...]
    total: Region


def decomposed(how: SumSpec, rank: int) -> Steps:
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
