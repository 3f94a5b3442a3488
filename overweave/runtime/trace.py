"""Trace records of one rank, in nanoseconds, and the Timeline that rank 0 builds from those of all ranks.

A record holds numbers only: every rank has the same schedule, so rank 0 looks up names and tracks. Waits of a queue
that runs one operation after another are not recorded: they are the gaps before operations that have waits.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from overweave.ir.plan import COPY_ENGINE, Plan
from overweave.ir.schedule import Operation
from overweave.ir.timeline.operations import arrows, kind_of, with_contents
from overweave.ir.timeline.timeline import BEGIN, KINDS, WAIT, Timeline, TimelineSpan, make_timeline
from overweave.memory.group import Group
from overweave.runtime.scheduler import PendingStep

HEAD = -1  # in place of an operation: the prologue of the call
NOT_A_TILE = -1
SHORTEST_WAIT_NS = 1000  # a wait for a signal that is set already takes a poll or two


class Record(NamedTuple):
    """One span of this rank, as numbers.

    operation: position among the rank's operations, or HEAD. kind: position in KINDS. tile: number within its queue's
    table, or NOT_A_TILE. program: the number of the kernel's program that ran the tile.
    """

    operation: int
    kind: int
    tile: int
    program: int
    begin_ns: int
    end_ns: int


class Stopwatch:
    """Times the steps of one emulated call (runtime/host/emulate.py) by the clock that its kernels read, too.

    tables: queue -> times that its traced kernel has written, int64 `[tiles, TRACE_COLUMNS]`, as in `tile_records`.
    programs: of a kernel.
    """

    def __init__(self) -> None:
        self.begin_ns = time.monotonic_ns()
        self.tables: dict[str, torch.Tensor] = {}
        self.programs = 1
        self._begun: dict[int, int] = {}  # position of a step's first operation -> start, ns
        self._spans: list[tuple[PendingStep, int, int]] = []

    def start(self, step: PendingStep) -> None:
        self._begun[step.first] = time.monotonic_ns()

    def stop(self, step: PendingStep) -> None:
        self._spans.append((step, self._begun[step.first], time.monotonic_ns()))

    def records(self, plan: Plan, rank: int) -> list[Record]:
        """Return the records of all steps that were timed, and of their waits."""
        operations = tuple(plan.schedule.of_rank(rank))
        prologue_end_ns = min((begin for _, begin, _ in self._spans), default=self.begin_ns)
        records = [Record(HEAD, KINDS.index(BEGIN), NOT_A_TILE, 0, self.begin_ns, prologue_end_ns)]
        for step, begin_ns, end_ns in self._spans:
            if step.is_kernel and step.queue in self.tables:
                records += tile_records(plan, rank, step.queue, self.tables[step.queue], self.programs)
            elif not all(region.is_empty for region in operations[step.first].writes):
                records.append(operation_record(step.first, operations[step.first], begin_ns, end_ns))
        return with_waits(operations, records)


def operation_record(position: int, operation: Operation, begin_ns: int, end_ns: int) -> Record:
    """Return the record of an operation that ran as a whole."""
    return Record(position, KINDS.index(kind_of(operation)), NOT_A_TILE, 0, begin_ns, end_ns)


def tile_records(plan: Plan, rank: int, queue: str, times: torch.Tensor, programs: int) -> list[Record]:
    """Return the records of a kernel queue's tiles, each assigned to the program that became free first.

    times: int64 `[tiles, TRACE_COLUMNS]`, nanoseconds at which a tile was claimed, ready (its waits over) and stored;
    its product was done; and, of a tile with addends, the addends had arrived. A program may claim and load its next
    tile while it still multiplies: a tile runs from when it is ready and its program is free.
    """
    positions = [index for index, part in enumerate(plan.schedule.of_rank(rank)) if part.queue == queue]
    operations = tuple(plan.schedule.of_rank(rank))
    free_ns = [0] * programs
    records: list[Record] = []
    rows = plan.tile_order(rank, queue).rows
    by_claim = sorted(enumerate(times.tolist()), key=lambda pair: pair[1])
    for tile, (claimed, ready, stored, multiplied, received, *_) in by_claim:
        position = positions[rows[tile].operation]
        program = min(range(programs), key=free_ns.__getitem__)
        free_since_ns = max(claimed, min(free_ns[program], stored))
        begin_ns = max(ready, free_since_ns)
        if rows[tile].wait_lo < rows[tile].wait_hi and begin_ns - free_since_ns > SHORTEST_WAIT_NS:
            records.append(Record(position, KINDS.index(WAIT), tile, program, free_since_ns, begin_ns))
        kind = KINDS.index(kind_of(operations[position]))
        if rows[tile].late_lo < rows[tile].late_hi and received - multiplied > SHORTEST_WAIT_NS:
            records.append(Record(position, kind, tile, program, begin_ns, multiplied))
            records.append(Record(position, KINDS.index(WAIT), tile, program, multiplied, received))
            begin_ns = received
        records.append(Record(position, kind, tile, program, begin_ns, stored))
        free_ns[program] = stored
    return records


def with_waits(operations: tuple[Operation, ...], records: list[Record]) -> list[Record]:
    """Return the records, and one for each wait: from when the operation's queue is free until it begins."""
    prologue_end_ns = max((record.end_ns for record in records if record.operation == HEAD), default=0)
    whole = [record for record in records if record.operation != HEAD and record.tile == NOT_A_TILE]
    free_ns: dict[str, int] = {}
    waits: list[Record] = []
    for record in sorted(whole):
        operation = operations[record.operation]
        free_since_ns = free_ns.get(operation.queue, prologue_end_ns)
        if operation.all_waits and record.begin_ns - free_since_ns > SHORTEST_WAIT_NS:
            waits.append(record._replace(kind=KINDS.index(WAIT), begin_ns=free_since_ns, end_ns=record.begin_ns))
        free_ns[operation.queue] = record.end_ns
    return records + waits


