"""Whether a packed kernel that deals shards does what its queue says.

scatter: parts to owners, one sum of what came. gather: the own shard to all, everybody's stored. two_shot: one behind
the other, where what is gathered are the sums. The kernels deal rows to owners by `shard_rows` and know nothing of
regions, so each operation must be the one that they carry out; and they wait for a message from every peer in each
shot, also where no rows travel, so waits must say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.plan import Exchange, Plan
from overweave.ir.schedule import (
    INPUT,
    LIMIT,
    LOCAL,
    OUTPUT,
    SYMMETRIC,
    Buffer,
    Copy,
    Operation,
    Put,
    Range,
    Reduce,
    Region,
    Wait,
)
from overweave.ir.shards import shard_rows
from overweave.ir.words import INT32_BYTES

Fault = tuple[Operation | None, str]
Signals = set[tuple[str, int]]
DUTIES: dict[Exchange, str] = {
    "scatter": "push parts and add its own",
    "gather": "push its shard and move everybody's",
    "two_shot": "push parts, add its own, push the sum and move everybody's",
}


class Queue(Struct, frozen=True):
    """A rank's part of the packed queue, taken apart. move: of a scatter, what a rank without a shard does instead."""

    parts: tuple[Put, ...] = ()
    total: Reduce | None = None
    shares: tuple[Put, ...] = ()
    move: Copy | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        behind = tuple(one for one in (self.total, self.move) if one is not None)
        return (*self.parts, *self.shares, *behind)

    @property
    def last(self) -> Operation | None:
        return self.move or self.total


class Places(Struct, frozen=True):
    """partial: what is summed. kept: where a rank has what it shares, its own in place of all if `is_short`. out: where
    results go; of a scatter the own ones alone. rows: those of all."""

    partial: Buffer | None
    kept: Buffer | None
    out: Buffer
    rows: int
    is_short: bool


def shard_faults(plan: Plan, members: dict[int, list[Operation]], exchange: Exchange) -> Iterator[Fault]:
    """Operations that the kernel does not run as they stand, and why. members: each rank's packed queue."""
    if not any(members.values()):
        return
    queues = {rank: _taken_apart(of_rank, exchange) for rank, of_rank in members.items()}
    for rank, queue in queues.items():
        if queue is None:
            last = members[rank][-1] if members[rank] else None
            yield last, f"rank {rank} does not {DUTIES[exchange]}"
    known = {rank: queue for rank, queue in queues.items() if queue is not None}
    if len(known) < len(queues):
        return
    places = _places(plan, known, exchange)
    if isinstance(places, str):
        yield known[0].last, places
        return
    for rank in known:
        yield from _Rank(plan, rank, known, places).faults()


def _taken_apart(members: list[Operation], exchange: Exchange) -> Queue | None:
    if not members:
        return None
    *before, last = members
    puts = tuple(one for one in before if isinstance(one, Put))
    if exchange == "scatter":
        if len(puts) < len(before) or (isinstance(last, Copy) and last.sources):
            return None
        return Queue(parts=puts, total=last) if isinstance(last, Reduce) else _with_move(Queue(parts=puts), last)
    if exchange == "gather":
        return _with_move(Queue(shares=puts), last) if len(puts) == len(before) else None
    at = next((place for place, one in enumerate(before) if isinstance(one, Reduce)), None)
    half = len(before) // 2 if at is None else at
    total = None if at is None else before[at]
    if len(puts) + (at is not None) < len(before) or len(puts) != 2 * half:
        return None
    return _with_move(Queue(puts[:half], total if isinstance(total, Reduce) else None, puts[half:]), last)


def _with_move(queue: Queue, last: Operation) -> Queue | None:
    return Queue(queue.parts, queue.total, queue.shares, last) if isinstance(last, Copy) else None


