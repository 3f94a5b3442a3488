"""Sums whose parts go straight to who adds them: scatters, two-shots and one-shots, and the library's own.

Peers' parts are computed first and the own ones last, so that a part travels while the next one is computed. A two-shot
is a scatter, and behind each sum its way to every rank. A one-shot moves every partial to every rank, which adds them
all: few messages, for small results. SOURCE: Flux (arXiv 2406.06858) 4.1 for scatter, rotation, and tiles that add at
their owner, 4.2 for sums that load what peers' tiles have stored; torch's Async-TP for one matmul per shard; the one-
and two-shot all-reduces of TensorRT-LLM and of torch's symmetric memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from overweave.ir.schedule import Clear, Collective, Put, Range, Region
from overweave.schedules.communication import MAIN, PARTIAL, SLOTS, TOTAL, Chunk, Y, is_empty, shifted
from overweave.schedules.families.summed import Family, Steps, Summed


def _straight(is_pulled: bool, how: Summed, rank: int) -> Steps:
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


def _added(is_pulled: bool, how: Summed, rank: int) -> Steps:
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


def _lies(is_pulled: bool, how: Summed, ranks: tuple[int, int], rows: Range) -> Region:
    """ranks: an owner, and a source. Where the part of the one is that the other adds."""
    owner, source = ranks
    return how.region(PARTIAL, source, rows) if is_pulled or owner == source else how.slot(owner, source, rows)


def _added_by_tiles(how: Summed, rank: int) -> Iterator[Chunk]:
    """The own rows, piece by piece: each tile adds what the peers sent for its rows, in rank order, to its product."""
    peers = [source for source in range(how.split.world_size) if source != rank]
    for piece, rows in how.parts(rank):
        yield Chunk(
            name=f"multiply.{rank}-{rank}.{piece}",
            rank=rank,
            rows=rows,
            region=how.whole(rank, rows),
            addends=tuple(how.slot(rank, source, rows) for source in peers),
            place=rank,
        )


def _shared(how: Summed, rank: int) -> Steps:
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


def _one_shot(how: Summed, rank: int) -> Steps:
    own = how.region(PARTIAL, rank, how.rows)
    yield how.multiplied(f"multiply.{rank}", own)
    for step, peer in enumerate(how.split.peers(rank), 1):
        yield how.put(f"push.{rank}-{peer}", step, own, slot_of_all(how, peer, rank))
    slots = (slot_of_all(how, rank, source) for source in range(how.split.world_size))
    operands = tuple(own if source == rank else slot for source, slot in enumerate(slots))
    yield how.sum(f"sum.{rank}", operands, how.region(Y, rank, how.rows))


def slot_of_all(how: Summed, rank: int, source: int) -> Region:
    """Where all rows of a source lie on a rank until they are added."""
    return how.region(SLOTS, rank, shifted(how.rows, source * how.split.rows))


def _collective(how: Summed, rank: int) -> Steps:
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


STRAIGHT, PULLED = Family(partial(_straight, False)), Family(partial(_straight, True))
ONE_SHOT = Family(_one_shot, beside=False)
COLLECTIVE = Family(_collective)
