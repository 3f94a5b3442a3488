"""Whether a packed kernel (LL protocol: messages carry their flag) does what its queue says.

Each rank's queue is compared with the operations that its kernel runs. scatter: push parts to owners, each adds what
arrived. gather: push the own shard to all, each stores all shards. two_shot: a scatter, then a gather of the sums.
one_shot: a scatter in which every rank owns all rows.

The kernels split rows by `shard_rows` and know no regions, so the operations must match exactly. They wait for a
message from every peer in each shot, also where no rows travel, so waits must say so. They wait word by word, the
schedule for whole Puts. That is the same proof: cut every Put and Reduce into words, each with a signal of its own, and
every path from a Put to a Reduce is one from a word to the same word.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.epilogue import NO_EPILOGUE
from overweave.ir.plan import INT32_BYTES, LIBRARY, MOST_PACKED_RANKS, PACKED_KERNEL, PackedExchange, Plan
from overweave.ir.schedule import (
    ECHOES,
    INPUT,
    LIMIT,
    LOCAL,
    OUTPUT,
    SYMMETRIC,
    Buffer,
    Compute,
    Copy,
    Operation,
    Put,
    Reduce,
    Region,
)
from overweave.ir.shards import shard_rows
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings

Fault = tuple[Operation | None, str]
Signals = frozenset[tuple[str, int]]
ADDS: tuple[PackedExchange, ...] = ("one_shot", "scatter", "two_shot")
SHARES: tuple[PackedExchange, ...] = ("gather", "two_shot")
DUTIES: dict[PackedExchange, str] = {
    "one_shot": "push all that it has and add one operand of each rank",
    "scatter": "push parts and add its own",
    "gather": "push its shard and move those of all ranks",
    "two_shot": "push parts, add its own, push the sum and move those of all ranks",
}
# What the kernel does at each step, for the messages of refusals.
PART = "the kernel pushes each shard to where its owner adds it, without waits, once, and notifies the owner"
SUM = "the kernel adds one operand of each rank when a part of every peer has arrived, and notifies only its own pushes"
SHARE = "the kernel pushes its shard to where the peer reads it when it is written, once, and notifies the peer"
MOVE = "the kernel reads its own shard in place, stores the shards of all when they have arrived, and waits for no more"


class ExpectedStep(NamedTuple):
    """An operation that the kernel runs: regions, ranks that it notifies, and own signals that it awaits. requirement:
    the step in words, for refusals."""

    requirement: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    notified: tuple[int, ...] = ()
    awaited: Signals = frozenset()

    def is_done_by(self, operation: Operation) -> bool:
        """Whether an operation of the schedule is this step."""
        notified = tuple(notify.rank for notify in operation.notifies)
        sleeps = isinstance(operation, Copy) and operation.delay_us > 0
        same = (operation.reads, operation.writes, notified, _awaited_signals(operation)) == self[1:]
        return same and operation.instances == 1 and not sleeps


class PackedQueue(NamedTuple):
    """A rank's packed queue, classified. move: without regions where a rank of a scatter has nothing to add."""

    parts: tuple[Put, ...]
    total: Reduce | None
    shares: tuple[Put, ...]
    move: Copy | None

    @property
    def operations(self) -> tuple[Operation, ...]:
        return (*self.parts, *filter(None, (self.total,)), *self.shares, *filter(None, (self.move,)))


class PackedBuffers(NamedTuple):
    """whole: the partial sum. shared: what a rank shares: its sum, or the caller's tensor. out: where results go."""

    whole: Buffer | None
    shared: Buffer | None
    out: Buffer
    rows: int