def _places(plan: Plan, queues: dict[int, Queue], exchange: Exchange) -> Places | str:
    """Or why there are none."""
    total = next((queue.total for queue in queues.values() if queue.total is not None), None)
    stored = [part for queue in queues.values() if queue.move for part in queue.move.destinations]
    shared = [part for queue in queues.values() for put in queue.shares for part in put.sources]
    world_size, buffer = plan.schedule.world_size, plan.schedule.buffer
    if exchange != "gather" and total is None:
        return "nobody adds anything"
    if exchange != "scatter" and not (stored and shared):
        return "nobody shares anything"
    if total is not None and len(total.operands) != world_size:
        return f"the kernel adds one operand of each rank, not {len(total.operands)}"
    partial = None if total is None else buffer(total.operands[total.rank].buffer)
    kept = buffer(shared[0].buffer) if shared else None
    out = buffer(total.out.buffer) if total and exchange == "scatter" else buffer(stored[0].buffer)
    rows = out.rows if partial is None else partial.rows
    places = Places(partial, kept, out, rows, exchange == "gather")
    named = {
        part.buffer for queue in queues.values() for each in queue.operations for part in (*each.reads, *each.writes)
    }
    dtypes = sorted({plan.dtype_of(name) for name in named})
    several = f"the kernel adds and moves numbers of one dtype, not of {', '.join(dtypes)}" if len(dtypes) > 1 else ""
    return several or _unfit(plan, places) or places


def _unfit(plan: Plan, places: Places) -> str:
    """Why the kernel cannot work on these buffers; empty if it can."""
    partial, kept, out = places.partial, places.kept, places.out
    lo, hi = shard_rows(places.rows, plan.schedule.world_size, 0)
    homes = (LOCAL, OUTPUT) if partial is None else (OUTPUT,)
    if (partial and partial.home != LOCAL) or out.home not in homes:
        return "the kernel adds a local partial, and stores into an output"
    if kept and kept.home != (INPUT if places.is_short else SYMMETRIC):
        return "the kernel shares what the caller gave it, or its sum"
    short, rows = hi - lo, places.rows
    if out.rows != (rows if kept else short) or (kept and kept.rows != (short if places.is_short else rows)):
        return "the buffers do not have the rows of all, or of the longest shard"
    if len({one.cols for one in (partial, kept, out) if one}) > 1:
        return "the buffers have not the same columns"
    row_bytes = out.cols * out.itemsize_bytes(plan.realization.dtype)
    if row_bytes % INT32_BYTES:
        return f"rows of {out.cols} do not begin at words of {INT32_BYTES} bytes"
    return "it has more numbers than 31 bits count" if places.rows * out.cols > LIMIT else ""


