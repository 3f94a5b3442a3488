"""Lists of moves by hand for the campaign of compiled kernels: what each exercises that no schedule of a name does.

All are of a tensor `[rows, cols]` whose shards, one for each of `ranks`, have whole tiles in either half.
"""

from __future__ import annotations

from collections.abc import Iterator

import overweave as ow
from overweave.schedules.communication import Mover

Chunks = tuple[ow.Chunk, ...]


def halves(ranks: int, rows: int) -> tuple[Chunks, Chunks]:
    """The upper and the lower half of every rank's rows."""
    size = rows // ranks
    starts = range(0, ranks * size, size)
    upper = tuple(ow.Chunk((low, low + size // 2)) for low in starts)
    return upper, tuple(ow.Chunk((low + size // 2, low + size)) for low in starts)


def pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Every rank with every other, the nearest first."""
    return ((rank, (rank + step) % ranks) for step in range(1, ranks) for rank in range(ranks))


def round_trip(ranks: int, rows: int, cols: int) -> ow.Gather:
    """Every shard goes round in two chunks: pushed to the next rank in one lane, pulled by columns in another."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Get] = []
    for owner in range(ranks):
        for step in range(ranks - 1):
            rank, peer = (owner + step) % ranks, (owner + step + 1) % ranks
            moves.append(ow.Put(rank, peer, upper[owner]))
            for part in ((0, cols // 2), (cols // 2, cols)):
                moves.append(ow.Get(peer, rank, ow.Chunk(lower[owner].rows, part), lane=1))
    return ow.Gather(ranks, tuple(moves))


def chain_of_sums(ranks: int, rows: int) -> ow.Reduction:
    """Partials go down a chain in two lanes, pushed and pulled, and every rank on the way adds its own."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Get | ow.Sum] = []
    for step in range(1, ranks):
        for rank in range(ranks):
            owner, peer = (rank - step) % ranks, (rank + 1) % ranks
            for part in (upper[owner], lower[owner]):
                moves += [ow.Sum(rank, part)] if step > 1 else []
                is_pushed = part == upper[owner]
                moves.append(ow.Put(rank, peer, part) if is_pushed else ow.Get(peer, rank, part, lane=1))
    return ow.Reduction(ranks, tuple(moves))


def blocks(ranks: int, rows: int, sends: bool) -> ow.AllToAll:
    """Every block in two chunks, one in each of two lanes."""
    upper, lower = halves(ranks, rows)
    moves = [
        ow.Put(rank, peer, half[peer], lane=lane)
        for rank, peer in pairs(ranks)
        for lane, half in enumerate((upper, lower))
    ]
    return ow.AllToAll(ranks, tuple(moves), sends)


def carried_and_pulled(ranks: int, rows: int) -> ow.Gather:
    """Peers come for one half of every shard, so that it is copied; tiles push the other from there."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, upper[rank], mover="tiles") for rank, peer in pairs(ranks))
    return ow.Gather(ranks, (*pushes, *(ow.Get(peer, rank, lower[rank]) for rank, peer in pairs(ranks))))


def carried_and_collected(ranks: int, rows: int) -> ow.Gather:
    """The library gathers one half of every shard, tiles push the other, in bulk."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, lower[rank], mover="bulk_tiles") for rank, peer in pairs(ranks))
    return ow.Gather(ranks, (ow.Collective(upper), *pushes))


def each_its_own(ranks: int, rows: int) -> ow.Gather:
    """No two ranks do the same: one pushes by copy engine, one by a kernel, from one everybody pulls, in two lanes."""
    ways: tuple[Mover, ...] = ("bulk_kernel", "copy_engine", "copy_engine")
    moves: list[ow.Put | ow.Get] = []
    for part in halves(ranks, rows):
        for rank, peer in pairs(ranks):
            is_pulled = rank % len(ways) == 1
            put = ow.Put(rank, peer, part[rank], mover=ways[rank % len(ways)])
            moves.append(ow.Get(peer, rank, part[rank], lane=1) if is_pulled else put)
    return ow.Gather(ranks, tuple(moves))


def each_its_own_sums(ranks: int, rows: int) -> ow.Reduction:
    """One rank's partials go by a kernel, tiles store one's at their owners, the others' are the copy engine's."""
    ways: tuple[Mover, ...] = ("copy_kernel", "tiles", "copy_engine")
    size = rows // ranks
    moves = [
        ow.Put(rank, owner, ow.Chunk((owner * size, (owner + 1) * size)), mover=ways[rank % len(ways)])
        for rank, owner in pairs(ranks)
    ]
    return ow.Reduction(ranks, tuple(moves))


def partly_the_librarys(ranks: int, rows: int, sends: bool) -> ow.AllToAll:
    """One half of every block is the library's, the other is pushed."""
    upper, lower = halves(ranks, rows)
    pushes = (ow.Put(rank, peer, lower[peer]) for rank, peer in pairs(ranks))
    return ow.AllToAll(ranks, (ow.Collective(upper), *pushes), sends)


def partly_summed_by_the_library(ranks: int, rows: int, everywhere: bool) -> ow.Reduction:
    """One half of every shard; partials of the other go to their owner, and its sum to all who want it."""
    upper, lower = halves(ranks, rows)
    moves: list[ow.Put | ow.Sum | ow.Collective] = [ow.Collective(upper)]
    moves += [ow.Put(rank, owner, lower[owner]) for rank, owner in pairs(ranks)]
    if everywhere:
        moves += [ow.Sum(owner, part) for owner, part in enumerate(lower)]
        moves += [ow.Put(owner, rank, lower[owner], lane=1) for owner, rank in pairs(ranks)]
    return ow.Reduction(ranks, tuple(moves), everywhere)
