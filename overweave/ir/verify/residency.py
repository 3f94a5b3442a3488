"""Residency: no kernel may spin on what needs an SM that the kernel holds.

Here a rank's launches, not its operations, run one after the other: a kernel is one launch, placed where its first
operation stands, and so is each library call. Within a kernel tiles run in table order. The copy engine needs no SM. If
that graph has no cycle, any residency will do. If it has one, two kernels may break it if both surely fit.

A queue on a side stream (`ir/launch/streams.py`) may start at another time than it is launched. A kernel is held back
until the results of its rank that it waits for are stored (`ir/launch/streams.py`); then it may start at once, ahead of
launches before it, or later than all launches that are not after it. A library call may find every SM taken by kernels
that were launched behind it. So the graphs of all these orders must have no cycle either.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Literal

from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, LIBRARY, TILE_KERNEL, Engine, Plan
from overweave.ir.schedule import Apply, Collective, Compute
from overweave.ir.verify.rules.deadlock import GreedyExecution
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings, TooMuchWork

Start = Literal["launched", "early", "late"]
Starts = dict[str, Start]  # when each queue with a stream of its own starts
_TILES = (TILE_KERNEL, AUTHOR_KERNEL)
# Budget of operations over all start orders, the overhead of one order in operations, and orders tried in any case.
MOST_STEPS, STEPS_OF_AN_ORDER, LEAST_ORDERS = 1 << 19, 64, 16


def check_residency(plan: Plan, graph: Graph, together: frozenset[str], sms: int, findings: Findings) -> None:
    """Refuse a plan with a start order that can hang. together: queues whose kernels surely run at the same time, if
    nothing orders them. sms: of the GPU."""
    streams = _Streams(plan, together, sms)
    seen: set[tuple[int, ...]] = set()
    for starts in streams.starts(len(graph.operations)):
        orders = [streams.start_order(positions, graph, starts) for positions in graph.of_rank]
        order = tuple(position for positions in orders for position in positions)
        if order not in seen and _is_stuck(streams, graph, streams.edges(graph, orders), findings):
            return
        seen.add(order)


def _is_stuck(streams: _Streams, graph: Graph, edges: list[set[int]], findings: Findings) -> bool:
    """Whether launches in some order have a cycle; if so, add a refusal."""
    run = GreedyExecution(graph, [sorted(before) for before in edges])
    stuck = run.stuck
    if stuck:
        ready = [position for position in stuck if all(run.done[before] for before in run.behind[position])]
        spinning = [position for position in ready if streams.is_kernel(graph.operations[position].queue)]
        first = (spinning or ready or stuck)[0]
        cycle = run.cycle(first, "is launched behind")
        findings.add("residency", graph.operations[first], f"{cycle}; nothing proves that both fit on the SMs at once")
    return bool(stuck)


class _Streams:
    """A plan's streams and kernels, and the orders in which they may start."""

    def __init__(self, plan: Plan, together: frozenset[str], sms: int) -> None:
        self.engines: dict[str, Engine] = {one.queue: one.engine for one in plan.realization.engines}
        self.after = {queue.name: queue.after for queue in plan.schedule.queues}
        self.beside, self.together = queues_beside(plan), together
        self.has_sms_for_library = plan.realization.library_sms > 0
        has_few = plan.realization.copy is not None and plan.realization.copy.programs < sms
        # Queues whose kernel is resident on some SMs only.
        self.leaves_sms = {queue for queue, engine in self.engines.items() if engine == COPY_KERNEL and has_few}

    def is_kernel(self, queue: str) -> bool:
        return self.engines[queue] not in (COPY_ENGINE, LIBRARY)

    def starts(self, operations: int) -> Iterator[Starts]:
        """Yield every choice of when queues on side streams start. Raises TooMuchWork if there are too many."""
        choices: dict[str, tuple[Start, ...]] = {}
        for queue in sorted(self.beside):
            if self.engines[queue] != COPY_ENGINE:
                choices[queue] = ("launched", "early", "late") if self.is_kernel(queue) else ("launched", "late")
        if prod(map(len, choices.values())) > max(LEAST_ORDERS, MOST_STEPS // (operations + STEPS_OF_AN_ORDER)):
            raise TooMuchWork(f"{len(choices)} queues start in too many orders")
        for choice in product(*choices.values()):
            yield dict(zip(choices, choice, strict=True))

    def start_order(self, order: list[int], graph: Graph, starts: Starts) -> list[int]:
        """Return a rank's operations in the order in which they start. order: their launch order."""
        for queue, start in starts.items():
            if start != "launched":
                order = self._shifted(order, graph, queue, start)
        return order

    def _shifted(self, launched: list[int], graph: Graph, name: str, start: Start) -> list[int]:
        """Return the order with the operations of one queue moved to where its stream may start them.

        early: behind the first tile, or, without a tile kernel, behind the result that they wait for first. late:
        behind all operations but those that are after the queue.
        """
        queues = {position: graph.operations[position].queue for position in launched}
        members, others = (
            [position for position in launched if (queues[position] == name) is is_own] for is_own in (True, False)
        )
        tile = next((position for position in launched if self.engines[queues[position]] in _TILES), None)
        if not members or (tile is not None and members[0] < tile and self.is_kernel(name)):
            return launched  # pushes that have their SMs before the tile kernel starts
        if tile is None:
            tile = _first_awaited_result(graph, others, members)
        place = others.index(tile) + 1 if tile is not None else 0
        if start == "late":
            behind = (
                position
                for position, other in enumerate(others)
                if other > members[0] and name in self.after[queues[other]]
            )
            place = next(behind, len(others))
        return [*others[:place], *members, *others[place:]]

    def edges(self, graph: Graph, orders: list[list[int]]) -> list[set[int]]:
        """Return for each operation those that must have completed before it starts.

        A kernel on a side stream is behind those library calls only that hold SMs while they wait: collectives. NCCL
        runs the collectives of a group in the order in which they are enqueued, whatever their streams.
        """
        behind: list[set[int]] = [set() for _ in graph.operations]
        for launched in graph.of_rank:
            parts = [
                (operation.ranks, position)
                for position in launched
                if isinstance(operation := graph.operations[position], Collective)
            ]
            latest: dict[tuple[int, ...], int] = {}
            for ranks, position in parts:
                behind[position].update((latest[ranks],) if ranks in latest else ())
                latest[ranks] = position
        for positions in orders:
            self._add_edges(graph, positions, behind)
        return behind

    def _add_edges(self, graph: Graph, positions: list[int], predecessors: list[set[int]]) -> None:
        """Add the predecessors of one rank's operations, given in start order, to `predecessors`."""
        kernels: dict[str, list[int]] = {}  # kernel's queue -> its operations
        for position in positions:
            if self.is_kernel(graph.operations[position].queue):
                kernels.setdefault(graph.operations[position].queue, []).append(position)
        last: dict[str, int] = {}  # queue -> its last operation that started so far
        library: dict[str, int] = {}  # the same, of library queues on the caller's stream
        collectives: dict[str, int] = {}  # the same, of collectives
        started: list[str] = []  # queues of kernels
        for position in positions:
            operation = graph.operations[position]
            queue = operation.queue
            predecessors[position].update(last[name] for name in (queue, *self.after[queue]) if name in last)
            last[queue] = position
            if self.engines[queue] == COPY_ENGINE:
                continue
            if queue not in started:
                # A launch needs the SMs of kernels that started before it, and waits for the work on its stream.
                predecessors[position].update(kernels[name][-1] for name in started if self._may_hold_sms(name, queue))
                if self.is_kernel(queue):
                    predecessors[position].update((collectives if queue in self.beside else library).values())
                    started.append(queue)
                elif queue not in self.beside:
                    predecessors[position].update(library.values())
            if self.engines[queue] == LIBRARY and queue not in self.beside:
                library[queue] = position
            if isinstance(operation, Collective):
                collectives[queue] = position

    def _may_hold_sms(self, name: str, queue: str) -> bool:
        """Whether a launched kernel may hold every SM that a queue needs, until it ends. A copy kernel holds few
        SMs."""
        if name in self.leaves_sms:
            return name in self.after[queue]
        if queue in self.beside and self.engines[queue] == LIBRARY and self.engines[name] in _TILES:
            return not self.has_sms_for_library
        return not {queue, name} <= self.together or name in self.after[queue]


def _first_awaited_result(graph: Graph, others: list[int], members: list[int]) -> int | None:
    """Return the last result of the same rank that the first waiting operation of a queue waits for; None if none.
    members: positions of the queue's operations. others: those of all others of the rank."""
    results = (position for position in others if isinstance(graph.operations[position], Compute | Apply))
    writers = {key: position for position in results for key in graph.notified[position]}
    awaited = ([writers[key] for key in graph.waited[position] if key in writers] for position in members)
    return max(next(filter(None, awaited), []), default=None)
