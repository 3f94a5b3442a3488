"""The emulation: one rank's part of any Plan on CPU tensors, with real data and real signals between processes.

Library depth: torch computes each operation at once, and signals count its tiles. The waits, the signals, the slots and
the credits are those of the Plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from overweave.ir.blocks import CUT_BY_MEMBER, memory_runs, regions_by_member, stored_shape
from overweave.ir.counts import COUNTS, Filled
from overweave.ir.library_call import CollectiveSide, call_sides, is_permuted
from overweave.ir.plan import Plan
from overweave.ir.schedule import (
    INPUT,
    OUTPUT,
    Buffer,
    Collective,
    Copy,
    Get,
    Operation,
    Put,
    ReducePut,
    Region,
    Wait,
)
from overweave.memory.board.alarm import Alarm
from overweave.memory.group import Group
from overweave.memory.host.lock import run_alone
from overweave.memory.host.workspace import HostSlot, HostWorkspace
from overweave.memory.layout import SlotLayout
from overweave.memory.subgroups import subgroup
from overweave.runtime.host.event_loop import IsDone, run_event_loop
from overweave.runtime.library.epilogue import finish_sum, run_with_epilogue
from overweave.runtime.library.library import View, as_movable
from overweave.runtime.scheduler import Agenda, PendingStep
from overweave.runtime.trace import Stopwatch

TensorsByName = Mapping[str, Tensor]


class Instances:
    """The instances of a plan's buffers that lie in a slot, of every rank."""

    def __init__(self, plan: Plan, slot: HostSlot) -> None:
        self._plan, self._slot = plan, slot
        self._known: dict[tuple[str, int], Tensor] = {}

    def __call__(self, name: str, rank: int) -> Tensor:
        """A rank's instance, its memory as `stored_shape` says."""
        found = self._known.get((name, rank))
        if found is None:
            buffer = self._plan.schedule.buffer(name)
            dtype = getattr(torch, buffer.dtype or self._plan.realization.dtype)
            found = self._known[name, rank] = self._slot.matrix(name, stored_shape(buffer), dtype, rank)
        return found


