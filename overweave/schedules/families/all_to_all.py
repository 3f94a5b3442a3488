"""All-to-all of row blocks, before a kernel that reads them or behind one that writes them: block p of rank s becomes
block s of rank p.

A tensor `[rows, cols]` has one block for each rank, all equally long. What rank p holds afterwards is a tensor of its
own, called `a.p`. In step s every rank serves the peer at distance s, as in a ring.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.errors import InputError
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Copy,
    Given,
    Goal,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    SignalPad,
)
from overweave.ir.shards import piece_rows
from overweave.ir.tensors import received
from overweave.schedules.communication import (
    ARRIVED,
    COMPLETE,
    COMPUTED,
    COPIES,
    GATHERED,
    MAIN,
    TILES,
    A,
    Chunk,
    Communication,
    Split,
    X,
    Y,
    all_arrived,
    is_empty,
    one,
    region,
    shifted,
    used,
)

OWN, LANDED = "own", "landed"


def receive(split: Split, cols: int, by_library: bool = False) -> Communication:
    """The exchange of `x [rows, cols]` before a kernel, with a `Chunk` where each arrived piece may be used.

    by_library: all of it before the kernel, by the library's all-to-all.
    """
    _check(split)
    if by_library and split.world_size > 1:
        return _received_at_once(split, cols)
    x, gathered = Buffer(X, split.rows, cols, "input"), Buffer(GATHERED, split.rows, cols, "symmetric")
    ranks = range(split.world_size)
    steps: list[Operation | Chunk] = []
    for rank in ranks:
        for step, piece in split.steps():
            peer = (rank - step) % split.world_size
            rows = _piece(split, piece)
            steps.append(
                Put(
                    name=f"push.{rank}-{peer}.{piece}",
                    rank=rank,
                    queue=split.copy_queue(step),
                    tiles=split.put_tiles(),
                    notifies=(Notify(ARRIVED, peer, split.signal(rank, piece)),),
                    sources=(region(x, rank, shifted(rows, peer * split.shard_size)),),
                    destinations=(region(gathered, peer, shifted(rows, rank * split.shard_size)),),
                )
            )
        steps += _arrivals(split, rank, (x, gathered))
    return Communication(
        world_size=split.world_size,
        buffers=used((x, gathered), steps),
        pads=(SignalPad(ARRIVED, split.world_size * split.pieces),) if split.world_size > 1 else (),
        queues=split.copy_queues() if split.world_size > 1 else (),
        given=_given(split, x),
        goal=(),
        steps=tuple(steps),
    )


def _received_at_once(split: Split, cols: int) -> Communication:
    x, gathered = Buffer(X, split.rows, cols, "input"), Buffer(GATHERED, split.rows, cols, "local")
    ranks, whole = range(split.world_size), (0, split.rows)
    steps: list[Operation | Chunk] = []
    for rank in ranks if split.rows else ():
        steps.append(_at_once(split, rank, x, gathered))
        steps.append(Chunk(name=f"read.{rank}", rank=rank, rows=whole, region=region(gathered, rank, whole)))
    return Communication(
        world_size=split.world_size,
        buffers=used((x, gathered), steps),
        pads=(),
        queues=(Queue(MAIN, COMPLETE),),
        given=_given(split, x),
        goal=(),
        steps=tuple(steps),
    )


def _at_once(split: Split, rank: int, source: Buffer, target: Buffer) -> Collective:
    """A rank's part: block p goes to rank p."""
    ranks = tuple(range(split.world_size))
    return Collective(
        name=f"all_to_all.{rank}",
        rank=rank,
        queue=MAIN,
        function="all_to_all",
        label="all_to_all",
        ranks=ranks,
        sources=tuple(region(source, rank, split.shard(to)) for to in ranks),
        destinations=tuple(region(target, rank, split.shard(origin)) for origin in ranks),
    )


def _given(split: Split, x: Buffer) -> tuple[Given, ...]:
    ranks = range(split.world_size)
    return tuple(
        Given(region(x, rank, split.shard(to)), received(A, to), rank * split.shard_size, 0)
        for rank in ranks
        for to in ranks
    )


def _arrivals(split: Split, rank: int, buffers: tuple[Buffer, Buffer]) -> Iterator[Operation | Chunk]:
    x, gathered = buffers
    own = split.shard(rank)
    yield Chunk(name=f"read.{rank}.own", rank=rank, rows=own, region=region(x, rank, own))
    for step, piece in split.steps():
        peer = (rank + step) % split.world_size
        waits, rows = one(ARRIVED, split.signal(peer, piece)), shifted(_piece(split, piece), peer * split.shard_size)
        if is_empty(rows):
            queue = split.copy_queue(step)
            yield Copy(
                name=f"idle.{rank}-{peer}.{piece}", rank=rank, queue=queue, waits=waits, sources=(), destinations=()
            )
        else:
            part = region(gathered, rank, rows)
            yield Chunk(name=f"read.{rank}-{peer}.{piece}", rank=rank, rows=rows, region=part, waits=waits)