def check_packed(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Add refusals for a packed queue that its kernel cannot run."""
    schedule, config = plan.schedule, plan.realization.packed
    engines = plan.realization.engine_by_queue
    if PACKED_KERNEL not in engines.values() or config is None:
        return
    if schedule.world_size > MOST_PACKED_RANKS:
        message = f"{schedule.world_size} ranks; a packed kernel polls messages of up to {MOST_PACKED_RANKS}"
        findings.add("lowering", None, message)
    if schedule.reuse == ECHOES and sum(buffer.home == LOCAL for buffer in schedule.buffers) > 1:
        message = "beside the memory of its messages a packed kernel has room for one local buffer"
        findings.add("lowering", None, message)
    packed_operations = [
        [
            graph.operations[position]
            for position in positions
            if engines[graph.operations[position].queue] == PACKED_KERNEL
        ]
        for positions in graph.of_rank
    ]
    for operation, message in _faults(plan, packed_operations, config.exchange) if any(packed_operations) else ():
        findings.add("lowering", operation, message)


def _faults(plan: Plan, packed_operations: list[list[Operation]], exchange: PackedExchange) -> Iterator[Fault]:
    """Yield the operations that the kernel does not run as they stand, and why."""
    queues: list[PackedQueue] = []
    for rank, operations in enumerate(packed_operations):
        queue = _classify(operations, exchange, len(packed_operations))
        if queue is None:
            yield operations[-1] if operations else None, f"rank {rank} does not {DUTIES[exchange]}"
        else:
            queues.append(queue)
    if len(queues) < len(packed_operations):
        return
    buffers = _buffers_of_queues(plan, queues, exchange)
    if isinstance(buffers, str):
        yield packed_operations[0][-1], buffers
        return
    kernels = _Kernels(queues, buffers, exchange)
    for rank, queue in enumerate(queues):
        steps = kernels.steps(rank)
        if len(steps) != len(queue.operations):
            yield packed_operations[rank][-1], f"rank {rank} adds its shard, if it has one"
            continue
        for step, actual in zip(steps, queue.operations, strict=True):
            if not step.is_done_by(actual):
                ends = f"{', '.join(map(str, step.reads))} to {', '.join(map(str, step.writes))}"
                yield actual, f"{step.requirement}: {ends}"


def _classify(operations: list[Operation], exchange: PackedExchange, size: int) -> PackedQueue | None:
    """Return the operations by their purpose, pushes in the order of the notified ranks; None if they do not fit."""
    puts = [one for one in operations if isinstance(one, Put)]
    total = next((one for one in operations if isinstance(one, Reduce)), None)
    move = next((one for one in operations if isinstance(one, Copy)), None)
    parts = size - 1 if exchange in ADDS else 0
    shares = size - 1 if exchange in SHARES else 0
    in_order = (*puts[:parts], *filter(None, (total,)), *puts[parts:], *filter(None, (move,)))
    adds, moves = exchange in ADDS, exchange in SHARES
    fits = len(puts) == parts + shares and tuple(operations) == in_order and bool(total or move)
    # Without adding there is no sum, without sharing only an empty move, where a rank has nothing to add.
    if not fits or (total and not adds) or (moves and move is None) or (move and not moves and (total or move.sources)):
        return None
    if total and len(total.operands) != size:
        return None

    def peer(put: Put) -> int:
        return put.notifies[0].rank if put.notifies else put.rank

    by_rank = (tuple(sorted(group, key=peer)) for group in (puts[:parts], puts[parts:]))
    return PackedQueue(next(by_rank), total, next(by_rank), move)


def _buffers_of_queues(plan: Plan, queues: list[PackedQueue], exchange: PackedExchange) -> PackedBuffers | str:
    """Return the buffers that all queues work on, or why the kernel cannot work on them."""
    totals = [queue.total for queue in queues if queue.total]
    stored = [part for queue in queues if queue.move for part in queue.move.destinations]
    shared = [part for queue in queues for put in queue.shares for part in put.sources]
    buffer = plan.schedule.buffer
    if exchange in ADDS and not totals:
        return "no rank adds anything"
    if exchange in SHARES and not (stored and shared):
        return "no rank shares anything"
    whole = buffer(totals[0].operands[totals[0].rank].buffer) if totals else None
    shared_buffer = buffer(shared[0].buffer) if shared else None
    out = buffer(stored[0].buffer if exchange in SHARES else totals[0].out.buffer)
    buffers = PackedBuffers(whole, shared_buffer, out, whole.rows if whole else out.rows)
    touched = {part.buffer for queue in queues for one in queue.operations for part in (*one.reads, *one.writes)}
    dtypes = sorted({plan.dtype_of(name) for name in touched})
    if len(dtypes) > 1:
        return f"the kernel adds and moves numbers of one dtype, not of {', '.join(dtypes)}"
    return _buffers_obstacle(plan, buffers, exchange) or buffers


def _buffers_obstacle(plan: Plan, buffers: PackedBuffers, exchange: PackedExchange) -> str:
    """Return why the kernel cannot work on these buffers; "" if it can."""
    whole, shared, out, rows = buffers
    shard_height = _owned_rows(exchange, rows, plan.schedule.world_size, 0)[1]
    homes = (OUTPUT,) if whole else (LOCAL, OUTPUT)
    if (whole and whole.home != LOCAL) or out.home not in homes:
        return "the kernel adds a local partial, and stores into an output"
    if shared and shared.home != (SYMMETRIC if whole else INPUT):
        return "the kernel shares what the caller gave it, or its sum"
    if out.rows != (rows if shared else shard_height) or (shared and shared.rows != (rows if whole else shard_height)):
        return "the buffers do not have the rows of all, or of the longest shard"
    if len({one.cols for one in (whole, shared, out) if one}) > 1:
        return "the buffers have not the same columns"
    block_bytes = out.cols * out.itemsize_bytes(plan.realization.dtype) * (rows if exchange == "one_shot" else 1)
    if block_bytes % INT32_BYTES:
        return f"rows of {out.cols} do not begin at words of {INT32_BYTES} bytes"
    return "it has more numbers than 31 bits count" if rows * out.cols > LIMIT else ""


def _owned_rows(exchange: PackedExchange, rows: int, size: int, owner: int) -> tuple[int, int]:
    return (0, rows) if exchange == "one_shot" else shard_rows(rows, size, owner)


class _Kernels:
    """The steps of the kernels of all ranks. Where messages lie is read from the queues of the ranks that read them."""

    def __init__(self, queues: list[PackedQueue], buffers: PackedBuffers, exchange: PackedExchange) -> None:
        self.queues, self.buffers, self.size = queues, buffers, len(queues)
        self.rows = partial(_owned_rows, exchange, buffers.rows, self.size)

    def steps(self, rank: int) -> list[ExpectedStep]:
        """Return one rank's steps: parts, its sum, shares and the move, each if the exchange has it."""
        (whole, shared, out, _), queue, steps = self.buffers, self.queues[rank], list[ExpectedStep]()
        peers = [peer for peer in range(self.size) if peer != rank]
        parts, shares = (self._arrival_signals(rank, shot) for shot in (0, 1))
        is_adding = self.rows(rank)[0] < self.rows(rank)[1]
        own_shard = self._shard(shared, rank, rank, is_short=whole is None) if shared else ()
        if whole:
            steps += [
                ExpectedStep(PART, self._shard(whole, rank, peer), self._addend(peer, rank), (peer,)) for peer in peers
            ]
        if whole and is_adding:
            operands = list(queue.total.operands) if queue.total else []
            operands[rank : rank + 1] = self._shard(whole, rank, rank)
            target = own_shard or self._shard(out, rank, rank, is_short=True)
            steps.append(ExpectedStep(SUM, tuple(operands), target, (rank,) if shared else (), parts))
        before_share = _notified_signals(queue.total, rank) if whole and is_adding else parts
        if shared:
            steps += [
                ExpectedStep(SHARE, own_shard, self._read_regions(peer, rank), (peer,), before_share) for peer in peers
            ]
            read = (own_shard if owner == rank else self._read_regions(rank, owner) for owner in range(self.size))
            written = (self._shard(out, rank, owner) for owner in range(self.size))
            awaited = shares | (before_share if whole and is_adding else frozenset())
            steps.append(ExpectedStep(MOVE, tuple(one for each in read for one in each), sum(written, ()), (), awaited))
        elif not is_adding:
            steps.append(ExpectedStep(MOVE, (), (), (), parts))
        return steps

    def _shard(self, buffer: Buffer, rank: int, owner: int, is_short: bool = False) -> tuple[Region, ...]:
        """Return an owner's rows in a rank's buffer; () if it has none. is_short: the buffer holds only these rows."""
        lo, hi = self.rows(owner)
        rows = (0, hi - lo) if is_short else (lo, hi)
        return (Region(buffer.name, rank, rows, (0, buffer.cols)),) if lo < hi else ()

    def _addend(self, owner: int, source: int) -> tuple[Region, ...]:
        """Return where an owner reads what a source sent to be added."""
        total = self.queues[owner].total
        return (total.operands[source],) if total else ()

    def _read_regions(self, rank: int, owner: int) -> tuple[Region, ...]:
        """Return where a rank reads the shard of an owner."""
        move, stored = self.queues[rank].move, self._shard(self.buffers.out, rank, owner)
        pairs = zip(move.sources, move.destinations, strict=False) if move else ()
        return tuple(source for source, destination in pairs if (destination,) == stored)

    def _arrival_signals(self, rank: int, shot: int) -> Signals:
        """Return the signals by which peers notify a rank of their pushes in a shot."""
        pushes = (put for queue in self.queues for put in (queue.parts, queue.shares)[shot])
        return frozenset(one for put in pushes for one in _notified_signals(put, rank))


def _notified_signals(operation: Operation | None, rank: int) -> Signals:
    notifies = operation.notifies if operation else ()
    return frozenset((one.pad, one.signal) for one in notifies if one.rank == rank)


def _awaited_signals(operation: Operation) -> Signals:
    return frozenset((wait.pad, signal) for wait in operation.all_waits for signal in range(*wait.signals))


# Whether the matmul of few rows can compute the products of a library queue in the place of cuBLAS.


BYTES = 2  # of a number


def check_skinny(plan: Plan, findings: Findings) -> None:
    """Add refusals for products that it cannot compute, and for plans that do not launch it."""
    if plan.realization.skinny is None:
        return
    engines = {one.queue: one.engine for one in plan.realization.engines}
    if PACKED_KERNEL not in engines.values():
        findings.add("engine", None, "only plans of packed messages launch a matmul of few rows")
    if plan.problem.product_epilogue != NO_EPILOGUE or ITEMSIZE_BYTES[plan.realization.dtype] != BYTES:
        message = f"{plan.realization.dtype} and {plan.problem.product_epilogue}"
        findings.add("form", None, f"a matmul of few rows has 16-bit numbers and no epilogue, not {message}")
    for operation in plan.schedule.operations:
        if engines[operation.queue] == LIBRARY:
            for why in _product_faults(plan, operation):
                findings.add("engine", operation, why)


def _product_faults(plan: Plan, operation: Operation) -> Iterator[str]:
    """Yield why the kernel cannot run an operation."""
    if not isinstance(operation, Compute):
        yield f"a matmul of few rows in the place of cuBLAS leaves no engine for a {type(operation).__name__}"
        return
    if operation.accumulate or operation.beside or operation.finishes:
        yield "a matmul of few rows adds, scales and finishes nothing"
    parts = (*operation.a, operation.b, *operation.out)
    if len(parts) != 3 or not all(_is_whole(plan, part) for part in parts):
        yield "a matmul of few rows multiplies one whole buffer by another"


def _is_whole(plan: Plan, part: Region) -> bool:
    buffer = plan.schedule.buffer(part.buffer)
    return part.shape == (buffer.rows, buffer.cols)