class HostCall:
    """One call of a plan on one rank. `run` returns when the outputs are complete.

    Raises PeerDied, PeerTimeout or another PeerError; the outputs are then NaN and the workspace is broken.
    """

    def __init__(self, plan: Plan, group: Group, workspace: HostWorkspace, timeout_s: float) -> None:
        self.plan = plan
        self.group = group
        self.workspace = workspace
        self.timeout_s = timeout_s
        self.stopwatch: Stopwatch | None = None
        self.agenda = self.make_agenda()
        self._homes = {buffer.name: buffer.home for buffer in plan.schedule.buffers}
        self._filled: Filled | None = None

    @staticmethod
    def check(plan: Plan) -> None:
        """Whether this depth can run the plan on any rank. Raises InputError."""

    def make_agenda(self) -> Agenda:
        """Which steps there are: one per operation."""
        return Agenda.of(self.plan.schedule, self.group.rank)

    def run(self, layout: SlotLayout, inputs: TensorsByName, outputs: TensorsByName) -> None:
        """Inputs and outputs by buffer name, `[rows, cols]`, with at least the rows and columns of the own regions."""
        self.tensors = {**inputs, **outputs}
        if self.plan.problem.counted:
            self._filled = Filled(self.plan.schedule, inputs[COUNTS].tolist())
        try:
            self.slot = self.workspace.begin(layout, self.timeout_s)
            self.instance = Instances(self.plan, self.slot)
            self.memory = _buffer_lookup(self.tensors, self._homes, self.instance)
            self._permuted = Permuted(self.plan.schedule.buffers, self.memory)
            self.prepare()
            self._work_off()
        except BaseException as error:
            self.workspace.is_broken = True
            self.give_up()
            for output in outputs.values():
                output.fill_(torch.nan)
            self.workspace.board.report_failure(error, self.plan.name)
            raise
        self.workspace.board.finish()

    def has_moved(self) -> bool:
        """Whether what runs beside this loop has got on since the last look."""
        return False

    def give_up(self) -> None:
        """The call is void: stops what runs beside this loop."""

    def prepare(self) -> None:
        """What this depth needs of the slot before the first step."""

    def begin_step(self, step: PendingStep) -> IsDone | None:
        """Starts a step whose waits are over; None if it is complete already."""
        (operation,) = step.operations
        if self._filled is not None:
            operation = self._filled.operation(operation)
        if isinstance(operation, Collective):
            return self._start_collective(operation)
        if isinstance(operation, Copy) and operation.delay_us:
            return self._start_late(operation)
        if isinstance(operation, ReducePut):
            return lambda: run_alone(lambda: self._execute(operation))
        self._execute(operation)
        return None

    def _execute(self, operation: Operation) -> None:
        view, store = self._permuted.through(operation, self.view)
        if isinstance(operation, Put | Get | ReducePut):
            for source, destination in zip(operation.sources, operation.destinations, strict=True):
                target, arriving = view(destination), view(source)
                target.copy_(target.float() + arriving.float() if isinstance(operation, ReducePut) else arriving)
        else:
            run_with_epilogue(operation, self.plan.problem, view, (self.tensors, self.group))
        store()

    def _start_late(self, operation: Copy) -> IsDone:
        due_s = time.monotonic() + operation.delay_us / 1e6

        def is_done() -> bool:
            if time.monotonic() < due_s:
                return False
            self._execute(operation)
            return True

        return is_done

    def _start_collective(self, operation: Collective) -> IsDone:
        try:
            group = subgroup(self.group, operation.ranks)
            ends = start_collective(operation, group, self._permuted.sides(operation, self.view))
        except RuntimeError as error:
            raise self.workspace.board.root_cause(error, operation.name) from error

        def is_done() -> bool:
            try:
                return ends()
            except RuntimeError as error:
                raise self.workspace.board.root_cause(error, operation.name) from error

        return is_done

    def view(self, region: Region) -> Tensor:
        """The elements of a region, where they lie."""
        return self.memory(region.buffer, region.rank)[slice(*region.rows), slice(*region.cols)]

    def _work_off(self) -> None:
        run_event_loop(
            lambda: self.agenda.is_done,
            lambda: self._advance() or self.has_moved(),
            self._late,
            self.workspace.board,
            self.timeout_s,
        )

    def _advance(self) -> bool:
        moved = False
        for step in list(self.agenda.finished()):
            self._complete(step)
            moved = True
        for step in list(self.agenda.heads()):
            if step.is_kernel or all(self._is_over(wait) for wait in step.operations[0].all_waits):
                if self.stopwatch is not None:
                    self.stopwatch.start(step)
                is_done = self.begin_step(step)
                self.agenda.start(step, is_done)
                if is_done is None:
                    self._complete(step)
                moved = True
        return moved

    def _is_over(self, wait: Wait) -> bool:
        return self.slot.has_reached(wait.pad, wait.signals, wait.count)

    def _complete(self, step: PendingStep) -> None:
        if self.stopwatch is not None:
            self.stopwatch.stop(step)
        if not step.is_kernel:
            (operation,) = step.operations
            finish_sum(operation, self.plan.problem, self.view, self.tensors)
            for notify in operation.notifies:
                self.slot.notify(notify.pad, notify.rank, notify.signal, operation.instances)

    def _late(self) -> Alarm:
        """What a blocked operation waits for, and which rank has not delivered it."""
        blocked = [step for line in self.agenda.lines.values() for step in line.steps[line.head : line.head + 1]]
        for operation in (operation for step in blocked for operation in step.operations):
            for wait in operation.all_waits:
                for signal in range(*wait.signals):
                    arrived = self.slot.counts(wait.pad, signal)
                    if sum(arrived) < wait.count:
                        text = f"{operation.name} waits for {wait.pad}[{signal}]"
                        peer = self._debtor(wait.pad, signal, arrived)
                        return Alarm("timeout", text, peer, wait.count, sum(arrived))
        names = ", ".join(step.operations[0].name for step in blocked)
        return Alarm("timeout", f"{names} did not end")

    def _debtor(self, pad: str, signal: int, arrived: list[int]) -> int:
        """The rank whose contribution to an own signal is missing; -1 if none is."""
        due = [0] * self.group.world_size
        for operation in self.plan.schedule.operations:
            for notify in operation.notifies:
                if (notify.pad, notify.rank, notify.signal) == (pad, self.group.rank, signal):
                    due[operation.rank] += operation.instances
        return next((rank for rank, count in enumerate(due) if arrived[rank] < count), -1)


def _buffer_lookup(
    tensors: TensorsByName, homes: Mapping[str, str], instance: Instances
) -> Callable[[str, int], Tensor]:
    """A rank's instance of a buffer: the caller's tensor, or what lies in the slot."""
    return lambda name, rank: tensors[name] if homes[name] in (INPUT, OUTPUT) else instance(name, rank)


