"""All-gather in packed messages: each rank's rows to every peer and out of the messages again, by one kernel.

For rows so few that a call is latencies in a row. Every rank hears in each call from every other, so memory is reused
by echoes; who has no rows hears and tells all the same, without data. The library multiplies all rows behind it.
SOURCE: flags in the message as in NCCL's LL protocol.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.schedule import Buffer, Copy, Notify, Operation, Put, SignalPad, Wait
from overweave.schedules.communication import ARRIVED, PACKED, Chunk, Split, is_empty, region

MESSAGES = "messages"


class GatherPacked(Struct, frozen=True):
    """x: the own shard. messages: those of all peers, in global place. gathered: all rows, out of them."""

    split: Split
    x: Buffer
    messages: Buffer
    gathered: Buffer


def gather_packed(gather: GatherPacked, rank: int) -> Iterator[Operation | Chunk]:
    """In the order of the kernel: the own rows to all peers, then everybody's in place; then one matmul of them all."""
    split = gather.split
    (lo, hi), peers = split.shard(rank), split.world_size - 1
    own = region(gather.x, rank, (0, hi - lo))
    for step in range(1, split.world_size):
        peer = (rank + step) % split.world_size
        yield Put(
            name=f"push.{rank}-{peer}",
            rank=rank,
            queue=PACKED,
            notifies=(Notify(ARRIVED, peer, peers - step),),
            sources=(own,) if lo < hi else (),
            destinations=(region(gather.messages, peer, (lo, hi)),) if lo < hi else (),
        )
    shards = {owner: split.shard(owner) for owner in range(split.world_size)}
    held = {owner: rows for owner, rows in shards.items() if not is_empty(rows)}
    yield Copy(
        name=f"move.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(Wait(ARRIVED, (0, peers), 1),),
        sources=tuple(own if one == rank else region(gather.messages, rank, rows) for one, rows in held.items()),
        destinations=tuple(region(gather.gathered, rank, rows) for rows in held.values()),
    )
    whole = (0, split.rows)
    yield Chunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(gather.gathered, rank, whole))


def gather_packed_pads(split: Split) -> tuple[SignalPad, ...]:
    return (SignalPad(ARRIVED, split.world_size - 1),)
