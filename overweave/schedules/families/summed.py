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
from overweave.ir.schedule import Buffer, Goal, Operation, Put, Range, Reduce, ReducePut, Region
from overweave.ir.shards import piece_rows
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    MAIN,
    PACKED,
    PUSHES,
    SLOTS,
    SUMS,
    TOTAL,
    A,
    B,
    Chunk,
    Communication,
    Split,
    Y,
    communicated,
    in_parts,
    is_empty,
    queues_of,
    shifted,
)
from overweave.schedules.families.stored_at_peers import stored_at_peers
from overweave.schedules.methods.record import AddingOrder, Work

Steps = Iterator[Operation | Chunk]


class Family(NamedTuple):
    """What a rank of a group of several does. beside: whether a kernel that sums may run beside the tiles."""

    steps: Callable[[Summed, int], Steps]
    beside: bool = True


class Summed(Struct, frozen=True, kw_only=True):
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

    def multiplied(self, name: str, out: Region) -> Chunk:
        """Rows of the partial, computed into a region of as many rows of the tensor."""
        return Chunk(name=name, rank=out.rank, rows=out.rows, region=out)

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


def summed(family: Family, how: Summed) -> Communication:
    """The moves of a sum, with a `Chunk` where each part of a partial is written."""
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


def sums_by(family: Family) -> Callable[[Work], Communication]:
    """What writes a family, for a method's `write`; who adds, and in which order, is the method's to say."""
    return partial(_written, family)


def _written(family: Family, work: Work) -> Communication:
    adds, settings, problem = work.method.adds, work.settings, work.problem
    assert adds is not None, f"{work.method.full_name} does not say how it adds"
    how = Summed(
        split=work.split,
        cols=problem.n,
        held=work.held,
        everywhere=problem.record.shares_sums,
        by=TILE_KERNEL if settings.sums == "epilogue" else adds.by,
        order=adds.order,
        own_pieces=settings.own_pieces,
        blocks=work.sums,
        is_normed=problem.norm is not None,
    )
    return summed(family, how)


def _alone(how: Summed, rank: int) -> Steps:
    """A group of one: the product is the result."""
    yield how.multiplied(f"multiply.{rank}", how.region(Y, rank, how.rows))
