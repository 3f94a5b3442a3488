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
    if stuck:
        engines = {one.queue: one.engine for one in plan.realization.engines}
        started = [at for at in stuck if all(done[before] for before in behind[at])]
        spinning = [at for at in started if engines[graph.operations[at].queue] not in (COPY_ENGINE, LIBRARY)]
        first = (spinning or started or stuck)[0]
        said = _why(graph, first, (done, missing, behind))
        findings.add("residency", graph.operations[first], f"{said}; nothing proves that both fit on the SMs at once")


def _why(graph: Graph, at: int, state: tuple[list[bool], dict[int, int], list[list[int]]]) -> str:
    """From a spinning operation, signal by signal, to one that its launch keeps from starting."""
    done, missing, behind = state
    words: list[str] = []
    seen: set[int] = set()
    while at not in seen:
        seen.add(at)
        blocked = [graph.operations[before] for before in behind[at] if not done[before]]
        if blocked:
            words.append(f"is launched behind {blocked[0].name}")
            break
        lacking = [key for key in graph.waited[at] if missing[key]]
        if not lacking:
            words.append("meets the other parts of its collective")
            break
        at = next(sender for sender, keys in enumerate(graph.notified) if lacking[0] in keys and not done[sender])
        sender = graph.operations[at]
        words.append(f"waits for {graph.signal_name(lacking[0])} from {sender.name} on rank {sender.rank}")
    return ", which ".join(words)


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
