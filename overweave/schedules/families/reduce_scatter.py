"""Reduce-scatter of row shards: a partial `[m, n]` on every rank -> its summed shard `y [S, n]`, S = ceil(m / W).

Peers' shards are served first and the own one last, so that a shard travels while the next one is computed.
SOURCE: Flux (arXiv 2406.06858) 4.1 for scatter and rotation; torch's Async-TP for one matmul per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.schedule import (
    CREDITS,
    ECHOES,
    Buffer,
    Clear,
    Collective,
    Goal,
    Operation,
    Put,
    Queue,
    Range,
    SignalPad,
)
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    COMPLETE,
    COPIES,
    ISSUE,
    MAIN,
    PACKED,
    PARTIAL,
    SLOTS,
    SUMS,
    TILES,
    A,
    B,
    Chunk,
    Communication,
    Split,
    Y,
    is_empty,
    region,
    used,
)
from overweave.schedules.families.packed.scatter import scatter_packed, scatter_packed_pads
from overweave.schedules.families.scatter_adds import remote_add
from overweave.schedules.families.scatter_pulls import scatter_pull
from overweave.schedules.families.scatter_rings import fused_ring, ring_stored
from overweave.schedules.families.scattered import Scatter


def reduce_scatter(
    split: Split, cols: int, how: ScatterWay, held: tuple[Range, ...], sums: str = SUMS, own_pieces: int = 1
) -> Communication:
    """The moves of a reduce-scatter of `[split.rows, cols]`, with a `Chunk` where each part of a partial is written.

    COLLECTIVE: the library's. SCATTER: each part is put into the slot of its source at its owner, who sums all slots in
    rank order, in queue `sums` (TILES: its own tiles add what arrived to their products). FUSED_RING: each part travels
    from its owner's successor round to the owner; tiles of every rank on the way add what arrived to their products and
    leave the sum where it is passed on from, or, of the own shard, in `y`: nothing follows the last tile. remote_add:
    partials are added at their owners in fp32, in whatever order they come. PULL: owners read the partials
    where they lie, piece by piece beside the tiles, and sum them in rank order (schedules/families/scatter_pulls.py).
    PACKED_SCATTER: in messages that carry their flag (schedules/families/packed/scatter.py). STORED, RING_STORED: tiles
    store at peers themselves (schedules/families/scatter_rings.py).
    held: the range of the reduced axis that each rank's partial holds. own_pieces: parts of a scatter's own shard; with
    more than one, each part is summed beside the tiles of the next.
    """
    ranks = range(split.world_size)
    is_unordered = how.adds == "unordered"
    slots = split.shard_size if is_unordered else split.world_size * split.shard_size
    scatter = Scatter(
        split,
        Buffer(PARTIAL, split.rows, cols, how.home),
        Buffer(SLOTS, slots, cols, "symmetric", SUM_DTYPE if is_unordered else None),
        Buffer(Y, split.shard_size, cols, "output"),
        sums,
        own_pieces,
    )
    is_alone = split.world_size == 1
    steps = tuple(step for rank in ranks for step in (_alone if is_alone else how.steps)(scatter, rank))
    if split.is_by_kernel:  # it is launched behind the tiles
        steps = tuple(
            sorted(steps, key=lambda step: (step.rank, not isinstance(step, Clear), not isinstance(step, Chunk)))
        )
    queues = () if is_alone else how.queues(scatter)
    pads = () if is_alone else how.pads(split)
    return Communication(
        world_size=split.world_size,
        buffers=used((scatter.partial, scatter.slots, scatter.y), steps),
        pads=pads,
        queues=queues,
        given=(),
        goal=tuple(_goal(scatter, rank, held, how) for rank in ranks if not is_empty(split.shard(rank))),
        steps=steps,
        reuse=CREDITS if is_alone else how.reuse,
    )


def _copies(split: Split) -> tuple[Queue, ...]:
    """A kernel that carries what one wave of tiles writes is launched behind it."""
    return split.copy_queues((TILES,) if split.is_one_wave else ())


def _copied(scatter: Scatter) -> tuple[Queue, ...]:
    split, copies = scatter.split, _copies(scatter.split)
    if scatter.sums != SUMS:
        return (_MAIN, *copies)
    return (*copies, _beside(scatter, (TILES, COPIES) if split.is_by_kernel else ()))


def _beside(scatter: Scatter, behind: tuple[str, ...] = ()) -> Queue:
    """Sums of parts run on SMs that the last tiles leave idle; one sum waits for all tiles.

    behind: pushes by a kernel, too, whose SMs sums that wait for peers must not hold.
    """
    return Queue(SUMS, ISSUE, after=behind or ((TILES,) if scatter.own_pieces == 1 else ()))


def _adding(scatter: Scatter) -> tuple[Queue, ...]:
    return Queue(MAIN, COMPLETE), *_copies(scatter.split), Queue(SUMS, ISSUE, after=(MAIN, TILES, COPIES))


def _goal(scatter: Scatter, rank: int, held: tuple[Range, ...], how: ScatterWay) -> Goal:
    lo, hi = scatter.split.shard(rank)
    size = scatter.split.world_size
    order = [(rank + hop) % size for hop in range(1, size + 1)] if how.adds == "round" else list(range(size))
    terms = tuple(held[source] for source in order)
    is_unordered = how.adds == "unordered" and size > 1
    return Goal(region(scatter.y, rank, (0, hi - lo)), product(A, B), lo, 0, terms, is_unordered)


def _alone(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """A group of one: the product is the result."""
    rows = scatter.split.shard(rank)
    if not is_empty(rows):
        yield Chunk(name=f"multiply.{rank}", rank=rank, rows=rows, region=region(scatter.y, rank, rows))


def _collective(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    split = scatter.split
    if split.rows == 0:
        return
    ranks, whole = tuple(range(split.world_size)), (0, split.rows)
    yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(scatter.partial, rank, whole))
    lo, hi = split.shard(rank)
    yield Collective(
        name=f"reduce_scatter.{rank}",
        rank=rank,
        queue=MAIN,
        function="reduce_scatter",
        label="reduce_scatter",
        ranks=ranks,
        sources=tuple(region(scatter.partial, rank, split.shard(peer)) for peer in ranks),
        destinations=(region(scatter.y, rank, (0, hi - lo)),),
    )


def _scatter(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    split = scatter.split
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        rows = split.piece(peer, piece)
        if not is_empty(rows):
            part = scatter.part(rank, peer, piece)
            yield part
            yield Put(
                name=f"scatter.{rank}-{peer}.{piece}",
                rank=rank,
                queue=split.copy_queue(step),
                sources=(part.region,),
                destinations=(scatter.slot(peer, rank, rows),),
                tiles=split.put_tiles(),
            )
    if scatter.sums == TILES:
        yield from _own_sums(scatter, rank)
        return
    yield from scatter.own_chunks(rank)
    for index, rows in enumerate(scatter.own_parts(rank)):
        own = region(scatter.partial, rank, rows)
        operands = (own if source == rank else scatter.slot(rank, source, rows) for source in range(split.world_size))
        yield scatter.sum(rank, index, rows, tuple(operands))


def _own_sums(scatter: Scatter, rank: int) -> Iterator[Chunk]:
    """The own shard, piece by piece: each tile adds what the peers sent for its rows, in rank order, and stores `y`."""
    split = scatter.split
    peers = [source for source in range(split.world_size) if source != rank]
    for piece in range(split.pieces):
        rows = split.piece(rank, piece)
        if not is_empty(rows):
            yield Chunk(
                name=f"multiply.{rank}.own.{piece}",
                rank=rank,
                rows=rows,
                region=scatter.result(rank, rows),
                addends=tuple(scatter.slot(rank, source, rows) for source in peers),
                place=rank,
            )


def _stored(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """Tiles store the peers' parts straight at their owners, without a copy."""
    split = scatter.split
    for step, piece in split.steps():
        owner = split.peer(rank, step)
        rows = split.piece(owner, piece)
        if not is_empty(rows):
            slot = scatter.slot(owner, rank, rows)
            yield Chunk(name=f"store.{rank}-{owner}.{piece}", rank=rank, rows=rows, region=slot)
    yield from _own_sums(scatter, rank)


