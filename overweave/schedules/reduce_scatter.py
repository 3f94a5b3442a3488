"""Reduce-scatter of row shards: a partial `[m, n]` on every rank -> its summed shard `y [S, n]`, S = ceil(m / W).

Peers' shards are served first and the own one last, so that a shard travels while the next one is computed.
SOURCE: Flux (arXiv 2406.06858) 4.1 for scatter and rotation; torch's Async-TP for one matmul per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.schedule import (
    CREDITS,
    ECHOES,
    Buffer,
    Clear,
    Collective,
    Goal,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    Reduce,
    SignalPad,
    Wait,
)
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPIES,
    ISSUE,
    MAIN,
    PACKED,
    PARTIAL,
    READY,
    RUNNING,
    SLOTS,
    SUMS,
    TELLERS,
    TILES,
    A,
    B,
    Chunk,
    Communication,
    Split,
    Y,
    is_empty,
    one,
    region,
    shifted,
    used,
)
from overweave.schedules.scatter_adds import remote_add
from overweave.schedules.scatter_packed import scatter_packed, scatter_packed_pads
from overweave.schedules.scatter_pulls import scatter_pull
from overweave.schedules.scatter_rings import fused_ring
from overweave.schedules.scattered import FINISHED, Scatter
from overweave.schedules.stored import Stored, round_a_ring, round_a_ring_pad, to_owners, to_owners_pad


def reduce_scatter(
    split: Split, cols: int, method: str, held: tuple[Range, ...], sums: str = SUMS, own_pieces: int = 1
) -> Communication:
    """The moves of a reduce-scatter of `[split.rows, cols]`, with a `Chunk` where each part of a partial is written.

    collective: the library's. scatter: each part is put into the slot of its source at its owner, who sums all slots in
    rank order, in queue `sums` (TILES: its own tiles add what arrived to their products). fused_ring: each part travels
    from its owner's successor round to the owner; tiles of every rank on the way add what arrived to their products and
    leave the sum where it is passed on from, or, of the own shard, in `y`: nothing follows the last tile. remote_add:
    partials are added at their owners in fp32, in whatever order they come. scatter_pull: owners read the partials
    where they lie, piece by piece beside the tiles, and sum them in rank order (schedules/scatter_pulls.py). packed: in
    messages that carry their flag (schedules/scatter_packed.py). stored, ring_stored: tiles store at peers themselves
    (schedules/stored.py).
    held: the range of the reduced axis that each rank's partial holds. own_pieces: parts of a scatter's own shard; with
    more than one, each part is summed beside the tiles of the next.
    """
    ranks = range(split.world_size)
    scatter = Scatter(
        split,
        Buffer(PARTIAL, split.rows, cols, "symmetric" if method in PULLS else "local"),
        Buffer(SLOTS, split.shard_size, cols, "symmetric", SUM_DTYPE)
        if method == "remote_add"
        else Buffer(SLOTS, split.world_size * split.shard_size, cols, "symmetric"),
        Buffer(RUNNING, split.rows, cols, "local"),
        Buffer(Y, split.shard_size, cols, "output"),
        sums,
        own_pieces,
    )
    of_rank = _alone if split.world_size == 1 else METHODS[method]
    steps = [step for rank in ranks for step in of_rank(scatter, rank)]
    if split.is_by_kernel:  # it is launched behind the tiles, also where its first chunk is an empty one
        steps.sort(key=lambda step: (step.rank, not isinstance(step, Clear), not isinstance(step, Chunk)))
    return Communication(
        world_size=split.world_size,
        buffers=used((scatter.partial, scatter.slots, scatter.running, scatter.y), steps),
        pads=_pads(split, method, own_pieces if sums == SUMS else 0),
        queues=_queues(split, method, sums, own_pieces == 1),
        given=(),
        goal=tuple(_goal(scatter, rank, held, method) for rank in ranks if not is_empty(split.shard(rank))),
        steps=tuple(steps),
        reuse=ECHOES if method == "packed" and split.world_size > 1 else CREDITS,
    )


def _pads(split: Split, method: str, own_pieces: int) -> tuple[SignalPad, ...]:
    if method == "collective" or split.world_size == 1:
        return ()
    if method == "packed":
        return scatter_packed_pads(split)
    if method in STORED:
        return (STORED[method](split),)
    every = split.world_size * split.pieces
    if method == "remote_add":
        own = SignalPad(READY, split.world_size - 1), SignalPad(FINISHED, 1)
        return SignalPad(COMPUTED, every), SignalPad(ARRIVED, (split.world_size - 1) * split.pieces), *own
    if method == "fused_ring":
        return SignalPad(COMPUTED, every), SignalPad(ARRIVED, every)
    arrived = SignalPad(ARRIVED, (split.world_size - 1) * split.pieces)
    finished = (SignalPad(FINISHED, own_pieces),) if own_pieces else ()
    return (SignalPad(COMPUTED, every), arrived, *finished)


def _queues(split: Split, method: str, sums: str, is_whole: bool) -> tuple[Queue, ...]:
    main = (Queue(MAIN, COMPLETE, after=(TILES,)),)
    if split.world_size == 1 or method in STORED:
        return ()
    if method == "collective":
        return main
    if method == "packed":
        return (Queue(PACKED, ISSUE, after=(MAIN,)),)
    # Sums of parts wait for their own tiles and run on SMs that the last tiles leave idle; one sum waits for them all.
    beside = Queue(sums, ISSUE, after=(TILES,) if is_whole else ())
    if method == "scatter_pull":
        return (Queue(TELLERS, COMPLETE), beside)
    copies = split.copy_queues((TILES,) if split.is_one_wave else ())
    if method == "fused_ring" or sums != SUMS:
        return main + copies
    if method == "remote_add":
        return (Queue(MAIN, COMPLETE), *copies, Queue(SUMS, ISSUE, after=(TILES, COPIES)))
    if split.is_by_kernel:
        # Sums that wait for peers must not hold the SMs that the own pushes need.
        return (*copies, Queue(sums, ISSUE, after=(TILES, COPIES)))
    return (*copies, beside)


def _goal(scatter: Scatter, rank: int, held: tuple[Range, ...], method: str) -> Goal:
    lo, hi = scatter.split.shard(rank)
    size = scatter.split.world_size
    is_ring, is_unordered = method in RINGS, method == "remote_add" and size > 1
    order = [(rank + hop) % size for hop in range(1, size + 1)] if is_ring else list(range(size))
    terms = tuple(held[source] for source in order)
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
    peers, tiles = split.world_size - 1, split.put_tiles()
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        computed = list(scatter.chunk(rank, peer, piece, signals=True))
        yield from computed
        yield Put(
            name=f"scatter.{rank}-{peer}.{piece}",
            rank=rank,
            queue=split.copy_queue(step),
            waits=one(COMPUTED, split.signal(peer, piece)) if computed else (),
            notifies=(Notify(ARRIVED, peer, piece * peers + split.place(rank, peer)),),
            sources=(region(scatter.partial, rank, split.piece(peer, piece)),),
            destinations=(region(scatter.slots, peer, scatter.slot_rows(rank, peer, piece)),),
            tiles=tiles,
        )
    if scatter.sums == TILES:
        yield from _own_sums(scatter, rank)
        return
    parts = scatter.own_parts(rank)
    for index, rows in enumerate(parts):
        # The caller's stream orders a library sum behind the own matmul; a kernel's tiles must say they are stored.
        notifies = () if scatter.sums == MAIN else (Notify(FINISHED, rank, index),)
        part = region(scatter.partial, rank, rows)
        yield Chunk(name=f"multiply.{rank}.own.{index}", rank=rank, rows=rows, region=part, notifies=notifies)
    for index, rows in enumerate(parts):
        yield _sum(scatter, rank, index, rows)
    if not parts:
        yield scatter.idle(rank, split.copy_queue(peers))


def _own_sums(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    """The own shard, piece by piece: each tile adds what the peers sent for its rows, in rank order, and stores `y`."""
    split, peers = scatter.split, scatter.split.world_size - 1
    lo = split.shard(rank)[0]
    pieces = [piece for piece in range(split.pieces) if not is_empty(split.piece(rank, piece))]
    begins = [0, *(piece + 1 for piece in pieces[:-1]), split.pieces]  # empty pieces are announced too
    for index, piece in enumerate(pieces):
        rows = split.piece(rank, piece)
        arrived = Wait(ARRIVED, (begins[index] * peers, begins[index + 1] * peers), 1)
        yield Chunk(
            name=f"multiply.{rank}.own.{piece}",
            rank=rank,
            rows=rows,
            region=region(scatter.y, rank, shifted(rows, -lo)),
            addends=tuple(
                region(scatter.slots, rank, split.in_slot(rank, source, rows))
                for source in range(split.world_size)
                if source != rank
            ),
            place=rank,
            late_waits=(arrived,),
        )
    if not pieces:
        yield scatter.idle(rank, split.copy_queue(peers))


def _stored(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    return to_owners(scatter.split, scatter.slots, rank, lambda piece: _in_y(scatter, rank, piece))


def _ring_stored(scatter: Scatter, rank: int) -> Iterator[Operation | Chunk]:
    return round_a_ring(scatter.split, scatter.slots, rank, lambda piece: _in_y(scatter, rank, piece))


def _in_y(scatter: Scatter, rank: int, piece: int) -> Stored:
    return Stored(region(scatter.y, rank, scatter.y_rows(rank, piece)))


def _sum(scatter: Scatter, rank: int, index: int, rows: Range) -> Reduce:
    """The ordered sum of a part of the own shard, once the peers' pieces that it needs are here."""
    split, peers = scatter.split, scatter.split.world_size - 1
    lo, arrived = split.shard(rank)[0], scatter.arrived(rank, rows)
    own = region(scatter.partial, rank, rows)
    slots = [region(scatter.slots, rank, split.in_slot(rank, source, rows)) for source in range(peers + 1)]
    return Reduce(
        name=f"sum.{rank}.{index}",
        rank=rank,
        queue=scatter.sums,
        waits=(arrived,) if scatter.sums == MAIN else (arrived, *one(FINISHED, index)),
        operands=tuple(own if source == rank else slot for source, slot in enumerate(slots)),
        out=region(scatter.y, rank, shifted(rows, -lo)),
    )


STORED = {"stored": to_owners_pad, "ring_stored": round_a_ring_pad}
PULLS = ("scatter_pull",)  # whose sums read the peers' partials
RINGS = ("fused_ring", "ring_stored")
METHODS: dict[str, Callable[[Scatter, int], Iterator[Operation | Chunk]]] = {
    "collective": _collective,
    "scatter": _scatter,
    "fused_ring": fused_ring,
    "remote_add": remote_add,
    "scatter_pull": scatter_pull,
    "packed": scatter_packed,
    "stored": _stored,
    "ring_stored": _ring_stored,
}
