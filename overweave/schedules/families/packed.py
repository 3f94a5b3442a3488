"""Exchanges by packed messages, whose flags travel with the data, each by one kernel beside one matmul.

For sizes so small that a call is latencies in a row. In each call every rank is told of by every other, so memory is
reused by echoes: a rank without rows tells and waits all the same, without data, because the kernel deals all shards
alike to its programs. Signals are numbered here, as the kernel does: those of a rank's peers, in ring order.
SOURCE: flags in the message as in NCCL's LL protocol; one- and two-shot all-reduces of TensorRT-LLM.
"""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.contract import GATHERED_OUT
from overweave.ir.schedule import Buffer, Copy, Goal, InitialContents, Notify, Put, Region, Wait
from overweave.schedules.communication import (
    ARRIVED,
    GATHERED,
    PACKED,
    PARTIAL,
    SUMMED,
    TOTAL,
    A,
    Communication,
    MatmulChunk,
    Split,
    X,
    Y,
    communicated,
    is_empty,
    region,
)
from overweave.schedules.families.sums import Steps, SumFamily, SumSpec, slot_of_all

MESSAGES = "messages"  # a buffer
SHARED = "shared"  # a pad: a summed piece of a peer is here


def gather_packed(split: Split, cols: int, returns_gathered: bool) -> Communication:
    """The gather of at least two ranks' rows. returns_gathered: they are unpacked in output `gathered_out`."""
    ranks, rows = range(split.world_size), split.rows
    x, messages = Buffer(X, split.shard_size, cols, "input"), Buffer(MESSAGES, rows, cols, "symmetric")
    gathered = Buffer(GATHERED_OUT if returns_gathered else GATHERED, rows, cols, "output")
    shards = {rank: split.shard(rank) for rank in ranks if not is_empty(split.shard(rank))}
    steps = [step for rank in ranks for step in _gathered(split, (x, messages, gathered), rank)] if rows else []
    return communicated(
        split.world_size,
        steps,
        (x, *((gathered,) if returns_gathered else ())),
        given=(InitialContents(region(x, rank, (0, hi - lo)), A, lo, 0) for rank, (lo, hi) in shards.items()),
        goal=(Goal(region(gathered, rank, (0, rows)), A, 0, 0) for rank in ranks if returns_gathered and rows),
        tiles_read=True,
        has_messages=True,
    )


def _gathered(split: Split, buffers: tuple[Buffer, Buffer, Buffer], rank: int) -> Steps:
    """In the order of the kernel: the own rows to all peers, then everybody's in place; then one matmul of them all."""
    x, messages, gathered = buffers
    lo, hi = split.shard(rank)
    own = region(x, rank, (0, hi - lo))
    for peer in split.peers(rank):
        yield _message(split, "push", ARRIVED, own, region(messages, peer, (lo, hi)))
    shards = [(owner, split.shard(owner)) for owner in range(split.world_size)]
    held = [(owner, rows) for owner, rows in shards if not is_empty(rows)]
    yield Copy(
        name=f"move.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(_from_all(split, ARRIVED),),
        sources=tuple(own if owner == rank else region(messages, rank, rows) for owner, rows in held),
        destinations=tuple(region(gathered, rank, rows) for _, rows in held),
    )
    whole = (0, split.rows)
    yield MatmulChunk(name=f"multiply.{rank}", rank=rank, rows=whole, region=region(gathered, rank, whole))


def _one_shot(how: SumSpec, rank: int) -> Steps:
    """Each partial to every rank, which adds them all."""
    split, own = how.split, how.region(PARTIAL, rank, how.rows)
    yield how.multiplied(f"multiply.{rank}", own)
    for peer in split.peers(rank):
        yield _message(split, "push", ARRIVED, own, slot_of_all(how, peer, rank))
    parts = tuple(own if by == rank else slot_of_all(how, rank, by) for by in range(split.world_size))
    total = how.sum(f"sum.{rank}", parts, how.region(Y, rank, how.rows))
    yield replace(total, waits=(_from_all(split, ARRIVED),))


def _straight(how: SumSpec, rank: int) -> Steps:
    """Parts to their owners, who add them; everywhere, sums to everybody, and all in place."""
    split, own = how.split, how.split.shard(rank)
    yield how.multiplied(f"multiply.{rank}", how.region(PARTIAL, rank, how.rows))
    for owner in split.peers(rank):
        rows = split.shard(owner)
        yield _message(split, "push", ARRIVED, how.region(PARTIAL, rank, rows), how.slot(owner, rank, rows))
    arrived, is_idle = (_from_all(split, ARRIVED),), is_empty(own)
    if not is_idle:
        parts = (how.slot(rank, by, own) for by in range(split.world_size))
        operands = tuple(how.region(PARTIAL, rank, own) if by == rank else part for by, part in enumerate(parts))
        total = how.sum(f"sum.{rank}", operands, how.whole(rank, own))
        yield replace(total, waits=arrived, notifies=(Notify(SUMMED, rank, 0),) if how.everywhere else ())
    elif not how.everywhere:
        yield Copy(name=f"idle.{rank}", rank=rank, queue=PACKED, waits=arrived, sources=(), destinations=())
    if not how.everywhere:
        return
    summed = (Wait(SUMMED, (0, 1), 1),)
    for peer in split.peers(rank):  # without rows, behind the parts that would have been summed
        share = _message(split, "share", SHARED, how.region(TOTAL, rank, own), how.region(TOTAL, peer, own))
        yield replace(share, waits=arrived if is_idle else summed)
    held = [rows for rows in map(split.shard, range(split.world_size)) if not is_empty(rows)]
    yield Copy(
        name=f"move.{rank}",
        rank=rank,
        queue=PACKED,
        waits=(_from_all(split, SHARED), *(() if is_idle else summed)),
        sources=tuple(how.region(TOTAL, rank, rows) for rows in held),
        destinations=tuple(how.region(Y, rank, rows) for rows in held),
    )


def _message(split: Split, word: str, pad: str, source: Region, to: Region) -> Put:
    """To a peer, which is told even where there is nothing to send."""
    rank, peer = source.rank, to.rank
    return Put(
        name=f"{word}.{rank}-{peer}",
        rank=rank,
        queue=PACKED,
        notifies=(Notify(pad, peer, (rank - peer - 1) % split.world_size),),
        sources=() if source.is_empty else (source,),
        destinations=() if source.is_empty else (to,),
    )


def _from_all(split: Split, pad: str) -> Wait:
    return Wait(pad, (0, split.world_size - 1), 1)


ONE_SHOT, STRAIGHT = SumFamily(_one_shot), SumFamily(_straight)