class ScatterWay(NamedTuple):
    """What a rank does, in launch order, and in which queues.

    adds: partials are added in rank order, round the ring from the owner's successor, or in any order. home: of the
    partials, which peers may read. pads: of packed messages, which number their signals as the kernel does.
    """

    steps: Callable[[Scatter, int], Iterator[Operation | Chunk]]
    queues: Callable[[Scatter], tuple[Queue, ...]]
    adds: Literal["by_rank", "round", "unordered"] = "by_rank"
    home: Literal["local", "symmetric"] = "local"
    reuse: Literal["credits", "echoes"] = CREDITS
    pads: Callable[[Split], tuple[SignalPad, ...]] = lambda split: ()


_MAIN = Queue(MAIN, COMPLETE, after=(TILES,))
COLLECTIVE = ScatterWay(_collective, lambda scatter: (_MAIN,))
SCATTER = ScatterWay(_scatter, _copied)
FUSED_RING = ScatterWay(fused_ring, lambda scatter: scatter.split.copy_queues(), "round")
REMOTE_ADD = ScatterWay(remote_add, _adding, "unordered")
PULL = ScatterWay(scatter_pull, lambda scatter: (_beside(scatter),), home="symmetric")
PACKED_SCATTER = ScatterWay(
    scatter_packed, lambda scatter: (Queue(PACKED, ISSUE, after=(MAIN,)),), reuse=ECHOES, pads=scatter_packed_pads
)
STORED = ScatterWay(_stored, lambda scatter: ())
RING_STORED = ScatterWay(ring_stored, lambda scatter: (), "round")
