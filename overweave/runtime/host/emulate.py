"""The emulation: one rank's part of any Plan on CPU tensors, with real data and real signals between processes.

Library depth: torch computes each operation as a whole, and its signals count all its tiles at once. Waits, signals,
slots and credits are those of the Plan.
"""

from __future__ import annotations

import threading
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
from overweave.memory.board.board import Alarm, Board
from overweave.memory.board.records import Pause
from overweave.memory.group import Group, subgroup
from overweave.memory.host.workspace import HostSlot, HostWorkspace, try_run_locked
from overweave.memory.layout import SlotLayout
from overweave.runtime.library.epilogue import finish_sum, run_with_epilogue
from overweave.runtime.library.library import View, as_movable
from overweave.runtime.scheduler import Agenda, PendingStep
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


class Beside:
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


class Instances:
    """Views of a plan's buffers in a slot, of every rank, cached."""

    def __init__(self, plan: Plan, slot: HostSlot) -> None:
        self._plan, self._slot = plan, slot
        self._tensors: dict[tuple[str, int], Tensor] = {}  # (buffer, rank) -> its view

    def __call__(self, name: str, rank: int) -> Tensor:
        """Return a rank's instance of a buffer, shaped as `stored_shape` says."""
        tensor = self._tensors.get((name, rank))
        if tensor is None:
            buffer = self._plan.schedule.buffer(name)
            dtype = getattr(torch, buffer.dtype or self._plan.realization.dtype)
            tensor = self._tensors[name, rank] = self._slot.matrix(name, stored_shape(buffer), dtype, rank)
        return tensor


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
        """Raise InputError if this depth cannot run the plan."""

    def make_agenda(self) -> Agenda:
        """Return the queues of this rank, one step per operation."""
        return Agenda.of(self.plan.schedule, self.group.rank)

    def run(self, layout: SlotLayout, inputs: TensorsByName, outputs: TensorsByName) -> None:
        """Run the call. inputs, outputs: by buffer name, `[rows, cols]`, at least as large as this rank's regions."""
        self.tensors = {**inputs, **outputs}
        if not self.plan.problem.has_fixed_sizes:
            self._filled = Filled(self.plan.schedule, inputs[COUNTS].tolist())
        try:
            self.slot = self.workspace.begin(layout, self.timeout_s)
            self.instance = Instances(self.plan, self.slot)
            self.memory = _buffer_lookup(self.tensors, self._homes, self.instance)
            self._permuted = Permuted(self.plan.schedule.buffers, self.memory)
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
        """Return whether kernels that run beside this loop have progressed since the last call."""
        return False

    def abort(self) -> None:
        """Stop what runs beside this loop: the call has failed."""

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
        view, store = self._permuted.as_matrices(operation, self.view)
        if isinstance(operation, Put | Get | ReducePut):
            for source, destination in zip(operation.sources, operation.destinations, strict=True):
                target, arriving = view(destination), view(source)
                target.copy_(target.float() + arriving.float() if isinstance(operation, ReducePut) else arriving)
        else:
            run_with_epilogue(operation, self.plan.problem, view, (self.tensors, self.group))
        store()

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
            poll = start_collective(operation, group, self._permuted.call_tensors(operation, self.view))
        except RuntimeError as error:
            raise self.workspace.board.root_cause(error, operation.name) from error

        def is_done() -> bool:
            try:
                return poll()
            except RuntimeError as error:
                raise self.workspace.board.root_cause(error, operation.name) from error

        return is_done

    def view(self, region: Region) -> Tensor:
        """Return the view of a region."""
        return self.memory(region.buffer, region.rank)[slice(*region.rows), slice(*region.cols)]

    def _run_steps(self) -> None:
        """Run all steps. Raises peers' alarms, and PeerTimeout after `timeout_s` without progress."""
        run_event_loop(
            lambda: self.agenda.is_done,
            lambda: self._advance() or self.has_progressed(),
            self._timeout_alarm,
            self.workspace.board,
            self.timeout_s,
        )

    def _advance(self) -> bool:
        """Complete steps that have ended and start steps that may; return whether there was one."""
        has_progressed = False
        for step in list(self.agenda.poll_completed()):
            self._complete(step)
            has_progressed = True
        for step in list(self.agenda.startable()):
            if step.is_kernel or all(self._is_satisfied(wait) for wait in step.operations[0].all_waits):
                if self.stopwatch is not None:
                    self.stopwatch.start(step)
                is_done = self.begin_step(step)
                self.agenda.start(step, is_done)
                if is_done is None:
                    self._complete(step)
                has_progressed = True
        return has_progressed

    def _is_satisfied(self, wait: Wait) -> bool:
        return self.slot.has_reached(wait.pad, wait.signals, wait.count)

    def _complete(self, step: PendingStep) -> None:
        """Apply the epilogue of a step's sums and signal its notifies; a kernel does both itself."""
        if self.stopwatch is not None:
            self.stopwatch.stop(step)
        if not step.is_kernel:
            (operation,) = step.operations
            finish_sum(operation, self.plan.problem, self.view, self.tensors)
            for notify in operation.notifies:
                self.slot.notify(notify.pad, notify.rank, notify.signal, operation.instances)

    def _timeout_alarm(self) -> Alarm:
        """Return the alarm of a timeout: an unsatisfied wait, and the rank that has not signalled."""
        blocked = [step for queue in self.agenda.queues.values() for step in queue.steps[queue.head : queue.head + 1]]
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


