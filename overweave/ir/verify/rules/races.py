"""Refusals for two accesses that conflict: which operations, where, and the path that is missing between them."""

from __future__ import annotations

from overweave.ir.schedule import Apply, Compute, Operation, Region
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.happens_before import Bits, Past, without
from overweave.ir.verify.rules.verdict import Findings


def report_read(graph: Graph, past: Past, position: int | None, region: Region, findings: Findings) -> None:
    """Add a refusal for a read of `region` whose value is not certain. position: None for the caller's read at the
    end."""
    reader = None if position is None else graph.operations[position]
    reader_name = "the caller" if reader is None else reader.name
    before = past.ends[region.rank] if position is None else _past_of_read(graph, past, position, region)
    writers = [at for at in _writers(graph, region) if at != position]
    concurrent = [at for at in writers if not past.has(before, at)]
    if not concurrent:
        reason = "is held at the start or written only in part" if writers else "no input or operation writes it"
        findings.add("unwritten", reader, f"{reader_name} needs {region}, but {reason}", region)
        return
    writer = graph.operations[concurrent[0]]
    if position is not None and past.has(past.before[concurrent[0]], position):
        message = f"reads what {writer.name} on rank {writer.rank} writes only after it"
        findings.add("stale_read", reader, message, region)
        return
    message = (
        f"{reader_name} reads what {writer.name} on rank {writer.rank} writes, and no path leads from one to the other"
    )
    findings.add("race", reader, f"{message}: {_missing_path(writer, reader)}", region)


def _past_of_read(graph: Graph, past: Past, position: int, region: Region) -> Bits:
    """Return what has completed when the operation reads the region; an addend is read late."""
    operation = graph.operations[position]
    is_late = isinstance(operation, Compute) and region in operation.addends
    is_late |= isinstance(operation, Apply) and any(region == need.region for need in operation.late_needs)
    return past.late.get(position, past.before[position]) if is_late else past.before[position]


def report_write(graph: Graph, position: int, region: Region, other: int | None, findings: Findings) -> None:
    """Add a refusal for a second write. position: below zero for what the buffer holds at the start. other: the first
    writer."""
    operation = graph.operations[position] if position >= 0 else None
    if other is None:
        findings.add("double_write", operation, "the buffer holds a value there at the start", region)
        return
    writer = graph.operations[other]
    message = f"{writer.name} on rank {writer.rank} writes there in the same call"
    findings.add("double_write", operation, message, region)


def report_update(graph: Graph, past: Past, position: int, region: Region, touched: Bits, findings: Findings) -> None:
    """Add a refusal for an accumulation that is not ordered behind an earlier access. touched: the set of these
    accesses."""
    operation = graph.operations[position]
    concurrent = without(touched, past.before[position])
    other = next(at for at in range(len(graph.operations)) if past.has(concurrent, at))
    if other == position:
        findings.add("race", operation, "its own tiles read what others of its tiles add to", region)
        return
    toucher = graph.operations[other]
    message = f"adds to what {toucher.name} on rank {toucher.rank} reads or writes"
    message += ", and no path leads from one to the other"
    findings.add("race", operation, f"{message}: {_missing_path(toucher, operation)}", region)


def _writers(graph: Graph, region: Region) -> list[int]:
    """Return the operations that write a part of the region."""
    return [
        position
        for position, operation in enumerate(graph.operations)
        if any(overlap(region, written) for written in operation.writes)
    ]


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions share an element."""
    return (
        one.buffer == other.buffer
        and one.rank == other.rank
        and max(one.rows[0], other.rows[0]) < min(one.rows[1], other.rows[1])
        and max(one.cols[0], other.cols[0]) < min(one.cols[1], other.cols[1])
    )


def _missing_path(first: Operation, second: Operation | None) -> str:
    """Return what the first notifies and what the second waits for, and that an `issue` queue does not order them."""
    notifies = ", ".join(str(notify) for notify in first.notifies[:4]) or "nothing"
    if second is None:
        return f"{first.name} notifies {notifies}, and no operation of the caller's rank waits for that"
    waits = ", ".join(f"{wait.pad}@{second.rank}[{wait.signals[0]}:{wait.signals[1]}]" for wait in second.all_waits[:4])
    message = f"{first.name} notifies {notifies}, {second.name} waits for {waits or 'nothing'}"
    if first.rank == second.rank and first.queue == second.queue:
        return f"{message}, and queue {first.queue} orders by issue, not by completion"
    return message
