"""Deadlock: whether every operation can run, behind its waits and its predecessors.

Signals only grow, so running all that can run either reaches the end or proves that the rest has a cycle. Each rank
runs its operations one at a time, in launch order: an order without a cycle is safe under any residency, because an
operation never needs an SM that a waiting one may occupy. `residency.py` uses the same run with the order of streams
and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.graphs import Graph, SignalIndex
from overweave.ir.verify.rules.verdict import Findings

Behind = Sequence[Sequence[int]]  # operation -> its predecessors, which must have ended before it starts


class GreedyExecution:
    """Runs all operations that can run; these are given by position in the graph.

    order: those that ran, the parts of a collective side by side. done: operation -> whether it ran. missing: signal ->
    how much it lacks of its full count.
    """

    def __init__(self, graph: Graph, behind: Behind) -> None:
        self.graph, self.behind = graph, behind
        self.order: list[int] = []
        self.done = [False] * len(graph.operations)
        self.missing = dict(graph.full)
        self._successors: list[list[int]] = [[] for _ in behind]  # operation -> those it precedes
        self._waiting: dict[SignalIndex, list[int]] = {}  # signal -> the operations that wait for it
        self._missing_count = [0] * len(behind)  # operation -> its missing predecessors and signals
        self._arrived: dict[str, int] = {}  # label of a collective -> its parts that are ready
        for position, predecessors in enumerate(behind):
            for predecessor in predecessors:
                self._successors[predecessor].append(position)
            for key in graph.waited[position]:
                self._waiting.setdefault(key, []).append(position)
            self._missing_count[position] = len(predecessors) + len(graph.waited[position])
        self._run()

    @property
    def stuck(self) -> list[int]:
        return [position for position, is_done in enumerate(self.done) if not is_done]

    def _run(self) -> None:
        """Run operations without missing predecessors or signals until none is left."""
        operations = self.graph.operations
        ready = [position for position, count in enumerate(self._missing_count) if not count]
        while ready:
            position = ready.pop()
            operation = operations[position]
            if type(operation) is not Collective:
                self._finish(position, ready)
                continue
            self._arrived[operation.label] = self._arrived.get(operation.label, 0) + 1
            if self._arrived[operation.label] == len(operation.ranks):
                for member in self.graph.members[operation.label]:
                    self._finish(member, ready)

    def _finish(self, position: int, ready: list[int]) -> None:
        """Record that an operation ran, and add the operations that can run now to `ready`."""
        self.order.append(position)
        self.done[position] = True
        freed = self._successors[position]
        keys = self.graph.notified[position]
        if keys:
            instances, missing = self.graph.operations[position].instances, self.missing
            for key in keys:
                missing[key] -= instances
                if not missing[key]:
                    freed = [*freed, *self._waiting.get(key, ())]
        for other in freed:
            self._missing_count[other] -= 1
            if not self._missing_count[other]:
                ready.append(other)

    def cycle(self, position: int, relation: str) -> str:
        """Return the cycle of an operation that never ran, in words. relation: the words for an edge of `behind`."""
        path: dict[int, int] = {}
        words: list[str] = []
        while position not in path:
            path[position] = len(words)
            position, message = self._blocker(position, relation)
            words.append(message)
        return ", which ".join(words)

    def _blocker(self, position: int, relation: str) -> tuple[int, str]:
        """Return an operation that must run before this one can, and why, in words."""
        graph = self.graph
        before = next((candidate for candidate in self.behind[position] if not self.done[candidate]), None)
        if before is not None:
            return before, f"{relation} {graph.operations[before].name}"
        key = next((key for key in graph.waited[position] if self.missing[key]), None)
        if key is not None:
            sender = next(
                candidate for candidate, keys in enumerate(graph.notified) if key in keys and not self.done[candidate]
            )
            other = graph.operations[sender]
            return sender, f"waits for {graph.signal_name(key)} from {other.name} on rank {other.rank}"
        part = graph.operations[position]
        assert isinstance(part, Collective)
        waiting = next(candidate for candidate in graph.members[part.label] if self._is_held(candidate))
        other = graph.operations[waiting]
        return waiting, f"meets the other parts of {part.label}, of which {other.name} on rank {other.rank}"

    def _is_held(self, position: int) -> bool:
        """Whether an operation has a missing predecessor or signal."""
        return any(not self.done[predecessor] for predecessor in self.behind[position]) or any(
            self.missing[key] for key in self.graph.waited[position]
        )


def launch_order(graph: Graph, findings: Findings) -> list[int] | None:
    """Return all operations in an order in which ranks run theirs one by one; None, and a refusal, if there is a
    cycle."""
    behind: list[tuple[int, ...]] = [()] * len(graph.operations)
    for positions in graph.of_rank:
        for before, position in zip(positions, positions[1:], strict=False):
            behind[position] = (before,)
    run = GreedyExecution(graph, behind)
    if len(run.order) == len(graph.operations):
        return run.order
    head = run.stuck[0]
    operation = graph.operations[head]
    findings.add("deadlock", operation, f"{operation.name} {run.cycle(head, 'stands behind')}: a cycle")
    return None
