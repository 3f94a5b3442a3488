"""All-gather in packed messages: each rank's rows to every peer and out of the messages again, by one kernel.

For rows so few that a call is latencies in a row. Every rank hears in each call from every other, so memory is reused
by echoes; who has no rows hears and tells all the same, without data. The library multiplies all rows behind it.
SOURCE: flags in the message as in NCCL's LL protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.promise import GATHERED_OUT
from overweave.ir.schedule import ECHOES, Buffer, Copy, Given, Goal, Notify, Operation, Put, Queue, SignalPad, Wait
from overweave.schedules.communication import (
    ARRIVED,
    GATHERED,
    ISSUE,
    MAIN,
    PACKED,
    A,
    Chunk,
    Communication,
    Split,
    X,
    is_empty,
    region,
    used,
)

MESSAGES = "messages"


def gather_packed(split: Split, cols: int, returns_gathered: bool) -> Communication:
    """The exchange of at least two ranks. returns_gathered: rows are unpacked in output `gathered_out`."""
    ranks, rows = range(split.world_size), split.rows
    x, messages = Buffer(X, split.shard_size, cols, "input"), Buffer(MESSAGES, rows, cols, "symmetric")
    gathered = Buffer(GATHERED_OUT, rows, cols, "output") if returns_gathered else Buffer(GATHERED, rows, cols, "local")
    shards = {rank: split.shard(rank) for rank in ranks if not is_empty(split.shard(rank))}
    steps = [step for rank in ranks for step in _of_rank(split, (x, messages, gathered), rank)] if rows else []
    return Communication(
        world_size=split.world_size,
        buffers=used((x, messages, gathered), steps),
        pads=(SignalPad(ARRIVED, split.world_size - 1),),
        queues=(Queue(PACKED, ISSUE, after=(MAIN,)),),
        given=tuple(Given(region(x, rank, (0, hi - lo)), A, lo, 0) for rank, (lo, hi) in shards.items()),
        goal=tuple(Goal(region(gathered, rank, (0, rows)), A, 0, 0) for rank in ranks if returns_gathered and rows),
        steps=tuple(steps),
        reuse=ECHOES,
    )


def _of_rank(split: Split, buffers: tuple[Buffer, Buffer, Buffer], rank: int) -> Iterator[Operation | Chunk]:
    """In the order of the kernel: the own rows to all peers, then everybody's in place; then one matmul of them all."""
    x, messages, gathered = buffers
    (lo, hi), peers = split.shard(rank), split.world_size - 1
    own = region(x, rank, (0, hi - lo))
    for step, peer in enumerate(split.peers(rank), 1):
        yield Put(
            name=f"push.{rank}-{peer}",
            rank=rank,
            queue=PACKED,
            notifies=(Notify(ARRIVED, peer, peers - step),),
            sources=(own,) if lo < hi else (),
            destinations=(region(messages, peer, (lo, hi)),) if lo < hi else (),
        )
    shards = {owner: split.shard(owner) for owner in range(split.world_size)}
    held = {owner: rows for owner, rows in shards.items() if not is_empty(rows)}
    yield Copy(
        name=f"move.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(Wait(ARRIVED, (0, peers), 1),),
        sources=tuple(own if one == rank else region(messages, rank, rows) for one, rows in held.items()),
        destinations=tuple(region(gathered, rank, rows) for rows in held.values()),
    )
    whole = (0, split.rows)
    yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(gathered, rank, whole))
