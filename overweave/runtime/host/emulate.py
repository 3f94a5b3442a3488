"""The emulation: one rank's part of any Plan on CPU tensors, with real data and real signals between processes.

Library depth: torch computes each operation as a whole, and its signals count all its tiles at once. Waits, signals,
slots and credits are those of the Plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

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
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    ReducePut,
    Region,
)
from overweave.memory.board.board import Alarm, Board
from overweave.memory.board.records import Pause
from overweave.memory.group import Group, subgroup
from overweave.memory.host.workspace import HostSlot, HostWorkspace, try_run_locked
from overweave.memory.layout import SlotLayout, lay_out
from overweave.runtime.library.epilogue import finish_sum, one_row_each, run_with_epilogue
from overweave.runtime.library.library import View, as_movable
from overweave.runtime.scheduler import Agenda, PendingStep, StepQueue, step_queues
from overweave.runtime.trace import Stopwatch

IsDone = Callable[[], bool]


def run_event_loop(
    is_over: Callable[[], bool],
    advance: Callable[[], bool],
    timeout_alarm: Callable[[], Alarm],
    board: Board,
    timeout_s: float,
) -> None:
    """Call `advance` until `is_over`. Raises peers' alarms, and PeerTimeout after `timeout_s` without progress.

    advance: returns whether it has made progress. timeout_alarm: returns the alarm of a timeout.
    """
    pause, progress_s = Pause(), time.monotonic()
    while not is_over():
        if advance():
            pause, progress_s = Pause(), time.monotonic()
        else:
            pause()
        board.check_periodically()
        if time.monotonic() - progress_s > timeout_s:
            raise board.alarm(timeout_alarm())


class LaunchThreads:
    """The kernel launches of one call, each in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> IsDone:
        """Run a launch in a new thread. Return a function that polls for its end, and raises what it raised."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the loop
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

        def is_done() -> bool:
            has_ended = not thread.is_alive()  # before `errors`: a thread may fail in between
            if errors:
                raise errors[0]
            return has_ended

        return is_done

    def join(self) -> None:
        """Wait for all threads. The abort word must be set, or all signals."""
        for thread in self._threads:
            thread.join()


TensorsByName = Mapping[str, Tensor]


class HostProgram(NamedTuple):
    """What a rank derives from a plan once for all its calls.

    callers: the buffers that callers pass. permuted: those whose blocks are permuted. ends_sums: whether an operation's
    sums are followed by an epilogue or a norm of their own.
    """

    plan: Plan
    layout: SlotLayout
    queues: Mapping[str, StepQueue]
    buffers: Mapping[str, Buffer]
    callers: frozenset[str]
    permuted: Mapping[str, Buffer]
    ends_sums: bool

    @classmethod
    def of(cls, plan: Plan, rank: int, kernel_queues: frozenset[str]) -> HostProgram:
        """Derive it. kernel_queues: queues whose operations run as one kernel."""
        schedule = plan.schedule
        sums = (each for each in schedule.operations if isinstance(each, Collective))
        return cls(
            plan=plan,
            layout=lay_out(schedule, plan.realization.dtype),
            queues=step_queues(schedule, rank, kernel_queues),
            buffers={buffer.name: buffer for buffer in schedule.buffers},
            callers=frozenset(buffer.name for buffer in schedule.buffers if buffer.home in (INPUT, OUTPUT)),
            permuted={buffer.name: buffer for buffer in schedule.buffers if buffer.blocks is not None},
            ends_sums=plan.problem.of_rows is not None or any(each.finishes for each in sums),
        )


class HostCall:
    """One call of a plan on one rank. `run` returns when the outputs are complete.

    Raises PeerDied, PeerTimeout or another PeerError; the outputs are then NaN and the workspace is broken.
    """

    def __init__(self, program: HostProgram, group: Group, workspace: HostWorkspace, timeout_s: float) -> None:
        self.program, self.plan = program, program.plan
        self.group = group
        self.workspace = workspace
        self.timeout_s = timeout_s
        self.stopwatch: Stopwatch | None = None
        self.agenda = Agenda(program.queues)
        self._filled: Filled | None = None

    @staticmethod
    def check(plan: Plan) -> None:
        """Raise InputError if this depth cannot run the plan."""

    @staticmethod
    def kernel_queues(plan: Plan) -> frozenset[str]:
        """Return the queues whose operations run as one kernel."""
        return frozenset()

    def run(self, inputs: TensorsByName, outputs: TensorsByName) -> None:
        """Run the call. inputs, outputs: by buffer name, `[rows, cols]`, at least as large as this rank's regions."""
        self.tensors = {**inputs, **outputs}
        if not self.plan.problem.has_fixed_sizes:
            self._filled = Filled(self.plan.schedule, inputs[COUNTS].tolist())
        try:
            self.slot = self.workspace.begin(self.program.layout, self.timeout_s)
            self.memory = CallMemory(self.program, self.tensors, self.slot)
            self.prepare()
            self._run_steps()
        except BaseException as error:
            self.workspace.is_broken = True
            self.abort()
            for output in outputs.values():
                output.fill_(torch.nan)
            self.workspace.board.report_failure(error, self.plan.name)
            raise
        self.workspace.board.finish()

    def has_progressed(self) -> bool:
        """Return whether kernels in other threads have progressed since the last call."""
        return False

    def abort(self) -> None:
        """Stop kernels in other threads: the call has failed."""

    def prepare(self) -> None:
        """Prepare the slot before the first step."""

    def begin_step(self, step: PendingStep) -> IsDone | None:
        """Start a step whose waits are satisfied. Return a function that polls for its end; None if it has ended."""
        (operation,) = step.operations
        if self._filled is not None:
            operation = self._filled.operation(operation)
        if isinstance(operation, Collective):
            return self._start_collective(operation)
        if isinstance(operation, Copy) and operation.delay_us:
            return self._start_delayed(operation)
        if isinstance(operation, ReducePut):
            return lambda: try_run_locked(lambda: self._execute(operation))
        self._execute(operation)
        return None

    def _execute(self, operation: Operation) -> None:
        """Compute an operation at once."""
        is_invariant = self.plan.problem.batch_invariant
        for part in one_row_each(operation) if is_invariant and isinstance(operation, Compute) else (operation,):
            view, store = self.memory.as_matrices(part) if self.program.permuted else (self.memory.view, None)
            self._execute_in(part, view)
            if store is not None:
                store()

    def _execute_in(self, operation: Operation, view: View) -> None:
        if not isinstance(operation, Put | Get | ReducePut):
            run_with_epilogue(operation, self.plan.problem, view, (self.tensors, self.group))
            return
        for source, destination in zip(operation.sources, operation.destinations, strict=True):
            target, arriving = view(destination), view(source)
            target.copy_(target.float() + arriving.float() if isinstance(operation, ReducePut) else arriving)

    def _start_delayed(self, operation: Copy) -> IsDone:
        """Execute a copy after its delay; return a function that polls for its end."""
        due_s = time.monotonic() + operation.delay_us / 1e6

        def is_done() -> bool:
            if time.monotonic() < due_s:
                return False
            self._execute(operation)
            return True

        return is_done

    def _start_collective(self, operation: Collective) -> IsDone:
        """Start a gloo collective; return a function that polls for its end."""
        try:
            group = subgroup(self.group, operation.ranks)
            poll = start_collective(operation, group, self.memory.call_tensors(operation))
        except RuntimeError as error:
            raise self.workspace.board.root_cause(error, operation.name) from error

        def is_done() -> bool:
            try:
                return poll()
            except RuntimeError as error:
                raise self.workspace.board.root_cause(error, operation.name) from error

        return is_done

    def _run_steps(self) -> None:
        """Run all steps. Raises peers' alarms, and PeerTimeout after `timeout_s` without progress."""
        run_event_loop(
            lambda: not self.agenda.left,
            lambda: self._advance() or self.has_progressed(),
            self._timeout_alarm,
            self.workspace.board,
            self.timeout_s,
        )

    def _advance(self) -> bool:
        """Complete steps that have ended and start steps that may; return whether there was one."""
        has_progressed = False
        for step in self.agenda.poll_completed():
            self._complete(step)
            has_progressed = True
        for step in self.agenda.startable():
            if step.waits and not all(self.slot.has_reached(one.pad, one.signals, one.count) for one in step.waits):
                continue
            if self.stopwatch is not None:
                self.stopwatch.start(step)
            is_done = self.begin_step(step)
            self.agenda.start(step, is_done)
            if is_done is None:
                self._complete(step)
            has_progressed = True
        return has_progressed

    def _complete(self, step: PendingStep) -> None:
        """Apply the epilogue of a step's sums and signal its notifies; a kernel does both itself."""
        if self.stopwatch is not None:
            self.stopwatch.stop(step)
        if not step.is_kernel:
            (operation,) = step.operations
            if self.program.ends_sums:
                finish_sum(operation, self.plan.problem, self.memory.view, self.tensors)
            for notify in operation.notifies:
                self.slot.notify(notify.pad, notify.rank, notify.signal, operation.instances)

    def _timeout_alarm(self) -> Alarm:
        """Return the alarm of a timeout: an unsatisfied wait, and the rank that has not signalled."""
        blocked = self.agenda.heads()
        for operation in (operation for step in blocked for operation in step.operations):
            for wait in operation.all_waits:
                for signal in range(*wait.signals):
                    arrived = self.slot.counts(wait.pad, signal)
                    if sum(arrived) < wait.count:
                        text = f"{operation.name} waits for {wait.pad}[{signal}]"
                        peer = self._missing_notifier(wait.pad, signal, arrived)
                        return Alarm("timeout", text, peer, wait.count, sum(arrived))
        names = ", ".join(step.operations[0].name for step in blocked)
        return Alarm("timeout", f"{names} did not end")

    def _missing_notifier(self, pad: str, signal: int, arrived: list[int]) -> int:
        """Return the first rank that has added too little to a signal of this rank; -1 if none has."""
        expected = [0] * self.group.world_size
        for operation in self.plan.schedule.operations:
            for notify in operation.notifies:
                if (notify.pad, notify.rank, notify.signal) == (pad, self.group.rank, signal):
                    expected[operation.rank] += operation.instances
        return next((rank for rank, count in enumerate(expected) if arrived[rank] < count), -1)