def start_collective(operation: Collective, group: Group, sides: tuple[list[Tensor], list[Tensor]]) -> IsDone:
    """Starts a library collective. Uneven shards: as lists; the sum is fp32 in rank order, rounded once.

    sides: what the library is given, and where it stores, by member, or once for all.
    """
    of_sources, of_destinations = CUT_BY_MEMBER[operation.function]
    sources, targets = [source.contiguous() for source in sides[0]], sides[1]
    if not of_sources:
        sources = sources * group.world_size
    landing = targets if of_destinations else targets * group.world_size
    received = [sources[0].new_empty(target.shape) for target in landing]

    def store() -> None:
        if of_destinations:
            for target, shard in zip(targets, received, strict=True):
                target.copy_(shard)
        else:
            total = received[0].to(torch.float32, copy=True)
            for partial in received[1:]:
                total += partial
            targets[0].copy_(total)

    return _start_all_to_all(group, sources, received, store)


def _start_all_to_all(group: Group, sources: list[Tensor], received: list[Tensor], store: Callable[[], None]) -> IsDone:
    """Sends `sources[i]` to rank i. gloo's own reduce-scatter never says that it is complete, this does."""
    packed = torch.cat([as_movable(source).flatten() for source in sources])
    arrived = packed.new_empty(sum(part.numel() for part in received))
    counts = [part.numel() for part in received], [part.numel() for part in sources]
    work = dist.all_to_all_single(arrived, packed, *counts, group=group.process_group, async_op=True)

    def is_done() -> bool:
        if not work.is_completed():
            return False
        work.wait()
        for part, piece in zip(received, arrived.split(counts[0]), strict=True):
            as_movable(part).copy_(piece.view(part.shape))
        store()
        return True

    return is_done


# Buffers whose blocks are permuted, in the emulation: what an operation sees of them, and where its results go.


class Permuted:
    """The permuted buffers of a schedule. memory: the whole tensor of a rank's instance, by buffer and rank."""

    def __init__(self, buffers: Iterable[Buffer], memory: Callable[[str, int], Tensor]) -> None:
        self._all = {buffer.name: buffer for buffer in buffers}
        self._buffers = {name: buffer for name, buffer in self._all.items() if buffer.blocks is not None}
        self._memory = memory

    def through(self, operation: Operation, view: View) -> tuple[View, Callable[[], None]]:
        """A view in which the operation's regions are matrices, and what then puts its results where they belong."""
        if not any(region.buffer in self._buffers for region in (*operation.reads, *operation.writes)):
            return view, lambda: None
        seen: dict[Region, Tensor] = {}

        def matrix(region: Region) -> Tensor:
            if region.buffer not in self._buffers:
                return view(region)
            if region not in seen:
                seen[region] = torch.empty(region.shape, dtype=self._memory(region.buffer, region.rank).dtype)
                for part, place in self._pieces(region, seen[region]):
                    part.copy_(place)
            return seen[region]

        def store() -> None:
            for region in operation.writes:
                if region in seen:
                    for part, place in self._pieces(region, seen[region]):
                        place.copy_(part)

        return matrix, store

    def sides(self, collective: Collective, view: View) -> tuple[list[Tensor], list[Tensor]]:
        """What a library call sends and gets, by member, or once for all: equal parts of two stretches of memory where
        blocks are permuted, else the matrices of regions."""
        if not is_permuted(collective, self._all):
            pairs = zip((collective.sources, collective.destinations), CUT_BY_MEMBER[collective.function], strict=True)
            sent, got = (
                [view(one) for (one,) in regions_by_member(side, is_dealt, len(collective.ranks))]
                for side, is_dealt in pairs
            )
            return sent, got
        sides = call_sides(collective, self._all)
        assert not isinstance(sides, str), f"verify refuses it: {sides}"
        sent, got = (list(self._stretch(side, collective.rank).tensor_split(side.parts)) for side in sides)
        return sent, got

    def _stretch(self, side: CollectiveSide, rank: int) -> Tensor:
        return self._memory(side.buffer, rank).view(-1)[slice(*side.span)]

    def _pieces(self, region: Region, matrix: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Each part of a region's matrix with its place in memory."""
        buffer = self._buffers[region.buffer]
        memory = self._memory(region.buffer, region.rank)
        for run in memory_runs(buffer.blocks, (buffer.rows, buffer.cols), (region.rows, region.cols)):
            part = matrix[run.row : run.row + run.rows, run.col : run.col + run.cols]
            yield part, memory.as_strided((run.rows, run.cols), (run.pitch, 1), memory.storage_offset() + run.start)