def send(split: Split, cols: int, by_library: bool = False) -> Communication:
    """The exchange behind a kernel, with a `Chunk` where each piece is written: `y [rows, cols]` on every rank.

    by_library: all of it behind the kernel, by the library's all-to-all.
    """
    _check(split)
    if by_library and split.world_size > 1:
        return _sent_at_once(split, cols)
    ranks = range(split.world_size)
    own, landed = Buffer(OWN, split.rows, cols, "local"), Buffer(LANDED, split.rows, cols, "symmetric")
    y = Buffer(Y, split.rows, cols, "output")
    alone = split.world_size == 1
    steps = [step for rank in ranks for step in _send(split, rank, (y if alone else own, landed, y))]
    return Communication(
        world_size=split.world_size,
        buffers=used((own, landed, y), steps),
        pads=()
        if alone
        else (
            SignalPad(COMPUTED, split.world_size * split.pieces),
            SignalPad(ARRIVED, split.world_size * split.pieces),
        ),
        queues=() if alone else (Queue(MAIN, COMPLETE, after=(TILES,)), Queue(COPIES, COMPLETE)),
        given=(),
        goal=tuple(Goal(region(y, rank, (0, split.rows)), received(A, rank), 0, 0) for rank in ranks),
        steps=tuple(steps),
    )


def _sent_at_once(split: Split, cols: int) -> Communication:
    own, y = Buffer(OWN, split.rows, cols, "local"), Buffer(Y, split.rows, cols, "output")
    ranks, whole = range(split.world_size), (0, split.rows)
    steps: list[Operation | Chunk] = []
    for rank in ranks if split.rows else ():
        for to in ranks:
            rows = split.shard(to)
            steps.append(Chunk(name=f"write.{rank}-{to}", rank=rank, rows=rows, region=region(own, rank, rows)))
        steps.append(_at_once(split, rank, own, y))
    return Communication(
        world_size=split.world_size,
        buffers=used((own, y), steps),
        pads=(),
        queues=(Queue(MAIN, COMPLETE, after=(TILES,)),),
        given=(),
        goal=tuple(Goal(region(y, rank, whole), received(A, rank), 0, 0) for rank in ranks),
        steps=tuple(steps),
    )


def _send(split: Split, rank: int, buffers: tuple[Buffer, Buffer, Buffer]) -> Iterator[Operation | Chunk]:
    own, landed, _ = buffers
    for step in range(1, split.world_size):
        for piece in range(split.pieces):
            peer, rows = (rank + step) % split.world_size, _piece(split, piece)
            made = shifted(rows, peer * split.shard_size)
            signal = split.signal(peer, piece)
            if not is_empty(rows):
                notifies = (Notify(COMPUTED, rank, signal),)
                part = region(own, rank, made)
                yield Chunk(name=f"write.{rank}-{peer}.{piece}", rank=rank, rows=made, region=part, notifies=notifies)
            yield Put(
                name=f"push.{rank}-{peer}.{piece}",
                rank=rank,
                queue=COPIES,
                waits=() if is_empty(rows) else one(COMPUTED, signal),
                notifies=(Notify(ARRIVED, peer, split.signal(rank, piece)),),
                sources=(region(own, rank, made),),
                destinations=(region(landed, peer, shifted(rows, rank * split.shard_size)),),
            )
    kept = split.shard(rank)
    yield Chunk(name=f"write.{rank}.own", rank=rank, rows=kept, region=region(own, rank, kept))
    if split.world_size > 1:
        yield _collect(split, rank, buffers)


def _collect(split: Split, rank: int, buffers: tuple[Buffer, Buffer, Buffer]) -> Copy:
    """The own block and what has arrived, to the caller's tensor."""
    own, landed, y = buffers
    kept = split.shard(rank)
    rest = [rows for rows in ((0, kept[0]), (kept[1], split.rows)) if not is_empty(rows)]
    return Copy(
        name=f"collect.{rank}",
        rank=rank,
        queue=MAIN,
        waits=all_arrived(split, rank),
        sources=(region(own, rank, kept), *(region(landed, rank, rows) for rows in rest)),
        destinations=(region(y, rank, kept), *(region(y, rank, rows) for rows in rest)),
    )


def _piece(split: Split, piece: int) -> Range:
    """Rows of a piece within any block: all are cut alike."""
    return piece_rows((0, split.shard_size), split.pieces, split.alignment)[piece]


def _check(split: Split) -> None:
    if split.rows % split.world_size:
        found = f"{split.rows} rows are no whole blocks for {split.world_size} ranks"
        raise InputError("exchange all to all", found, "Pad the rows to a multiple of the ranks")