def _buffer_lookup(
    tensors: TensorsByName, homes: Mapping[str, str], instance: Instances
) -> Callable[[str, int], Tensor]:
    """Return a function from (buffer, rank) to a tensor: the caller's, or an instance in the slot."""
    return lambda name, rank: tensors[name] if homes[name] in (INPUT, OUTPUT) else instance(name, rank)


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


# Buffers with permuted blocks, in the emulation: gathered into matrices for an operation, and scattered back.


class Permuted:
    """The permuted buffers of a schedule. memory: returns the whole tensor of a rank's instance of a buffer."""

    def __init__(self, buffers: Iterable[Buffer], memory: Callable[[str, int], Tensor]) -> None:
        self._all = {buffer.name: buffer for buffer in buffers}
        self._buffers = {name: buffer for name, buffer in self._all.items() if buffer.blocks is not None}
        self._memory = memory

    def as_matrices(self, operation: Operation, view: View) -> tuple[View, Callable[[], None]]:
        """Return a view of the operation's regions as matrices, and a function that stores results from these."""
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

    def call_tensors(self, collective: Collective, view: View) -> tuple[list[Tensor], list[Tensor]]:
        """Return the source and destination tensors of a collective, one per member or one for all.

        Of permuted blocks: equal parts of a contiguous range of memory; else the views of regions.
        """
        if not is_permuted(collective, self._all):
            pairs = zip((collective.sources, collective.destinations), CUT_BY_MEMBER[collective.function], strict=True)
            sent, got = (
                [view(one) for (one,) in regions_by_member(side, is_dealt, len(collective.ranks))]
                for side, is_dealt in pairs
            )
            return sent, got
        sides = call_sides(collective, self._all)
        assert not isinstance(sides, str), f"verify refuses it: {sides}"
        sent, got = (list(self._memory_range(side, collective.rank).tensor_split(side.parts)) for side in sides)
        return sent, got

    def _memory_range(self, side: CollectiveSide, rank: int) -> Tensor:
        return self._memory(side.buffer, rank).view(-1)[slice(*side.span)]

    def _pieces(self, region: Region, matrix: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each contiguous part of a region's matrix with its view in the buffer's memory."""
        buffer = self._buffers[region.buffer]
        memory = self._memory(region.buffer, region.rank)
        for run in memory_runs(buffer.blocks, (buffer.rows, buffer.cols), (region.rows, region.cols)):
            part = matrix[run.row : run.row + run.rows, run.col : run.col + run.cols]
            yield part, memory.as_strided((run.rows, run.cols), (run.pitch, 1), memory.storage_offset() + run.start)
