"""Deadlock: can every operation run, even if each rank runs one at a time, in launch order?

Signals only grow, so running whatever can run reaches the end or proves that nothing can. What is left then holds a
cycle. An order without one is safe under any residency: no operation needs a place that a waiting one may occupy.
"""

from __future__ import annotations

from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.graphs import Graph, Key
from overweave.ir.verify.verdict import Findings


class _Run:
    """Runs ranks until they block. `heads`: how many operations of each rank have run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: list[int] = []
        self.heads = [0] * len(graph.of_rank)
        self.missing = dict(graph.full)  # what each signal still lacks
        self.blocked: dict[Key, list[int]] = {}  # ranks that wait for a signal
        self.lacks = [0] * len(graph.of_rank)  # how many signals the head of each rank still lacks
        self.arrived: dict[str, int] = {}
        self.ready = [rank for rank, positions in enumerate(graph.of_rank) if positions]

    def run(self) -> None:
        while self.ready:
            self._run_rank(self.ready.pop())

    def _run_rank(self, rank: int) -> None:
        graph, positions = self.graph, self.graph.of_rank[rank]
        waited, operations, missing = graph.waited, graph.operations, self.missing
        while self.heads[rank] < len(positions):
            position = positions[self.heads[rank]]
            lacking = [key for key in waited[position] if missing[key]]
            if lacking:
                self.lacks[rank] = len(lacking)
                for key in lacking:
                    self.blocked.setdefault(key, []).append(rank)
                return
            operation = operations[position]
            if type(operation) is Collective:
                if not self._meet(operation):
                    return
            else:
                self._finish(position)

    def _meet(self, part: Collective) -> bool:
        """Counts a part as arrived; runs all parts when the last one has. Returns whether it has."""
        self.arrived[part.label] = self.arrived.get(part.label, 0) + 1
        if self.arrived[part.label] < len(part.ranks):
            return False
        for member in self.graph.members[part.label]:
            self._finish(member)
        self.ready += [rank for rank in part.ranks if rank != part.rank]
        return True

    def _finish(self, position: int) -> None:
        operation = self.graph.operations[position]
        self.order.append(position)
        self.heads[operation.rank] += 1
        keys = self.graph.notified[position]
        if keys:
            instances, missing = operation.instances, self.missing
            for key in keys:
                missing[key] -= instances
                if not missing[key]:
                    self._wake(key)

    def _wake(self, key: Key) -> None:
        for rank in self.blocked.pop(key, ()):
            self.lacks[rank] -= 1
            if not self.lacks[rank]:
                self.ready.append(rank)


def launch_order(graph: Graph, findings: Findings) -> list[int] | None:
    """Positions of all operations in an order that the most constrained graph allows. Refuses with a cycle, or None.

    The parts of a collective stand side by side.
    """
    run = _Run(graph)
    run.run()
    if len(run.order) == len(graph.operations):
        return run.order
    _report_cycle(run, findings)
    return None


def _report_cycle(run: _Run, findings: Findings) -> None:
    """Follows, from a blocked operation, what it waits for and what that stands behind, until it comes round."""
    graph = run.graph
    rank = next(rank for rank, positions in enumerate(graph.of_rank) if run.heads[rank] < len(positions))
    path: list[int] = []
    words: list[str] = []
    while rank not in path:
        path.append(rank)
        rank, said = _blocker(run, rank)
        words.append(said)
    start = path.index(rank)
    head = graph.operations[graph.of_rank[rank][run.heads[rank]]]
    findings.add("deadlock", head, "; ".join(words[start:]) + ": a cycle")


def _blocker(run: _Run, rank: int) -> tuple[int, str]:
    """The rank whose head must move before this rank's can, and why."""
    graph = run.graph
    position = graph.of_rank[rank][run.heads[rank]]
    operation = graph.operations[position]
    done = set(run.order)
    lacking = next((key for key in graph.waited[position] if run.missing[key]), None)
    if lacking is not None:
        cause = next(at for at, keys in enumerate(graph.notified) if lacking in keys and at not in done)
        why = f"{operation.name} on rank {rank} waits for {graph.signal_name(lacking)}, which"
    else:
        assert isinstance(operation, Collective)
        members = graph.members[operation.label]
        heads = {graph.of_rank[one][run.heads[one]] for one in operation.ranks}
        cause = next(at for at in members if at not in heads or _lacks(run, at))
        why = f"{operation.name} on rank {rank} meets the other parts of {operation.label}, of which"
    other = graph.operations[cause]
    first = graph.operations[graph.of_rank[other.rank][run.heads[other.rank]]]
    behind = "" if first is other else f" behind {first.name}"
    notifies = "" if lacking is None else " notifies"
    return other.rank, f"{why} {other.name} on rank {other.rank}{notifies}{behind}"


def _lacks(run: _Run, position: int) -> bool:
    return any(run.missing[key] for key in run.graph.waited[position])
