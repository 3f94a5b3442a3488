"""Whether each queue's engine can run the queue's operations."""

from __future__ import annotations

from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    KERNELS,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import (
    Apply,
    Clear,
    Collective,
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    Queue,
    Reduce,
    ReducePut,
    Retire,
)
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings

RUNS: dict[str, tuple[type[Operation], ...]] = {
    COPY_ENGINE: (Put, Get, Copy, Retire),
    LIBRARY: (Compute, Copy, Retire, Clear, Reduce, Collective),
    TILE_KERNEL: (Compute,),
    REDUCE_KERNEL: (Reduce,),
    COPY_KERNEL: (Put, ReducePut, Copy),
    AUTHOR_KERNEL: (Apply, Put),
    PACKED_KERNEL: (Put, Reduce, Copy),
}
ORDER = {COPY_ENGINE: "complete", LIBRARY: "complete", **dict.fromkeys((*KERNELS, PACKED_KERNEL), "issue")}


def check_engines(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Check that each queue has one engine, of its kind of order, that can run each of its operations."""
    realization = plan.realization
    queues = {queue.name: queue for queue in plan.schedule.queues}
    engines: dict[str, str] = {}
    for assignment in realization.engines:
        if assignment.queue in engines or assignment.queue not in queues:
            findings.add("engine", None, f"queue {assignment.queue} has two engines, or does not exist")
        engines[assignment.queue] = assignment.engine
    for kernel in (*KERNELS, PACKED_KERNEL):
        if list(engines.values()).count(kernel) > 1:
            findings.add("engine", None, f"two queues are a {kernel}; a plan launches one of each kind")
    for queue in queues.values():
        _check_queue(plan, queue, engines.get(queue.name), findings)
    for operation in plan.schedule.operations:
        engine = engines.get(operation.queue)
        if engine is not None:
            _check_operation(operation, engine, findings)
            if isinstance(operation, Collective):
                _check_members(operation, plan.schedule.world_size, findings)
    for positions in graph.of_rank:
        _check_boundaries(graph, positions, engines, findings)


def _check_queue(plan: Plan, queue: Queue, engine: str | None, findings: Findings) -> None:
    """Check that a queue has an engine with a configuration, and the engine's kind of order."""
    if engine is None:
        findings.add("engine", None, f"queue {queue.name} has no engine")
        return
    if queue.order != ORDER[engine]:
        findings.add("engine", None, f"queue {queue.name} runs in {queue.order} order, a {engine} in {ORDER[engine]}")
    if engine == COPY_ENGINE and queue.after:
        message = f"queue {queue.name} is after {', '.join(queue.after)}, but a {engine} starts by signals alone"
        findings.add("engine", None, message)
    realization = plan.realization
    configs = {
        TILE_KERNEL: realization.matmul,
        REDUCE_KERNEL: realization.reduction,
        COPY_KERNEL: realization.copy,
        PACKED_KERNEL: realization.packed,
    }
    if engine in configs and configs[engine] is None:
        findings.add("engine", None, f"queue {queue.name} is a {engine}, which has no configuration")


def _check_operation(operation: Operation, engine: str, findings: Findings) -> None:
    """Check that an engine can run an operation."""
    if type(operation) not in RUNS[engine]:
        findings.add("engine", operation, f"a {type(operation).__name__} cannot run on a {engine}")
    elif engine == COPY_ENGINE and isinstance(operation, Copy) and operation.sources:
        # A local copy is a kernel: behind one that fills every SM and waits for it, it never starts.
        findings.add("engine", operation, "a copy within a rank needs SMs, which the copy engine has not")
    elif engine == COPY_KERNEL and isinstance(operation, Copy) and (operation.sources or operation.delay_us):
        findings.add("engine", operation, "the kernel copies to peers, at once")
    elif engine == AUTHOR_KERNEL and isinstance(operation, Put) and operation.waits:
        findings.add("engine", operation, "slices that tiles push must be there when their kernel starts")
    elif engine == COPY_ENGINE and operation.instances != 1:
        findings.add("engine", operation, f"a copy engine moves it at once, not as {operation.instances} instances")
    elif engine == LIBRARY and operation.instances != 1:
        findings.add("engine", operation, f"a library call is one instance, not {operation.instances}")
    elif engine == LIBRARY and isinstance(operation, Compute) and not _is_cut_alike(operation):
        findings.add("engine", operation, "a library multiplies each part of `a` into one of `out`, of as many rows")
    elif engine == LIBRARY and any(region.rank != operation.rank for region in (*operation.reads, *operation.writes)):
        findings.add("engine", operation, "a library call touches its own rank's memory only")


def _is_cut_alike(compute: Compute) -> bool:
    return [part.shape[0] for part in compute.a] == [part.shape[0] for part in compute.out]


def _check_members(operation: Collective, world_size: int, findings: Findings) -> None:
    """Refuse a collective whose ranks are not ascending: NCCL's groups are."""
    if list(operation.ranks) != sorted(set(operation.ranks)) or not set(operation.ranks) <= set(range(world_size)):
        message = f"a library's collective is of ranks in ascending order, up to {world_size - 1}"
        findings.add("engine", operation, f"{message}, not of {operation.ranks[:16]}")


def _check_boundaries(graph: Graph, positions: list[int], engines: dict[str, str], findings: Findings) -> None:
    """Check that all queues that a kernel's is after are launched before its first operation, which starts the kernel.
    positions: of a rank's operations."""
    after = {queue.name: queue.after for queue in graph.schedule.queues}
    of_queue: dict[str, list[int]] = {}
    for position in positions:
        of_queue.setdefault(graph.operations[position].queue, []).append(position)
    for queue, members in of_queue.items():
        if engines.get(queue) not in (*KERNELS, PACKED_KERNEL):
            continue
        for name in after[queue]:
            launched = of_queue.get(name, [])[: 1 if engines.get(name) in KERNELS else None]
            within = [position for position in launched if members[0] < position < members[-1]]
            if within:
                late, first = graph.operations[within[0]], graph.operations[members[0]]
                message = (
                    f"queue {queue} is after it, but its kernel starts with {first.name}, which is launched before"
                )
                findings.add("engine", late, message)
