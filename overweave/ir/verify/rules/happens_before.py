"""What surely happened before each operation starts: the graph with the fewest constraints.

Its edges: completion order of `complete` queues, `after` of queues, every contributor of a signal before its waiters,
and what stood before any part of a collective before that collective's ends. Order within an `issue` queue is none.
"""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.graphs import Graph


class Past(Struct):
    """Sets as bits: bit `r` of the lowest `world_size` for "some operation of rank r", then one for each operation.

    bit: each operation's own, rank bit excluded.     before: what has completed when it starts.
    late: what has completed when it reads its addends, if it has any.
    ends: what has completed when all operations of a rank have.
    """

    world_size: int
    bit: list[int]
    before: list[int]
    ends: list[int]
    late: dict[int, int]

    def ranks_before(self, position: int) -> int:
        """Ranks, as bits, of which some operation completed before this one starts."""
        return self.before[position] & ((1 << self.world_size) - 1)


class _Queue:
    """`completed`: what completes with all operations launched so far, for each rank."""

    def __init__(self, is_complete: bool, world_size: int) -> None:
        self.is_complete = is_complete
        self.completed = [0] * world_size
        self.after: list[list[int]] = []


def past_of(graph: Graph, order: list[int]) -> Past:
    """Follows `order`, in which the operations of a rank stand as launched, so all that is `after` is known in time."""
    schedule, operations = graph.schedule, graph.operations
    size = schedule.world_size
    queues = {queue.name: _Queue(queue.order == "complete", size) for queue in schedule.queues}
    for declared in schedule.queues:
        queues[declared.name].after = [queues[name].completed for name in declared.after]
    past = Past(size, [0] * len(operations), [0] * len(operations), [0] * size, {})
    before, bits, ends = past.before, past.bit, past.ends
    signals: dict[int, int] = {}
    joint: dict[str, int] = {}
    for index, position in enumerate(order):
        operation = operations[position]
        bit = bits[position] = 1 << (size + index)
        if type(operation) is Collective:
            if operation.label not in joint:
                members = graph.members[operation.label]
                starts = [_start(graph, member, queues, signals) for member in members]
                joint[operation.label] = _union(starts)
                for member, start in zip(members, starts, strict=True):
                    before[member] = start
            completed = joint[operation.label] | bit | 1 << operation.rank
        else:
            start = before[position] = _start(graph, position, queues, signals)
            if position in graph.late:
                start = past.late[position] = start | _union([signals[key] for key in graph.late[position]])
            completed = start | bit | 1 << operation.rank
        queues[operation.queue].completed[operation.rank] |= completed
        ends[operation.rank] |= completed
        for key in graph.notified[position]:
            signals[key] = signals.get(key, 0) | completed
    return past


def _start(graph: Graph, position: int, queues: dict[str, _Queue], signals: dict[int, int]) -> int:
    """What has completed when the operation starts."""
    operation = graph.operations[position]
    rank, queue = operation.rank, queues[operation.queue]
    start = queue.completed[rank] if queue.is_complete else 0
    for completed in queue.after:
        start |= completed[rank]
    waited = graph.waited[position]
    for key in waited[: len(waited) - len(graph.late.get(position, ()))]:
        start |= signals[key]
    return start


def _union(sets: list[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