def start_collective(operation: Collective, group: Group, sides: tuple[list[Tensor], list[Tensor]]) -> IsDone:
    """Start a gloo collective as one all-to-all. Shards may be uneven; sums are fp32 in rank order, rounded once.

    sides: source and destination tensors, one per member or one for all. Return a function that polls for its end.
    """
    sources_per_rank, destinations_per_rank = CUT_BY_MEMBER[operation.function]
    sources, targets = [source.contiguous() for source in sides[0]], sides[1]
    if not sources_per_rank:
        sources = sources * group.world_size
    target_of_each = targets if destinations_per_rank else targets * group.world_size
    received = [sources[0].new_empty(target.shape) for target in target_of_each]

    def store() -> None:
        if destinations_per_rank:
            for target, shard in zip(targets, received, strict=True):
                target.copy_(shard)
        else:
            total = received[0].to(torch.float32, copy=True)
            for partial in received[1:]:
                total += partial
            targets[0].copy_(total)

    return _start_all_to_all(group, sources, received, store)


def _start_all_to_all(group: Group, sources: list[Tensor], received: list[Tensor], store: Callable[[], None]) -> IsDone:
    """Send `sources[i]` to rank i. (gloo's own reduce-scatter never reports its completion.)"""
    sent_flat = torch.cat([as_movable(source).flatten() for source in sources])
    received_flat = sent_flat.new_empty(sum(part.numel() for part in received))
    counts = [part.numel() for part in received], [part.numel() for part in sources]
    work = dist.all_to_all_single(received_flat, sent_flat, *counts, group=group.process_group, async_op=True)

    def is_done() -> bool:
        if not work.is_completed():
            return False
        work.wait()
        for part, piece in zip(received, received_flat.split(counts[0]), strict=True):
            as_movable(part).copy_(piece.view(part.shape))
        store()
        return True

    return is_done


