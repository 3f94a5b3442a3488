"""Whether a call may be captured in a CUDA graph and replayed: whether every replay does what the first call did.

A graph holds launches, addresses and values as they were. Between two replays only bytes in memory change: the caller's
data, and words that kernels advance (the epoch, tickets, the calls that each rank has completed). So of a plan:

- A signal counts from zero in each call. Where calls have a head, that zeroes all signals of the slot. Packed messages
  have no head: there the only signals are the epochs in messages.
- What a stream writes is the constant 1, so the word that it sets has no other writer.
- A rank's own tensors lie where they lay, or its call is captured anew. A peer's may lie elsewhere in the peer's next
  replay, so nothing reaches a peer but in the workspace.

That a replay may follow any call in the same slot is the rule of reuse (`rules/reuse.py`). That streams beside the
caller's begin and end with the call, so that a capture holds them, is the launch's (`runtime/gpu/call_frame.py`).
"""

from __future__ import annotations

from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, LIBRARY, PACKED_KERNEL, Plan
from overweave.ir.schedule import ECHOES, INPUT, OUTPUT, Operation
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings


def check_replays(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Adds a refusal for whatever a replay would do otherwise than the call that was captured."""
    engines, has_head = plan.realization.engine_by_queue, plan.schedule.reuse != ECHOES
    # An author's kernel claims tiles, whose counter a head zeroes; its messages are reused by echoes all the same.
    kernels = {*engines.values()}
    if has_head != (PACKED_KERNEL not in kernels or AUTHOR_KERNEL in kernels):
        findings.add("replay", None, "packed kernels reuse memory by echoes, and nothing else does")
        return
    callers = {buffer.name for buffer in plan.schedule.buffers if buffer.home in (INPUT, OUTPUT)}
    for position, operation in enumerate(plan.schedule.operations):
        engine = engines[operation.queue]
        for region in (*operation.reads, *operation.writes):
            if region.rank != operation.rank and region.buffer in callers and not region.is_empty:
                said = f"a graph does not know where the tensors of rank {region.rank} lie in its next replay"
                findings.add("replay", operation, f"{said}; reach peers in the workspace", region)
        if engine in (COPY_ENGINE, LIBRARY):
            _check_words(graph, position, engine, findings)
        if not has_head:
            _check_quiet(operation, engine, findings)


def _check_words(graph: Graph, position: int, engine: str, findings: Findings) -> None:
    for key in graph.notified[position]:
        if graph.full[key] != 1:
            said = f"a {engine} sets {graph.signal_name(key)} to 1; in a call the signal counts to {graph.full[key]}"
            findings.add("replay", graph.operations[position], said)


def _check_quiet(operation: Operation, engine: str, findings: Findings) -> None:
    is_quiet = not operation.all_waits and not operation.notifies
    if engine not in (LIBRARY, PACKED_KERNEL) or (engine == LIBRARY and not is_quiet):
        findings.add("replay", operation, "without a head of the call there are no signals but those in messages")
