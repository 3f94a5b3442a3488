"""Residency: nothing that a kernel spins on may need an SM that the kernel holds.

Here a rank's launches, not its operations, run one after the other: a kernel is one launch, placed where its first
operation stands, and so is each library call. Within a kernel tiles run in table order. The copy engine needs no SM.
If that graph has no cycle, any residency will do. Where it has one, two kernels may break it if both surely fit.
"""

from __future__ import annotations

from overweave.ir.plan import COPY_ENGINE, LIBRARY, Plan
from overweave.ir.schedule import Collective
from overweave.ir.verify.graphs import Graph
from overweave.ir.verify.verdict import Findings


def check_residency(plan: Plan, graph: Graph, together: frozenset[str], findings: Findings) -> None:
    """together: queues whose kernels surely run at the same time, if nothing orders them."""
    behind = [sorted(edges) for edges in _launch_edges(plan, graph, together)]
    done, missing = _run(graph, behind)
    stuck = [at for at in range(len(graph.operations)) if not done[at]]
    for position in stuck:
        lacking = [key for key in graph.waited[position] if missing[key]]
        operation = graph.operations[position]
        if lacking and all(done[at] for at in behind[position]):
            key = lacking[0]
            cause = next(at for at in stuck if key in graph.notified[at])
            blocked = [graph.operations[at].name for at in behind[cause] if not done[at]]
            said = f"spins on {graph.signal_name(key)} from {graph.operations[cause].name} on rank"
            found = f"{said} {graph.operations[cause].rank}, which is launched behind {', '.join(blocked[:4]) or 'it'}"
            findings.add("residency", operation, f"{found}; nothing proves that both fit on the SMs at once")
            return
    if stuck:
        findings.add("residency", graph.operations[stuck[0]], "never starts: the launches wait for one another")


def _launch_edges(plan: Plan, graph: Graph, together: frozenset[str]) -> list[set[int]]:
    """For each operation, those that must have completed before it starts."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    after = {queue.name: queue.after for queue in plan.schedule.queues}
    behind: list[set[int]] = [set() for _ in graph.operations]
    for positions in graph.of_rank:
        kernels: dict[str, list[int]] = {}
        for at in positions:
            queue = graph.operations[at].queue
            if engines[queue] not in (COPY_ENGINE, LIBRARY):
                kernels.setdefault(queue, []).append(at)
        last: dict[str, int] = {}  # of each queue, among those launched so far
        launched: list[str] = []  # kernels
        for at in positions:
            queue = graph.operations[at].queue
            behind[at].update(last[name] for name in (queue, *after[queue]) if name in last)
            if engines[queue] == COPY_ENGINE:
                last[queue] = at
                continue
            if queue not in launched:
                for name in launched:
                    if not {queue, name} <= together or name in after[queue]:
                        behind[at].add(kernels[name][-1])
                behind[at].update(last[name] for name in last if engines[name] == LIBRARY)
            if queue in kernels and queue not in launched:
                launched.append(queue)
            last[queue] = at
    return behind


def _run(graph: Graph, behind: list[list[int]]) -> tuple[list[bool], dict[int, int]]:
    """Runs whatever can run. Returns which operations did, and what each signal still lacks."""
    operations = graph.operations
    ahead: list[list[int]] = [[] for _ in operations]
    missing = dict(graph.full)
    waiting: dict[int, list[int]] = {}
    lacks = [len(edges) + len(graph.waited[at]) for at, edges in enumerate(behind)]
    for at, edges in enumerate(behind):
        for before in edges:
            ahead[before].append(at)
        for key in graph.waited[at]:
            waiting.setdefault(key, []).append(at)
    done = [False] * len(operations)
    met: dict[str, int] = {}
    ready = [at for at, count in enumerate(lacks) if not count]
    while ready:
        at = ready.pop()
        operation = operations[at]
        finished = [at]
        if isinstance(operation, Collective):
            met[operation.label] = met.get(operation.label, 0) + 1
            finished = graph.members[operation.label] if met[operation.label] == len(operation.ranks) else []
        for one in finished:
            done[one] = True
            freed = list(ahead[one])
            for key in graph.notified[one]:
                missing[key] -= operations[one].instances
                if not missing[key]:
                    freed += waiting.get(key, [])
            for other in freed:
                lacks[other] -= 1
                if not lacks[other]:
                    ready.append(other)
    return done, missing
