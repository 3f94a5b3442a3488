"""The order of a Plan's operations, computed once for a run: dependencies of steps, and the tiles of each launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from overweave.errors import ScheduleError
from overweave.ir.plan import AUTHOR_KERNEL, KERNELS, PACKED_KERNEL, Engine, Plan
from overweave.ir.schedule import Operation, Reduce
from overweave.ir.tile_order import APPLY, COPY, PART, TileRow
from overweave.ir.timeline.operations import kind_of
from overweave.ir.timeline.timeline import SpanKind
from overweave.sim.events import SignalKey

_KIND, _FIELDS = attrgetter("kind"), attrgetter("kind", "operation", "width")


class LaunchStep(Struct, frozen=True):
    """One operation. done, started: positions in `Schedule.operations` that must have ended, or started, before."""

    operation: Operation
    engine: Engine
    done: tuple[int, ...]
    started: tuple[int, ...]

    @property
    def is_packed(self) -> bool:
        return self.engine == PACKED_KERNEL

    @property
    def kind(self) -> SpanKind:
        return kind_of(self.operation)


class QueueRun(NamedTuple):
    """Tiles of an operation that are claimed one after the other and take equally long.

    width: 0 for whole tiles, else TileRow.width.
    """

    operation: int
    tiles: int
    width: int = 0


class KernelLaunch(Struct, frozen=True):
    """One launch of a kernel: it starts when the queue of operation `first` is free.

    runs: in claim order; an operation may occur more than once.
    """

    first: int
    runs: tuple[QueueRun, ...]

    @property
    def tiles(self) -> int:
        return sum(run.tiles for run in self.runs)


def tiles_of(rows: int, cols: int, block_m: int, block_n: int) -> int:
    return -(-rows // block_m) * -(-cols // block_n)


def told_within(plan: Plan, steps: Sequence[LaunchStep]) -> frozenset[SignalKey]:
    """Return the signals that streams of a rank tell each other, of a program of authors' kernels: events there, which
    cost nothing (runtime/gpu/handwritten.py)."""
    if all(each.engine != AUTHOR_KERNEL for each in plan.realization.engines):
        return frozenset()
    told, of_tiles = set[SignalKey](), set[SignalKey]()
    for step in steps:
        rank = step.operation.rank
        if step.engine in KERNELS:
            of_tiles |= {(rank, wait.pad, at) for wait in step.operation.all_waits for at in range(*wait.signals)}
        else:
            told |= {(rank, each.pad, each.signal) for each in step.operation.notifies if each.rank == rank}
    return frozenset(told - of_tiles)


def launch_steps(plan: Plan) -> tuple[LaunchStep, ...]:
    """Return one step per operation. Raises ScheduleError for a queue that is not declared or has no engine."""
    queues = {queue.name: queue for queue in plan.schedule.queues}
    engines = {assignment.queue: assignment.engine for assignment in plan.realization.engines}
    launched: dict[tuple[int, str], list[int]] = {}
    steps = []
    for position, operation in enumerate(plan.schedule.operations):
        queue = queues.get(operation.queue)
        if queue is None or operation.queue not in engines:
            cure = "Declare it in the schedule and give it an engine in the realization"
            raise ScheduleError(f"queue {operation.queue} of {operation.name}", "undeclared or without engine", cure)
        engine = engines[operation.queue]
        before = launched.setdefault((operation.rank, queue.name), [])
        done = before[-1:] if queue.order == "complete" else []
        # Tiles of one kernel start in the order of its table, not of its operations.
        started = before[-1:] if queue.order == "issue" and engine not in KERNELS else []
        for name in queue.after:
            done = done + launched.get((operation.rank, name), [])
        steps.append(LaunchStep(operation, engine, tuple(done), tuple(started)))
        before.append(position)
    return tuple(steps)


def kernel_launches(plan: Plan, steps: tuple[LaunchStep, ...]) -> tuple[KernelLaunch, ...]:
    """Return the kernel launches: one per rank and issue queue, one per operation of a complete queue."""
    is_issue = {queue.name: queue.order == "issue" for queue in plan.schedule.queues}
    members: dict[tuple[int, str], list[int]] = {}
    for position, step in enumerate(steps):
        if step.engine in KERNELS:
            members.setdefault((step.operation.rank, step.operation.queue), []).append(position)
    launches = []
    for (rank, queue), positions in members.items():
        runs = _runs(plan, rank, queue, positions)
        if is_issue[queue]:
            launches.append(KernelLaunch(positions[0], runs))
        else:
            launches += [KernelLaunch(each, tuple(run for run in runs if run[0] == each)) for each in positions]
    return tuple(launches)


def tile_counts(launches: tuple[KernelLaunch, ...]) -> Counter[int]:
    """Return operation -> number of its tiles."""
    counts: Counter[int] = Counter()
    for launch in launches:
        for run in launch.runs:
            counts[run.operation] += run.tiles
    return counts


def _untabled_tiles(plan: Plan, operation: Operation) -> int:
    """Return the number of tiles of an operation whose queue has no tile table."""
    config = plan.realization.reduction
    if isinstance(operation, Reduce) and config is not None:
        return tiles_of(*operation.out.shape, config.block_m, config.block_n)
    return operation.instances


def _run_key(fields: tuple[int, ...]) -> tuple[int, int]:
    """Return (operation, width) of a tile, from its `_FIELDS`; tiles of author's kernels are always whole."""
    kind, operation, width = fields
    return operation, 0 if kind == APPLY else width


def _claim_order(rows: tuple[TileRow, ...]) -> Sequence[TileRow]:
    """Return a table in claim order, without its PART rows: an author's tile claims and pushes slices before itself.

    `TileRow.width` of such a tile: slices that it claims at least; `col`: slices that must be claimed by then.
    """
    kinds = set(map(_KIND, rows))
    if not kinds & {PART, COPY}:
        return rows
    tiles = [row for row in rows if row.kind not in (PART, COPY)]
    slices = [row for row in rows if row.kind == COPY]
    if not tiles or not slices:
        return tiles or slices
    claimed: list[TileRow] = []
    taken = 0
    for row in tiles:
        due = max(taken + row.width, row.col) if row.kind == APPLY else taken
        claimed += (*slices[taken:due], row)
        taken = max(taken, min(due, len(slices)))
    return claimed + slices[taken:]


def _runs(plan: Plan, rank: int, queue: str, positions: list[int]) -> tuple[QueueRun, ...]:
    """Group adjacent equal tiles of one operation into runs; without a tile table, one run per operation."""
    try:
        rows = _claim_order(plan.tile_order(rank, queue).rows)
    except KeyError:
        return tuple(
            QueueRun(position, _untabled_tiles(plan, plan.schedule.operations[position])) for position in positions
        )
    # Tables have up to a million rows: group rows that are equal in every field before any other work on them.
    equal = ((fields, len(tuple(group))) for fields, group in groupby(map(_FIELDS, rows)))
    alike = groupby(equal, key=lambda found: _run_key(found[0]))
    try:
        return tuple(
            QueueRun(positions[operation], sum(count for _, count in counts), width)
            for (operation, width), counts in alike
        )
    except IndexError:
        found = f"an operation beyond the {len(positions)} that rank {rank} has there"
        raise ScheduleError(f"tile order of queue {queue}", found, "Number them from 0 in launch order") from None