class _Rank:
    """One rank's queue, held against everybody's."""

    def __init__(self, plan: Plan, rank: int, queues: dict[int, Queue], places: Places) -> None:
        self.rank, self.queues, self.own, self.places = rank, queues, queues[rank], places
        self.size = plan.schedule.world_size
        self.peers = [peer for peer in range(self.size) if peer != rank]

    def faults(self) -> Iterator[Fault]:
        if self.places.partial is not None:
            yield from self._wrong_parts(self.places.partial)
            yield from self._wrong_sum(self.places.partial)
        if self.places.kept is not None:
            yield from self._wrong_shares()
        if self.own.move is not None:
            yield from self._wrong_move(self.own.move)

    def _shard(self, owner: int) -> Range | None:
        rows = shard_rows(self.places.rows, self.size, owner)
        return rows if rows[0] < rows[1] else None

    def _of(self, buffer: Buffer, rank: int, owner: int, is_short: bool = False) -> tuple[Region, ...]:
        """An owner's shard in a rank's buffer; nothing where it has none. is_short: the buffer has that shard alone."""
        rows = self._shard(owner)
        if rows is None:
            return ()
        return (Region(buffer.name, rank, (0, rows[1] - rows[0]) if is_short else rows, (0, buffer.cols)),)

    def _kept(self) -> tuple[Region, ...]:
        """What this rank shares."""
        kept = self.places.kept
        return () if kept is None else self._of(kept, self.rank, self.rank, self.places.is_short)

    def _wrong_parts(self, partial: Buffer) -> Iterator[Fault]:
        for put, owner, told in self._pushes(self.own.parts):
            total = self.queues[owner].total
            slot = () if total is None or len(total.operands) != self.size else (total.operands[self.rank],)
            wanted = self._of(partial, self.rank, owner)
            if not told or put.sources != wanted or put.destinations != slot:
                yield put, f"the kernel pushes {wanted} to where rank {owner} adds it, {slot}, once, and says so"
            elif put.all_waits:
                yield put, "the kernel pushes parts at once"

    def _wrong_sum(self, partial: Buffer) -> Iterator[Fault]:
        total, own = self.own.total, self._of(partial, self.rank, self.rank)
        if (total is None) != (not own):
            yield self.own.last, f"rank {self.rank} adds its shard, if it has one"
            return
        if total is None:
            return
        if len(total.operands) != self.size or (total.operands[self.rank],) != own:
            yield total, f"the kernel adds one operand of each rank, the own one {own}"
        kept, out = self.places.kept, self.places.out
        target = self._of(out, self.rank, self.rank, is_short=True) if kept is None else self._kept()
        if (total.out,) != target:
            yield total, f"the kernel stores its sum as {target}"
        if _awaited(total.waits) != self._told(0):
            yield total, "the kernel adds when a part of every peer is there, and waits for nothing else"
        told = [one.rank for one in total.notifies]
        if told != [self.rank] * (kept is not None) or total.instances != 1:
            yield total, "only the own pushes hear of a sum"

    def _wrong_shares(self) -> Iterator[Fault]:
        for put, peer, told in self._pushes(self.own.shares):
            wanted = self._kept()
            if not told or put.sources != wanted or put.destinations != self._taken(peer, self.rank):
                yield put, f"the kernel pushes {wanted} to where rank {peer} reads it, once, and says so"
            elif _awaited(put.waits) != self._made():
                yield put, "the kernel shares what it has when it is made, and waits for nothing else"

    def _wrong_move(self, move: Copy) -> Iterator[Fault]:
        kept = self.places.kept
        owners = range(self.size) if kept is not None else ()
        wanted = tuple(part for owner in owners for part in self._of(self.places.out, self.rank, owner))
        due = self._told(0) if kept is None else self._told(1) | (self._made() if self.own.total else set())
        if move.destinations != wanted or any(part.rank != self.rank for part in move.sources):
            yield move, f"the kernel stores the shards of all, {wanted}"
        elif self._taken(self.rank, self.rank) != self._kept():
            yield move, f"the kernel takes the own shard from {self._kept()}"
        elif _awaited(move.waits) != due or move.notifies or move.delay_us:
            yield (
                move,
                "the kernel stores when a message of every peer is there, waits for nothing else and tells nobody",
            )

    def _made(self) -> Signals:
        """What tells that this rank has what it shares."""
        total = self.own.total
        if self.places.partial is None:
            return set()
        return self._told(0) if total is None else {(one.pad, one.signal) for one in total.notifies}

    def _taken(self, peer: int, owner: int) -> tuple[Region, ...]:
        """Where a peer reads the shard of an owner."""
        move, wanted = self.queues[peer].move, self._of(self.places.out, peer, owner)
        pairs = zip(move.sources, move.destinations, strict=False) if move else ()
        return tuple(source for source, destination in pairs if (destination,) == wanted)

    def _pushes(self, puts: tuple[Put, ...]) -> Iterator[tuple[Put, int, bool]]:
        """(put, the peer it tells, whether it is the one Put that tells this one peer)."""
        peers = [put.notifies[0].rank if put.notifies else self.rank for put in puts]
        is_whole = sorted(peers) == self.peers
        for put, peer in zip(puts, peers, strict=True):
            yield put, peer, is_whole and len(put.notifies) == 1 and put.instances == 1

    def _told(self, shot: int) -> Signals:
        """The signals by which this rank hears of its peers' pushes in a shot."""
        pushes = [put for peer in self.peers for put in (self.queues[peer].parts, self.queues[peer].shares)[shot]]
        return {(one.pad, one.signal) for put in pushes for one in put.notifies if one.rank == self.rank}


def _awaited(waits: tuple[Wait, ...]) -> Signals:
    return {(wait.pad, signal) for wait in waits for signal in range(*wait.signals)}
