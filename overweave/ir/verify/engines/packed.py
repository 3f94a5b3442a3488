"""Whether a packed kernel does what its queue says: all of one buffer to every peer, all of theirs added by rank.
Of those that deal shards: verify/engines/packed_shards.py.

The kernel waits word by word, the schedule for whole Puts. That is the same proof: cut every Put and Reduce into words,
each with a signal of its own, and every path from a Put to a Reduce is one from a word to the same word.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.plan import MOST_PACKED_RANKS, PACKED_KERNEL, Plan
from overweave.ir.schedule import LIMIT, LOCAL, OUTPUT, Operation, Put, Reduce, Region
from overweave.ir.verify.engines.packed_shards import Fault, shard_faults
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.verdict import Findings
from overweave.ir.words import INT32_BYTES


def check_packed(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Adds refusals for a packed queue that its kernel cannot run."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    queues = [queue for queue, engine in engines.items() if engine == PACKED_KERNEL]
    schedule = plan.schedule
    if not queues:
        return
    if schedule.world_size > MOST_PACKED_RANKS:
        said = f"{schedule.world_size} ranks; a packed kernel looks at messages of up to {MOST_PACKED_RANKS}"
        findings.add("lowering", None, said)
    members = {
        rank: [graph.operations[at] for at in positions if engines[graph.operations[at].queue] == PACKED_KERNEL]
        for rank, positions in enumerate(graph.of_rank)
    }
    for faulty, said in _faults(plan, members):
        findings.add("lowering", faulty, said)


def _faults(plan: Plan, members: dict[int, list[Operation]]) -> Iterator[Fault]:
    config = plan.realization.packed
    exchange = config.exchange if config else "one_shot"
    if sum(buffer.home == LOCAL for buffer in plan.schedule.buffers) > 1:
        yield None, "beside the memory of its messages a packed kernel has room for one local buffer"
    if exchange != "one_shot":
        yield from shard_faults(plan, members, exchange)
        return
    for of_rank in members.values():
        yield from _Rank(plan, of_rank).faults()


class _Rank:
    """The packed queue of one rank."""

    def __init__(self, plan: Plan, members: list[Operation]) -> None:
        self.plan, self.members = plan, members
        self.buffers = {buffer.name: buffer for buffer in plan.schedule.buffers}

    def faults(self) -> Iterator[tuple[Operation, str]]:
        """Operations that the kernel does not run as they stand, and why."""
        if not self.members:
            return
        *puts, total = self.members
        if not isinstance(total, Reduce) or not all(isinstance(put, Put) for put in puts):
            yield total, "the kernel pushes first, and then adds, once"
            return
        if len(total.operands) != self.plan.schedule.world_size:
            yield total, f"the kernel adds one operand of each rank, not {len(total.operands)}"
            return
        own = total.operands[total.rank]
        yield from self._not_whole(total, own, LOCAL)
        yield from self._not_whole(total, total.out, OUTPUT)
        rows, cols = own.shape
        dtypes = {self.plan.dtype_of(part.buffer) for part in (*total.operands, total.out)}
        if len(dtypes) > 1:
            yield total, f"the kernel adds numbers of one dtype, not of {', '.join(sorted(dtypes))}"
        elif total.out.shape != own.shape or rows * cols * ITEMSIZE_BYTES[dtypes.pop()] % INT32_BYTES:
            yield total, f"the kernel adds words of {INT32_BYTES} bytes, as many as it stores"
        elif rows * cols > LIMIT:
            yield total, "it adds more numbers than 31 bits count"
        if total.notifies or total.instances != 1:
            yield total, "nobody is told of a sum"
        yield from self._wrong_puts([put for put in puts if isinstance(put, Put)], total)

    def _not_whole(self, total: Reduce, part: Region, home: str) -> Iterator[tuple[Operation, str]]:
        buffer = self.buffers[part.buffer]
        if part.rank != total.rank or buffer.home != home or part.shape != (buffer.rows, buffer.cols):
            yield total, f"{part} is not all of an own {home} buffer"

    def _wrong_puts(self, puts: list[Put], total: Reduce) -> Iterator[tuple[Operation, str]]:
        own, operands = total.operands[total.rank], self._operands()
        peers = [peer for peer in range(self.plan.schedule.world_size) if peer != total.rank]
        if sorted(put.peer for put in puts) != peers:
            yield total, "the kernel pushes to every peer once"
        for put in puts:
            target = operands.get((put.peer, total.rank))
            if put.sources != (own,) or put.destinations != (target,):
                yield put, f"the kernel pushes {own} to where the peer adds it, {target}"
            elif put.waits or len(put.notifies) != 1 or put.instances != 1:
                yield put, "the kernel pushes at once, and each message is its own signal"

    def _operands(self) -> dict[tuple[int, int], Region]:
        """(rank, source) -> where a rank adds what a source sent."""
        engines = {one.queue: one.engine for one in self.plan.realization.engines}
        return {
            (each.rank, source): part
            for each in self.plan.schedule.operations
            if isinstance(each, Reduce) and engines[each.queue] == PACKED_KERNEL
            for source, part in enumerate(each.operands)
        }
