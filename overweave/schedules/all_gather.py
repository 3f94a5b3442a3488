"""All-gather of row shards: `x [S, k]` on every rank -> all of `a [m, k]` on every rank, S = ceil(m / world_size).

A rank meets the shards in the order own, own + 1, own + 2, ...: its rotation. In step s every rank serves, or asks,
the peer at distance s, so that in ring order each link carries one chunk at a time.
SOURCE: Flux (arXiv 2406.06858) 4.2 for pull, push and rotation; FiCCO for pieces from all peers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.schedule import (
    CREDITS,
    ECHOES,
    Buffer,
    Copy,
    Get,
    Given,
    Goal,
    Notify,
    Operation,
    Put,
    Queue,
    SignalPad,
)
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    GATHERED,
    ISSUE,
    MAIN,
    PACKED,
    READY,
    SUMS,
    TILES,
    A,
    Chunk,
    Communication,
    Split,
    X,
    all_arrived,
    gathered_by_library,
    is_empty,
    one,
    region,
    shifted,
    used,
)
from overweave.schedules.gather_packed import MESSAGES, GatherPacked, gather_packed, gather_packed_pads

STAGED, GATHERED_OUT = "staged", "gathered_out"


class _Gather(Struct, frozen=True):
    split: Split
    x: Buffer
    staged: Buffer
    messages: Buffer
    gathered: Buffer
    gathered_out: Buffer

    def own(self, rank: int) -> Chunk:
        lo, hi = self.split.shard(rank)
        return Chunk(name=f"multiply.{rank}.own", rank=rank, rows=(lo, hi), region=region(self.x, rank, (0, hi - lo)))


def all_gather(split: Split, cols: int, method: str, returns_gathered: bool = False) -> Communication:
    """The moves of an all-gather of `[split.rows, cols]`, with a `Chunk` where each arrived chunk may be used.

    collective: the library's. push: each owner puts its pieces into its peers' `gathered`, and the flag after them.
    pull: each owner stages its shard and says `ready`; its peers get the pieces. Both use the own shard where it lies.
    packed: in messages that carry their flag (schedules/gather_packed.py).
    returns_gathered: once all has arrived it is copied to output `gathered_out`; what was packed is unpacked there.
    """
    ranks = range(split.world_size)
    rows = split.rows
    gather = _Gather(
        split,
        Buffer(X, split.shard_size, cols, "input"),
        Buffer(STAGED, split.shard_size, cols, "symmetric"),
        Buffer(MESSAGES, rows, cols, "symmetric"),
        Buffer(GATHERED, rows, cols, "local" if method in ("collective", "packed") else "symmetric"),
        Buffer(GATHERED_OUT, rows, cols, "output"),
    )
    collects = returns_gathered and rows > 0
    is_packed = method == "packed" and split.world_size > 1
    gather = replace(gather, gathered=gather.gathered_out) if is_packed and returns_gathered else gather
    steps: list[Operation | Chunk] = []
    for rank in ranks:
        steps += METHODS[method](gather, rank)
        steps += [_collect(gather, rank, method in ("push", "pull"))] if collects and not is_packed else []
    buffers = (gather.x, gather.staged, gather.messages, gather.gathered, gather.gathered_out)
    queues = _queues(split, method)
    if any(not isinstance(step, Chunk) and step.queue == MAIN for step in steps):
        queues = (Queue(MAIN, COMPLETE, after=(TILES, SUMS)), *queues)
    return Communication(
        world_size=split.world_size,
        buffers=used(dict.fromkeys(buffers if returns_gathered else buffers[:-1]), steps),
        pads=_pads(split, method),
        queues=queues,
        given=tuple(_given(gather, rank) for rank in ranks if not is_empty(split.shard(rank))),
        goal=tuple(Goal(region(gather.gathered_out, rank, (0, rows)), A, 0, 0) for rank in ranks if collects),
        steps=tuple(steps),
        reuse=ECHOES if is_packed else CREDITS,
    )


def _pads(split: Split, method: str) -> tuple[SignalPad, ...]:
    if method == "collective" or split.world_size == 1:
        return ()
    if method == "packed":
        return gather_packed_pads(split)
    arrived = SignalPad(ARRIVED, split.world_size * split.pieces)
    return (arrived, SignalPad(READY, split.world_size)) if method == "pull" else (arrived,)


def _queues(split: Split, method: str) -> tuple[Queue, ...]:
    if method == "packed":
        return (Queue(PACKED, ISSUE, after=(MAIN,)),) if split.world_size > 1 else ()
    return () if method == "collective" else split.copy_queues()


def _given(gather: _Gather, rank: int) -> Given:
    lo, hi = gather.split.shard(rank)
    return Given(region(gather.x, rank, (0, hi - lo)), A, lo, 0)


def _collective(gather: _Gather, rank: int) -> Iterator[Operation | Chunk]:
    split = gather.split
    if split.world_size == 1:
        if split.rows > 0:
            yield gather.own(rank)
        return
    if split.rows == 0:
        return
    yield gathered_by_library(split, gather.own(rank).region, gather.gathered)
    whole = (0, split.rows)
    yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(gather.gathered, rank, whole))


def _push(gather: _Gather, rank: int) -> Iterator[Operation | Chunk]:
    yield from _puts(gather, rank)
    yield from _arrivals(gather, rank)


def _packed(gather: _Gather, rank: int) -> Iterator[Operation | Chunk]:
    if gather.split.world_size == 1 or gather.split.rows == 0:
        return _collective(gather, rank)
    return gather_packed(GatherPacked(gather.split, gather.x, gather.messages, gather.gathered), rank)


def _puts(gather: _Gather, rank: int) -> Iterator[Put]:
    split = gather.split
    first, tiles = split.shard(rank)[0], split.put_tiles()
    for step, piece in split.steps():
        peer, rows = split.peer(rank, -step), split.piece(rank, piece)
        yield Put(
            name=f"push.{rank}-{peer}.{piece}",
            rank=rank,
            queue=split.copy_queue(step),
            notifies=(Notify(ARRIVED, peer, split.signal(rank, piece)),),
            sources=(region(gather.x, rank, shifted(rows, -first)),),
            destinations=(region(gather.gathered, peer, rows),),
            tiles=tiles,
        )


def _pull(gather: _Gather, rank: int) -> Iterator[Operation | Chunk]:
    split = gather.split
    yield from _stage(gather, rank)
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        rows, first = split.piece(peer, piece), split.shard(peer)[0]
        yield Get(
            name=f"pull.{rank}-{peer}.{piece}",
            rank=rank,
            queue=split.copy_queue(step),
            waits=one(READY, peer),
            notifies=(Notify(ARRIVED, rank, split.signal(peer, piece)),),
            sources=(region(gather.staged, peer, shifted(rows, -first)),),
            destinations=(region(gather.gathered, rank, rows),),
        )
    yield from _arrivals(gather, rank)


def _stage(gather: _Gather, rank: int) -> Iterator[Copy]:
    """Puts the own shard where peers may read it, and tells them."""
    lo, hi = gather.split.shard(rank)
    peers = gather.split.peers(rank)
    if peers:
        yield Copy(
            name=f"stage.{rank}",
            rank=rank,
            queue=MAIN,
            notifies=tuple(Notify(READY, peer, rank) for peer in peers),
            sources=(region(gather.x, rank, (0, hi - lo)),),
            destinations=(region(gather.staged, rank, (0, hi - lo)),),
        )


def _arrivals(gather: _Gather, rank: int) -> Iterator[Operation | Chunk]:
    """The own shard, then what arrives, in the order it does. An empty piece is waited for at the very end."""
    split = gather.split
    if not is_empty(split.shard(rank)):
        yield gather.own(rank)
    idle: list[Copy] = []
    for step, piece in split.steps():
        peer = split.peer(rank, step)
        rows, waits = split.piece(peer, piece), one(ARRIVED, split.signal(peer, piece))
        if is_empty(rows):
            name, queue = f"idle.{rank}-{peer}.{piece}", split.copy_queue(step)
            idle.append(Copy(name=name, rank=rank, queue=queue, waits=waits, sources=(), destinations=()))
        else:
            source = region(gather.gathered, rank, rows)
            yield Chunk(name=f"multiply.{rank}-{peer}.{piece}", rank=rank, rows=rows, region=source, waits=waits)
    yield from idle


def _collect(gather: _Gather, rank: int, waits_for_all: bool) -> Copy:
    """Copies everything that has arrived, and the own shard, to the caller's output."""
    split = gather.split
    lo, hi = split.shard(rank)
    if split.world_size == 1:
        parts = [(gather.x, (0, hi), (0, hi))]
    elif not waits_for_all:
        parts = [(gather.gathered, (0, split.rows), (0, split.rows))]
    else:
        rest = [(gather.gathered, rows, rows) for rows in ((0, lo), (hi, split.rows))]
        parts = [(gather.x, (0, hi - lo), (lo, hi)), *rest]
    parts = [part for part in parts if not is_empty(part[1])]
    return Copy(
        name=f"collect.{rank}",
        rank=rank,
        queue=MAIN,
        waits=all_arrived(split, rank) if waits_for_all and split.world_size > 1 else (),
        sources=tuple(region(buffer, rank, source) for buffer, source, _ in parts),
        destinations=tuple(region(gather.gathered_out, rank, rows) for _, _, rows in parts),
    )


METHODS: dict[str, Callable[[_Gather, int], Iterator[Operation | Chunk]]] = {
    "collective": _collective,
    "push": _push,
    "pull": _pull,
    "packed": _packed,
}