def gather_records(group: Group, records: list[Record], zero_ns: int = 0) -> list[list[Record]] | None:
    """Gather the records of each rank on rank 0; return None on the others. Collective.

    zero_ns: this rank's clock at an instant that was the same for all ranks; all times count from it.
    """
    fields = len(Record._fields)
    counts = _all_gather(group, torch.tensor([len(records)]))
    most = max(int(count) for count in counts)
    own = torch.zeros((most, fields), dtype=torch.int64)
    if records:
        own[: len(records)] = torch.tensor(records, dtype=torch.int64)
        own[: len(records), fields - 2 :] -= zero_ns
    tables = _all_gather(group, own)
    if group.rank != 0:
        return None
    return [[Record(*row) for row in table[: int(count)].tolist()] for table, count in zip(tables, counts, strict=True)]


def make_measured_timeline(plan: Plan, by_rank: list[list[Record]]) -> Timeline:
    """Build spans and arrows from the records of each rank, on one clock. Time starts with the first rank's call."""
    zero_ns = min((record.begin_ns for records in by_rank for record in records), default=0)
    spans: list[TimelineSpan] = []
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, records in enumerate(by_rank):
        operations = tuple(plan.schedule.of_rank(rank))
        for record in sorted(records, key=lambda record: record.end_ns):
            if record.operation != HEAD and KINDS[record.kind] != WAIT:
                name = operations[record.operation].name
                first.setdefault(name, len(spans))
                last[name] = len(spans)
            spans.append(_span(plan, rank, operations, record, zero_ns))
    drawn = arrows(plan.schedule, first, last)
    timeline = make_timeline(plan.name, "measured", plan.schedule.world_size, spans, drawn)
    return with_contents(timeline, plan.schedule, plan.realization.dtype)


def _span(plan: Plan, rank: int, operations: tuple[Operation, ...], record: Record, zero_ns: int) -> TimelineSpan:
    """Return the span of a record, named after its operation and tile."""
    begin_us, end_us = (record.begin_ns - zero_ns) / 1e3, (record.end_ns - zero_ns) / 1e3
    if record.operation == HEAD:
        engines = plan.realization.engines
        stream = next((each.queue for each in engines if each.engine != COPY_ENGINE), engines[0].queue)
        return TimelineSpan(rank, stream, "begin", BEGIN, begin_us, end_us)
    operation = operations[record.operation]
    name, track = operation.name, operation.queue
    if record.tile != NOT_A_TILE:
        name, track = f"{name}.{record.tile}", f"{track}.{record.program:03d}"
    return TimelineSpan(rank, track, name, KINDS[record.kind], begin_us, max(begin_us, end_us))


def _all_gather(group: Group, own: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, all of one shape, on the CPU."""
    sent = own.to(group.device)
    received = [torch.empty_like(sent) for _ in range(group.world_size)]
    dist.all_gather(received, sent, group=group.process_group)
    return [tensor.cpu() for tensor in received]