class CallMemory:
    """The memory of one call: the caller's tensors, and every rank's instances of buffers in a slot.

    Buffers with permuted blocks are gathered into matrices for an operation, and scattered back.
    """

    def __init__(self, program: HostProgram, tensors: TensorsByName, slot: HostSlot) -> None:
        self._program, self._tensors, self._slot = program, tensors, slot
        self._instances: dict[tuple[str, int], Tensor] = {}  # (buffer, rank) -> its view

    def whole(self, name: str, rank: int) -> Tensor:
        """Return a caller's tensor, or a rank's instance of a buffer, shaped as `stored_shape` says."""
        if name in self._program.callers:
            return self._tensors[name]
        tensor = self._instances.get((name, rank))
        if tensor is None:
            buffer = self._program.buffers[name]
            dtype = getattr(torch, buffer.dtype or self._program.plan.realization.dtype)
            tensor = self._instances[name, rank] = self._slot.matrix(name, stored_shape(buffer), dtype, rank)
        return tensor

    def view(self, region: Region) -> Tensor:
        """Return the view of a region."""
        name, rows, cols = region.buffer, slice(*region.rows), slice(*region.cols)
        return (self._tensors[name] if name in self._program.callers else self.whole(name, region.rank))[rows, cols]

    def as_matrices(self, operation: Operation) -> tuple[View, Callable[[], None]]:
        """Return a view of the operation's regions as matrices, and a function that stores results from these."""
        copies: dict[Region, Tensor] = {}

        def matrix(region: Region) -> Tensor:
            """A view; of a permuted buffer a copy in the order of its matrix, which `store` writes back."""
            if region.buffer not in self._program.permuted:
                return self.view(region)
            if region not in copies:
                copies[region] = torch.empty(region.shape, dtype=self.whole(region.buffer, region.rank).dtype)
                for part, view_in_memory in self._pieces(region, copies[region]):
                    part.copy_(view_in_memory)
            return copies[region]

        def store() -> None:
            for region in operation.writes:
                if region in copies:
                    for part, view_in_memory in self._pieces(region, copies[region]):
                        view_in_memory.copy_(part)

        return matrix, store

    def call_tensors(self, collective: Collective) -> tuple[list[Tensor], list[Tensor]]:
        """Return the source and destination tensors of a collective, one per member or one for all.

        Of permuted blocks: equal parts of a contiguous range of memory; else the views of regions.
        """
        if not is_permuted(collective, self._program.buffers):
            pairs = zip((collective.sources, collective.destinations), CUT_BY_MEMBER[collective.function], strict=True)
            sent, got = (
                [self.view(one) for (one,) in regions_by_member(side, is_dealt, len(collective.ranks))]
                for side, is_dealt in pairs
            )
            return sent, got
        sides = call_sides(collective, self._program.buffers)
        assert not isinstance(sides, str), f"verify refuses it: {sides}"
        sent, got = (list(self._memory_range(side, collective.rank).tensor_split(side.parts)) for side in sides)
        return sent, got

    def _memory_range(self, side: CollectiveSide, rank: int) -> Tensor:
        return self.whole(side.buffer, rank).view(-1)[slice(*side.span)]

    def _pieces(self, region: Region, matrix: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each contiguous part of a region's matrix with its view in the buffer's memory."""
        buffer = self._program.permuted[region.buffer]
        memory = self.whole(region.buffer, region.rank)
        for run in memory_runs(buffer.blocks, (buffer.rows, buffer.cols), (region.rows, region.cols)):
            part = matrix[run.row : run.row + run.rows, run.col : run.col + run.cols]
            yield part, memory.as_strided((run.rows, run.cols), (run.pitch, 1), memory.storage_offset() + run.start)
