"""Residency: nothing that a kernel spins on may need an SM that the kernel holds.

Here a rank's launches, not its operations, run one after the other: a kernel is one launch, placed where its first
operation stands, and so is each library call. Within a kernel tiles run in table order. The copy engine needs no SM.
If that graph has no cycle, any residency will do. Where it has one, two kernels may break it if both surely fit.

A kernel beside the others, on a stream of its own, is held back until own tiles are stored. Then it may start right
behind the tiles, ahead of whatever else was launched before it, or later than all that is not after it. So the graphs
of these orders must have no cycle either.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.verdict import Findings

Moved = tuple[str, bool]  # a queue, and whether it starts late, not early


def check_residency(plan: Plan, graph: Graph, together: frozenset[str], findings: Findings) -> None:
    """together: queues whose kernels surely run at the same time, if nothing orders them."""
    for moved in (None, *((queue, is_late) for queue in _beside(plan) for is_late in (False, True))):
        if _is_stuck(plan, graph, _launch_edges(plan, graph, together, moved), findings):
            return


def _beside(plan: Plan) -> Iterator[str]:
    """Queues of kernels that no kernel boundary precedes, beside that of the tiles."""
    for queue in plan.schedule.queues:
        if plan.realization.engine_of(queue.name) in (COPY_KERNEL, REDUCE_KERNEL) and not queue.after:
            yield queue.name


def _is_stuck(plan: Plan, graph: Graph, edges: list[set[int]], findings: Findings) -> bool:
    """Whether what is launched in some order holds a cycle; if so, a refusal."""
    behind = [sorted(before) for before in edges]
    done, missing = _run(graph, behind)
    stuck = [at for at in range(len(graph.operations)) if not done[at]]
    if stuck:
        engines = {one.queue: one.engine for one in plan.realization.engines}
        started = [at for at in stuck if all(done[before] for before in behind[at])]
        spinning = [at for at in started if engines[graph.operations[at].queue] not in (COPY_ENGINE, LIBRARY)]
        first = (spinning or started or stuck)[0]
        said = _why(graph, first, (done, missing, behind))
        findings.add("residency", graph.operations[first], f"{said}; nothing proves that both fit on the SMs at once")
    return bool(stuck)


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


def _launch_edges(plan: Plan, graph: Graph, together: frozenset[str], moved: Moved | None = None) -> list[set[int]]:
    """For each operation, those that must have completed before it starts. moved: a queue that starts at another time
    than it is launched.

    On a stream of its own a kernel is behind those library calls only that hold SMs while they wait: collectives.
    """
    beside = set(_beside(plan))
    engines = {one.queue: one.engine for one in plan.realization.engines}
    after = {queue.name: queue.after for queue in plan.schedule.queues}
    behind: list[set[int]] = [set() for _ in graph.operations]
    for launched_at in graph.of_rank:
        positions = _started(plan, [(at, graph.operations[at].queue) for at in launched_at], moved)
        kernels: dict[str, list[int]] = {}
        for at in positions:
            queue = graph.operations[at].queue
            if engines[queue] not in (COPY_ENGINE, LIBRARY):
                kernels.setdefault(queue, []).append(at)
        last: dict[str, int] = {}  # of each queue, among those launched so far
        library: dict[str, int] = {}  # the same of those that a library runs
        collectives: dict[str, int] = {}
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
                behind[at].update((collectives if queue in beside else library).values())
            if queue in kernels and queue not in launched:
                launched.append(queue)
            last[queue] = at
            if engines[queue] == LIBRARY:
                library[queue] = at
            if isinstance(graph.operations[at], Collective):
                collectives[queue] = at
    return behind


def _started(plan: Plan, launched: list[tuple[int, str]], moved: Moved | None) -> list[int]:
    """A rank's operations in the order in which they start, given with their queues as they are launched. Those of a
    queue that is moved stand right behind the first tile, or behind all but who is after them."""
    name, is_late = moved or ("", False)
    engines = {one.queue: one.engine for one in plan.realization.engines}
    after = {queue.name: queue.after for queue in plan.schedule.queues}
    tile = next((at for at, queue in launched if engines[queue] in (TILE_KERNEL, AUTHOR_KERNEL)), None)
    own, rest = ([one for one in launched if (one[1] == name) is is_own] for is_own in (True, False))
    if tile is None or not own or own[0][0] < tile:
        return [at for at, _ in launched]
    place = next(place for place, (at, _) in enumerate(rest) if at == tile) + 1
    if is_late:
        behind = (place for place, (at, queue) in enumerate(rest) if at > own[0][0] and name in after[queue])
        place = next(behind, len(rest))
    return [at for at, _ in (*rest[:place], *own, *rest[place:])]


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
