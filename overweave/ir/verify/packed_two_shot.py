"""Whether a packed kernel of two shots does what its queue says: parts to owners, one sum, sums to all, theirs stored.

The kernel deals rows to owners by `shard_rows` and knows nothing of regions, so each operation must be the one that it
carries out; and it waits for a message from every peer in each shot, also where no rows travel, so waits must say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import Plan
from overweave.ir.schedule import LIMIT, LOCAL, OUTPUT, Copy, Operation, Put, Range, Reduce, Region, Wait
from overweave.ir.shards import shard_rows
from overweave.ir.words import INT32_BYTES

Fault = tuple[Operation | None, str]
Signals = set[tuple[str, int]]


class Queue(Struct, frozen=True):
    """A rank's part of the packed queue, taken apart."""

    parts: tuple[Put, ...]
    total: Reduce | None
    shares: tuple[Put, ...]
    move: Copy


def two_shot_faults(plan: Plan, members: dict[int, list[Operation]]) -> Iterator[Fault]:
    """Operations that the kernel does not run as they stand, and why. members: each rank's packed queue."""
    if not any(members.values()):
        return
    queues = {rank: _taken_apart(of_rank) for rank, of_rank in members.items()}
    for rank, queue in queues.items():
        if queue is None:
            last = members[rank][-1] if members[rank] else None
            yield last, f"rank {rank} does not push parts, add its own, push the sum and move its peers' sums"
    known = {rank: queue for rank, queue in queues.items() if queue is not None}
    if len(known) == len(queues):
        total = next((queue.total for queue in known.values() if queue.total is not None), None)
        if total is None:
            yield next(iter(known.values())).move, "nobody adds anything"
            return
        for rank in known:
            yield from _Rank(plan, rank, known, total).faults()


def _taken_apart(members: list[Operation]) -> Queue | None:
    if not members:
        return None
    *before, move = members
    at = next((place for place, one in enumerate(before) if isinstance(one, Reduce)), None)
    first = [one for one in before[: len(before) // 2 if at is None else at] if isinstance(one, Put)]
    total = None if at is None else before[at]
    second = [one for one in before[len(first) + (at is not None) :] if isinstance(one, Put)]
    is_whole = len(first) + len(second) + (at is not None) == len(before) and len(first) == len(second)
    if not is_whole or not isinstance(move, Copy):
        return None
    return Queue(tuple(first), total if isinstance(total, Reduce) else None, tuple(second), move)


class _Rank:
    """One rank's queue, held against everybody's."""

    def __init__(self, plan: Plan, rank: int, queues: dict[int, Queue], example: Reduce) -> None:
        self.rank, self.queues, self.own = rank, queues, queues[rank]
        self.size = plan.schedule.world_size
        self.peers = [peer for peer in range(self.size) if peer != rank]
        self.example = example
        partial = example.operands[example.rank].buffer if len(example.operands) == self.size else example.out.buffer
        self.partial, self.out = plan.schedule.buffer(partial), plan.schedule.buffer(example.out.buffer)
        self.dtypes = {plan.dtype_of(part.buffer) for part in (*example.operands, example.out)}

    def faults(self) -> Iterator[Fault]:
        partial, out = self.partial, self.out
        if (partial.home, out.home) != (LOCAL, OUTPUT) or (partial.rows, partial.cols) != (out.rows, out.cols):
            yield self.example, "the kernel adds a local partial, and stores into an output as large"
            return
        if len(self.dtypes) > 1:
            yield self.example, f"the kernel adds numbers of one dtype, not of {', '.join(sorted(self.dtypes))}"
        elif out.cols * max(ITEMSIZE_BYTES[dtype] for dtype in self.dtypes) % INT32_BYTES:
            yield self.example, f"rows of {out.cols} do not begin at words of {INT32_BYTES} bytes"
        if out.rows * out.cols > LIMIT:
            yield self.example, "it adds more numbers than 31 bits count"
        yield from self._wrong_parts()
        yield from self._wrong_sum()
        yield from self._wrong_shares()
        yield from self._wrong_move()

    def _shard(self, owner: int) -> Range | None:
        rows = shard_rows(self.out.rows, self.size, owner)
        return rows if rows[0] < rows[1] else None

    def _of(self, buffer: str, rank: int, owner: int) -> tuple[Region, ...]:
        """An owner's shard in a rank's buffer; nothing where it has none."""
        rows = self._shard(owner)
        return () if rows is None else (Region(buffer, rank, rows, (0, self.out.cols)),)

    def _wrong_parts(self) -> Iterator[Fault]:
        for put, owner, told in self._pushes(self.own.parts):
            total = self.queues[owner].total
            slot = () if total is None or len(total.operands) != self.size else (total.operands[self.rank],)
            wanted = self._of(self.partial.name, self.rank, owner)
            if not told or put.sources != wanted or put.destinations != slot:
                yield put, f"the kernel pushes {wanted} to where rank {owner} adds it, {slot}, once, and says so"
            elif put.all_waits:
                yield put, "the kernel pushes parts at once"

    def _wrong_sum(self) -> Iterator[Fault]:
        total, own = self.own.total, self._of(self.partial.name, self.rank, self.rank)
        if (total is None) != (not own):
            yield total or self.own.move, f"rank {self.rank} adds its shard, if it has one"
            return
        if total is None:
            return
        if len(total.operands) != self.size or (total.operands[self.rank],) != own:
            yield total, f"the kernel adds one operand of each rank, the own one {own}"
        if (total.out,) != self._of(self.out.name, self.rank, self.rank):
            yield total, "the kernel stores its sum as its shard of the output"
        if _awaited(total.waits) != self._told(0):
            yield total, "the kernel adds when a part of every peer is there, and waits for nothing else"
        if len(total.notifies) != 1 or total.notifies[0].rank != self.rank or total.instances != 1:
            yield total, "only the own pushes hear of a sum"

    def _wrong_shares(self) -> Iterator[Fault]:
        total = self.own.total
        due = self._told(0) if total is None else {(one.pad, one.signal) for one in total.notifies}
        for put, peer, told in self._pushes(self.own.shares):
            wanted = self._of(self.out.name, self.rank, self.rank)
            if not told or put.sources != wanted or put.destinations != self._taken(peer, self.rank):
                yield put, f"the kernel pushes {wanted} to where rank {peer} reads it, once, and says so"
            elif _awaited(put.waits) != due:
                yield put, "the kernel shares a sum when it is made, and waits for nothing else"

    def _wrong_move(self) -> Iterator[Fault]:
        move = self.own.move
        wanted = tuple(part for owner in self.peers for part in self._of(self.out.name, self.rank, owner))
        if move.destinations != wanted or any(part.rank != self.rank for part in move.sources):
            yield move, f"the kernel stores the shards of its peers, {wanted}"
        elif _awaited(move.waits) != self._told(1) or move.notifies or move.delay_us:
            yield move, "the kernel stores when a sum of every peer is there, waits for nothing else and tells nobody"

    def _taken(self, peer: int, owner: int) -> tuple[Region, ...]:
        """Where a peer reads the sum of an owner."""
        move, wanted = self.queues[peer].move, self._of(self.out.name, peer, owner)
        pairs = zip(move.sources, move.destinations, strict=False)
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
