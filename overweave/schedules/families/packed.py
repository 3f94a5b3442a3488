"""Exchanges by packed messages, whose flags travel with the data, each by one kernel beside one matmul.

For sizes so small that a call is latencies in a row. In each call every rank is told of by every other, so memory is
reused by echoes: a rank without rows tells and waits all the same, without data, because the kernel deals all shards
alike to its programs. Signals are numbered here, as the kernel does: those of a rank's peers, in ring order.
SOURCE: flags in the message as in NCCL's LL protocol; one- and two-shot all-reduces of TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.contract import GATHERED_OUT
from overweave.ir.schedule import (
    Buffer,
    Copy,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Range,
    Reduce,
    Region,
    Wait,
)
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    ARRIVED,
    GATHERED,
    PACKED,
    PARTIAL,
    SLOTS,
    SUMMED,
    TOTAL,
    A,
    B,
    Communication,
    MatmulChunk,
    Split,
    X,
    Y,
    communicated,
    is_empty,
    region,
    shifted,
)
from overweave.schedules.records.record import MethodInputs

MESSAGES = "messages"  # a buffer
SHARED = "shared"  # a pad: a summed piece of a peer is here
Steps = Iterator[Operation | MatmulChunk]


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


class PackedSums(Struct, frozen=True):
    """Sums of `cols` columns, of which each rank gets its shard, or, everywhere, all."""

    split: Split
    cols: int
    everywhere: bool

    @property
    def rows(self) -> Range:
        return 0, self.split.rows

    def region(self, buffer: str, rank: int, rows: Range) -> Region:
        return Region(buffer, rank, rows, (0, self.cols))

    def wanted(self, rank: int) -> tuple[Range, Region]:
        """The rows that a rank gets, and where."""
        rows = self.rows if self.everywhere else self.split.shard(rank)
        return rows, self.region(Y, rank, shifted(rows, -rows[0]))

    def arrived(self, rank: int, source: int, rows: Range) -> Region:
        """Where all rows, or a rank's shard, lie there until they are added, from a source: behind those of others."""
        if source == rank:
            return self.region(PARTIAL, rank, rows)
        height = self.split.rows if rows == self.rows else self.split.shard_size
        return self.region(SLOTS, rank, shifted(rows, source * height - rows[0]))

    def added(self, rank: int, rows: Range, out: Region) -> Reduce:
        """The sum of all ranks' partials of rows, in rank order, when all have arrived."""
        operands = tuple(self.arrived(rank, by, rows) for by in range(self.split.world_size))
        waits = (_from_all(self.split, ARRIVED),)
        return Reduce(name=f"sum.{rank}", rank=rank, queue=PACKED, waits=waits, operands=operands, out=out)


def packed_sums(steps_of: Callable[[PackedSums, int], Steps], work: MethodInputs) -> Communication:
    """Sums by the steps of each rank."""
    split, cols, everywhere = work.split, work.problem.n, work.problem.record.shares_sums
    how, is_alone = PackedSums(split, cols, everywhere), split.world_size == 1
    ranks = range(split.world_size if split.rows else 0)
    steps = [step for rank in ranks for step in (_multiplied(how, rank, Y) if is_alone else steps_of(how, rank))]
    y = Buffer(Y, split.rows if everywhere else split.shard_size, cols, "output")
    wanted = ((rows, out) for rows, out in map(how.wanted, ranks) if not is_empty(rows))
    goal = (Goal(out, product(A, B), rows[0], 0, work.held) for rows, out in wanted)
    return communicated(split.world_size, steps, (y,), goal=goal, has_messages=not is_alone)


def _multiplied(how: PackedSums, rank: int, buffer: str = PARTIAL) -> Steps:
    """All of a rank's partial by one matmul."""
    yield MatmulChunk(name=f"multiply.{rank}", rank=rank, rows=how.rows, region=how.region(buffer, rank, how.rows))


def one_shot(how: PackedSums, rank: int) -> Steps:
    """Each partial to every rank, which adds them all."""
    yield from _multiplied(how, rank)
    for peer in how.split.peers(rank):
        to = how.arrived(peer, rank, how.rows)
        yield _message(how.split, "push", ARRIVED, how.region(PARTIAL, rank, how.rows), to)
    yield how.added(rank, how.rows, how.region(Y, rank, how.rows))


def straight(how: PackedSums, rank: int) -> Steps:
    """Parts to their owners, who add them; everywhere, sums to everybody, and all in place."""
    split, own = how.split, how.split.shard(rank)
    yield from _multiplied(how, rank)
    for owner in split.peers(rank):
        rows = split.shard(owner)
        to = how.arrived(owner, rank, rows)
        yield _message(split, "push", ARRIVED, how.region(PARTIAL, rank, rows), to)
    arrived, is_idle = (_from_all(split, ARRIVED),), is_empty(own)
    if not is_idle:
        total = how.added(rank, own, how.region(TOTAL, rank, own) if how.everywhere else how.wanted(rank)[1])
        yield replace(total, notifies=(Notify(SUMMED, rank, 0),) if how.everywhere else ())
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
