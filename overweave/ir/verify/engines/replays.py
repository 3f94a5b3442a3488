"""Whether a call may be captured in a CUDA graph and replayed: whether every replay does what the first call did.

A graph holds launches, addresses and values as they were at capture. Between two replays only bytes in memory change:
the caller's data, and words that kernels advance (the epoch, tickets, the calls that each rank has completed). So a
plan must obey these rules:

- A signal counts from zero in each call. The prologue of a call zeroes all signals of the slot. Calls of packed
  messages have no prologue; their only signals are the epochs in messages.
- A stream writes the constant 1, so the word that it sets has no other writer.
- A rank's own tensors keep their addresses, or its call is captured anew. A peer's may lie elsewhere in the peer's
  next replay, so peers are reached only in the workspace.

`rules/reuse.py` checks that a replay may follow any call in the same slot. The launcher makes side streams begin and
end with the call, so that a capture holds them (`runtime/gpu/replays.py`).
"""

from __future__ import annotations

from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, LIBRARY, PACKED_KERNEL, Plan
from overweave.ir.schedule import ECHOES, INPUT, OUTPUT, Operation
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import Findings


def check_replays(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Add a refusal for everything that a replay would do otherwise than the captured call."""
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
                message = f"a graph does not know where the tensors of rank {region.rank} lie in its next replay"
                findings.add("replay", operation, f"{message}; reach peers in the workspace", region)
        if engine in (COPY_ENGINE, LIBRARY):
            _check_stream_writes(graph, position, engine, findings)
        if not has_head:
            _check_no_signals(operation, engine, findings)


def _check_stream_writes(graph: Graph, position: int, engine: str, findings: Findings) -> None:
    """Refuse signals that a stream sets to 1 if their full count is another."""
    for key in graph.notified[position]:
        if graph.full[key] != 1:
            message = f"a {engine} sets {graph.signal_name(key)} to 1; in a call the signal counts to {graph.full[key]}"
            findings.add("replay", graph.operations[position], message)


def _check_no_signals(operation: Operation, engine: str, findings: Findings) -> None:
    """Refuse signals outside of packed messages in a call without a prologue."""
    is_quiet = not operation.all_waits and not operation.notifies
    if engine not in (LIBRARY, PACKED_KERNEL) or (engine == LIBRARY and not is_quiet):
        findings.add("replay", operation, "without a prologue of the call only messages carry signals")
