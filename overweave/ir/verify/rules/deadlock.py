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

Behind = Sequence[Sequence[int]]  # for each operation, those that must have ended before it starts


class GreedyExecution:
    """Runs all operations that can run. behind: operation -> those that must have ended before it starts.

    order: those that ran, the parts of a collective side by side. done: operation -> whether it ran. missing: signal ->
    how much it lacks of its full count.
    """

    def __init__(self, graph: Graph, behind: Behind) -> None:
        self.graph, self.behind = graph, behind
        self.order: list[int] = []
        self.done = [False] * len(graph.operations)
        self.missing = dict(graph.full)
        self._ahead: list[list[int]] = [[] for _ in behind]
        self._waiting: dict[SignalIndex, list[int]] = {}
        self._lacks = [0] * len(behind)
        self._arrived: dict[str, int] = {}
        for at, before in enumerate(behind):
            for one in before:
                self._ahead[one].append(at)
            for key in graph.waited[at]:
                self._waiting.setdefault(key, []).append(at)
            self._lacks[at] = len(before) + len(graph.waited[at])
        self._run()

    @property
    def stuck(self) -> list[int]:
        """Return the operations that never ran."""
        return [at for at, is_done in enumerate(self.done) if not is_done]

    def _run(self) -> None:
        """Run operations without missing predecessors or signals until none is left."""
        operations = self.graph.operations
        ready = [at for at, count in enumerate(self._lacks) if not count]
        while ready:
            at = ready.pop()
            operation = operations[at]
            if type(operation) is not Collective:
                self._finish(at, ready)
                continue
            self._arrived[operation.label] = self._arrived.get(operation.label, 0) + 1
            if self._arrived[operation.label] == len(operation.ranks):
                for member in self.graph.members[operation.label]:
                    self._finish(member, ready)

    def _finish(self, at: int, ready: list[int]) -> None:
        """Record that an operation ran, and add the operations that can run now to `ready`."""
        self.order.append(at)
        self.done[at] = True
        freed = self._ahead[at]
        keys = self.graph.notified[at]
        if keys:
            instances, missing = self.graph.operations[at].instances, self.missing
            for key in keys:
                missing[key] -= instances
                if not missing[key]:
                    freed = [*freed, *self._waiting.get(key, ())]
        for other in freed:
            self._lacks[other] -= 1
            if not self._lacks[other]:
                ready.append(other)

    def cycle(self, at: int, relation: str) -> str:
        """Return the cycle of an operation that never ran, in words. relation: the words for an edge of `behind`."""
        path: dict[int, int] = {}
        words: list[str] = []
        while at not in path:
            path[at] = len(words)
            at, message = self._blocker(at, relation)
            words.append(message)
        return ", which ".join(words)

    def _blocker(self, at: int, relation: str) -> tuple[int, str]:
        """Return an operation that must run before this one can, and why, in words."""
        graph = self.graph
        before = next((one for one in self.behind[at] if not self.done[one]), None)
        if before is not None:
            return before, f"{relation} {graph.operations[before].name}"
        key = next((key for key in graph.waited[at] if self.missing[key]), None)
        if key is not None:
            sender = next(one for one, keys in enumerate(graph.notified) if key in keys and not self.done[one])
            other = graph.operations[sender]
            return sender, f"waits for {graph.signal_name(key)} from {other.name} on rank {other.rank}"
        part = graph.operations[at]
        assert isinstance(part, Collective)
        late = next(one for one in graph.members[part.label] if self._is_held(one))
        other = graph.operations[late]
        return late, f"meets the other parts of {part.label}, of which {other.name} on rank {other.rank}"

    def _is_held(self, at: int) -> bool:
        """Whether an operation has a missing predecessor or signal."""
        return any(not self.done[one] for one in self.behind[at]) or any(
            self.missing[key] for key in self.graph.waited[at]
        )


def launch_order(graph: Graph, findings: Findings) -> list[int] | None:
    """Return all operations in an order in which ranks run theirs one by one; None, and a refusal, if
    there is a cycle.
    """
    behind: list[tuple[int, ...]] = [()] * len(graph.operations)
    for positions in graph.of_rank:
        for before, at in zip(positions, positions[1:], strict=False):
            behind[at] = (before,)
    run = GreedyExecution(graph, behind)
    if len(run.order) == len(graph.operations):
        return run.order
    head = run.stuck[0]
    operation = graph.operations[head]
    findings.add("deadlock", operation, f"{operation.name} {run.cycle(head, 'stands behind')}: a cycle")
    return None
