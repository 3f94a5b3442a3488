"""Whether a packed kernel does what its queue says: each rank's queue is held against the one that its kernel runs.

scatter: parts to owners, one sum of what came. gather: the own shard to all, everybody's stored. two_shot: one behind
the other, where what is gathered are the sums. one_shot: a scatter in which every rank owns all rows.

The kernels deal rows to owners by `shard_rows` and know nothing of regions, so each operation must be the one that they
carry out. They wait for a message from every peer in each shot, also where no rows travel, so waits must say so. They
wait word by word, the schedule for whole Puts. That is the same proof: cut every Put and Reduce into words, each with a
signal of its own, and every path from a Put to a Reduce is one from a word to the same word.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from overweave.ir.plan import MOST_PACKED_RANKS, PACKED_KERNEL, PackedExchange, Plan
from overweave.ir.schedule import (
    ECHOES,
    INPUT,
    LIMIT,
    LOCAL,
    OUTPUT,
    SYMMETRIC,
    Buffer,
    Copy,
    Operation,
    Put,
    Reduce,
    Region,
)
from overweave.ir.shards import shard_rows
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings
from overweave.ir.words import INT32_BYTES

Fault = tuple[Operation | None, str]
Signals = frozenset[tuple[str, int]]
ADDS: tuple[PackedExchange, ...] = ("one_shot", "scatter", "two_shot")
SHARES: tuple[PackedExchange, ...] = ("gather", "two_shot")
DUTIES: dict[PackedExchange, str] = {
    "one_shot": "push all that it has and add one operand of each rank",
    "scatter": "push parts and add its own",
    "gather": "push its shard and move everybody's",
    "two_shot": "push parts, add its own, push the sum and move everybody's",
}
PART = "the kernel pushes each shard to where its owner adds it, at once, once, and says so"
SUM = "the kernel adds one operand of each rank when a part of every peer is there, and only the own pushes hear of it"
SHARE = "the kernel pushes its shard to where the peer reads it when it is made, once, and says so"
MOVE = "the kernel takes the own shard from where it is, stores those of all when they came, and waits for nothing else"


class ExpectedStep(NamedTuple):
    """An operation of a packed queue, without its name. told: ranks; heard: signals of the own rank. says: in words."""

    says: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    told: tuple[int, ...] = ()
    heard: Signals = frozenset()

    def is_done_by(self, found: Operation) -> bool:
        told = tuple(notify.rank for notify in found.notifies)
        rests = isinstance(found, Copy) and found.delay_us > 0
        same = (found.reads, found.writes, told, _heard(found)) == self[1:]
        return same and found.instances == 1 and not rests


class PackedQueue(NamedTuple):
    """A rank's packed queue, taken apart. move: without regions where a rank of a scatter has nothing to add."""

    parts: tuple[Put, ...]
    total: Reduce | None
    shares: tuple[Put, ...]
    move: Copy | None

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (*self.parts, *filter(None, (self.total,)), *self.shares, *filter(None, (self.move,)))


class PackedBuffers(NamedTuple):
    """whole: what is summed. kept: what a rank shares, its own alone if the caller gave it. out: where results go."""

    whole: Buffer | None
    kept: Buffer | None
    out: Buffer
    rows: int


def check_packed(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Adds refusals for a packed queue that its kernel cannot run."""
    schedule, config = plan.schedule, plan.realization.packed
    engines = plan.realization.engine_by_queue
    if PACKED_KERNEL not in engines.values() or config is None:
        return
    if schedule.world_size > MOST_PACKED_RANKS:
        said = f"{schedule.world_size} ranks; a packed kernel looks at messages of up to {MOST_PACKED_RANKS}"
        findings.add("lowering", None, said)
    if schedule.reuse == ECHOES and sum(buffer.home == LOCAL for buffer in schedule.buffers) > 1:
        said = "beside the memory of its messages a packed kernel has room for one local buffer"
        findings.add("lowering", None, said)
    own = [
        [graph.operations[at] for at in positions if engines[graph.operations[at].queue] == PACKED_KERNEL]
        for positions in graph.of_rank
    ]
    for faulty, said in _faults(plan, own, config.exchange) if any(own) else ():
        findings.add("lowering", faulty, said)


def _faults(plan: Plan, own: list[list[Operation]], exchange: PackedExchange) -> Iterator[Fault]:
    """Operations that the kernel does not run as they stand, and why."""
    queues: list[PackedQueue] = []
    for rank, operations in enumerate(own):
        queue = _taken_apart(operations, exchange, len(own))
        if queue is None:
            yield operations[-1] if operations else None, f"rank {rank} does not {DUTIES[exchange]}"
        else:
            queues.append(queue)
    if len(queues) < len(own):
        return
    places = _places(plan, queues, exchange)
    if isinstance(places, str):
        yield own[0][-1], places
        return
    kernels = _Kernels(queues, places, exchange)
    for rank, queue in enumerate(queues):
        steps = kernels.steps(rank)
        if len(steps) != len(queue.operations):
            yield own[rank][-1], f"rank {rank} adds its shard, if it has one"
            continue
        for step, found in zip(steps, queue.operations, strict=True):
            if not step.is_done_by(found):
                ends = f"{', '.join(map(str, step.reads))} to {', '.join(map(str, step.writes))}"
                yield found, f"{step.says}: {ends}"


def _taken_apart(operations: list[Operation], exchange: PackedExchange, size: int) -> PackedQueue | None:
    """The operations by what they are for, pushes in the order of the ranks that they tell; None if they are not so."""
    puts = [one for one in operations if isinstance(one, Put)]
    total = next((one for one in operations if isinstance(one, Reduce)), None)
    move = next((one for one in operations if isinstance(one, Copy)), None)
    parts = size - 1 if exchange in ADDS else 0
    shares = size - 1 if exchange in SHARES else 0
    in_order = (*puts[:parts], *filter(None, (total,)), *puts[parts:], *filter(None, (move,)))
    adds, moves = exchange in ADDS, exchange in SHARES
    fits = len(puts) == parts + shares and tuple(operations) == in_order and bool(total or move)
    if not fits or (total and not adds) or (moves and move is None) or (move and not moves and (total or move.sources)):
        return None
    if total and len(total.operands) != size:
        return None

    def peer(put: Put) -> int:
        return put.notifies[0].rank if put.notifies else put.rank

    by_rank = (tuple(sorted(some, key=peer)) for some in (puts[:parts], puts[parts:]))
    return PackedQueue(next(by_rank), total, next(by_rank), move)


def _places(plan: Plan, queues: list[PackedQueue], exchange: PackedExchange) -> PackedBuffers | str:
    """Or why there are none that the kernel can work on."""
    totals = [queue.total for queue in queues if queue.total]
    stored = [part for queue in queues if queue.move for part in queue.move.destinations]
    shared = [part for queue in queues for put in queue.shares for part in put.sources]
    buffer = plan.schedule.buffer
    if exchange in ADDS and not totals:
        return "nobody adds anything"
    if exchange in SHARES and not (stored and shared):
        return "nobody shares anything"
    whole = buffer(totals[0].operands[totals[0].rank].buffer) if totals else None
    kept = buffer(shared[0].buffer) if shared else None
    out = buffer(stored[0].buffer if exchange in SHARES else totals[0].out.buffer)
    places = PackedBuffers(whole, kept, out, whole.rows if whole else out.rows)
    named = {part.buffer for queue in queues for one in queue.operations for part in (*one.reads, *one.writes)}
    dtypes = sorted({plan.dtype_of(name) for name in named})
    if len(dtypes) > 1:
        return f"the kernel adds and moves numbers of one dtype, not of {', '.join(dtypes)}"
    return _unfit(plan, places, exchange) or places


def _unfit(plan: Plan, places: PackedBuffers, exchange: PackedExchange) -> str:
    """Why the kernel cannot work on these buffers; empty if it can."""
    whole, kept, out, rows = places
    short = _dealt(exchange, rows, plan.schedule.world_size, 0)[1]
    homes = (OUTPUT,) if whole else (LOCAL, OUTPUT)
    if (whole and whole.home != LOCAL) or out.home not in homes:
        return "the kernel adds a local partial, and stores into an output"
    if kept and kept.home != (SYMMETRIC if whole else INPUT):
        return "the kernel shares what the caller gave it, or its sum"
    if out.rows != (rows if kept else short) or (kept and kept.rows != (rows if whole else short)):
        return "the buffers do not have the rows of all, or of the longest shard"
    if len({one.cols for one in (whole, kept, out) if one}) > 1:
        return "the buffers have not the same columns"
    stretch_bytes = out.cols * out.itemsize_bytes(plan.realization.dtype) * (rows if exchange == "one_shot" else 1)
    if stretch_bytes % INT32_BYTES:
        return f"rows of {out.cols} do not begin at words of {INT32_BYTES} bytes"
    return "it has more numbers than 31 bits count" if rows * out.cols > LIMIT else ""


def _dealt(exchange: PackedExchange, rows: int, size: int, owner: int) -> tuple[int, int]:
    """The rows that an owner adds."""
    return (0, rows) if exchange == "one_shot" else shard_rows(rows, size, owner)


class _Kernels:
    """What the kernels of all ranks do. Where messages lie is as the ranks that read them say."""

    def __init__(self, queues: list[PackedQueue], places: PackedBuffers, exchange: PackedExchange) -> None:
        self.queues, self.places, self.size = queues, places, len(queues)
        self.rows = partial(_dealt, exchange, places.rows, self.size)

    def steps(self, rank: int) -> list[ExpectedStep]:
        """One rank's: parts, its sum, shares and the move, each where the exchange has it."""
        (whole, kept, out, _), queue, steps = self.places, self.queues[rank], list[ExpectedStep]()
        peers = [peer for peer in range(self.size) if peer != rank]
        parts, shares = (self._told(rank, shot) for shot in (0, 1))
        is_adding = self.rows(rank)[0] < self.rows(rank)[1]
        own = self._shard(kept, rank, rank, is_short=whole is None) if kept else ()
        if whole:
            steps += [
                ExpectedStep(PART, self._shard(whole, rank, peer), self._added(peer, rank), (peer,)) for peer in peers
            ]
        if whole and is_adding:
            operands = list(queue.total.operands) if queue.total else []
            operands[rank : rank + 1] = self._shard(whole, rank, rank)
            target = own or self._shard(out, rank, rank, is_short=True)
            steps.append(ExpectedStep(SUM, tuple(operands), target, (rank,) if kept else (), parts))
        made = _signals(queue.total, rank) if whole and is_adding else parts
        if kept:
            steps += [ExpectedStep(SHARE, own, self._taken(peer, rank), (peer,), made) for peer in peers]
            taken = (own if owner == rank else self._taken(rank, owner) for owner in range(self.size))
            stored = (self._shard(out, rank, owner) for owner in range(self.size))
            heard = shares | (made if whole and is_adding else frozenset())
            steps.append(ExpectedStep(MOVE, tuple(one for each in taken for one in each), sum(stored, ()), (), heard))
        elif not is_adding:
            steps.append(ExpectedStep(MOVE, (), (), (), parts))
        return steps

    def _shard(self, buffer: Buffer, rank: int, owner: int, is_short: bool = False) -> tuple[Region, ...]:
        """An owner's rows in a rank's buffer; nothing where it has none. is_short: the buffer has these alone."""
        lo, hi = self.rows(owner)
        rows = (0, hi - lo) if is_short else (lo, hi)
        return (Region(buffer.name, rank, rows, (0, buffer.cols)),) if lo < hi else ()

    def _added(self, owner: int, source: int) -> tuple[Region, ...]:
        """Where an owner adds what a source sent."""
        total = self.queues[owner].total
        return (total.operands[source],) if total else ()

    def _taken(self, rank: int, owner: int) -> tuple[Region, ...]:
        """Where a rank reads the shard of an owner."""
        move, wanted = self.queues[rank].move, self._shard(self.places.out, rank, owner)
        pairs = zip(move.sources, move.destinations, strict=False) if move else ()
        return tuple(source for source, destination in pairs if (destination,) == wanted)

    def _told(self, rank: int, shot: int) -> Signals:
        """The signals by which a rank hears of its peers' pushes in a shot."""
        pushes = (put for queue in self.queues for put in (queue.parts, queue.shares)[shot])
        return frozenset(one for put in pushes for one in _signals(put, rank))


def _signals(operation: Operation | None, rank: int) -> Signals:
    """The signals of a rank that an operation raises."""
    notifies = operation.notifies if operation else ()
    return frozenset((one.pad, one.signal) for one in notifies if one.rank == rank)


def _heard(operation: Operation) -> Signals:
    return frozenset((wait.pad, signal) for wait in operation.all_waits for signal in range(*wait.signals))
