"""Runs any Plan on a described machine, event by event, to a Timeline.

Every operation starts when its queue is free and its signals have arrived, as ir/schedule.py says; its engine decides
what it then costs. Ranks enter the call together. Any Plan runs, whatever wrote it.
"""

from __future__ import annotations

from functools import partial
from math import inf

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import Machine
from overweave.ir.exchange import NO_REACH, addresses_peers, crossing_operation
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, KERNELS, TILE_KERNEL, Plan
from overweave.ir.schedule import CREDITS, Apply, Collective, Compute, Copy, Get, Operation, Put, Reduce, Schedule
from overweave.ir.timeline.operations import arrows
from overweave.ir.timeline.timeline import BEGIN, WAIT, SpanKind, Timeline, TimelineSpan, make_timeline
from overweave.sim.collectives import Collectives
from overweave.sim.cost import AuthorTile, Costs, KernelCost, Segment, moves_between_ranks
from overweave.sim.events import EventQueue, Gate, SignalCounters, SignalKey
from overweave.sim.order import KernelLaunch, LaunchStep, kernel_launches, launch_steps, tile_counts, told_within
from overweave.sim.ports import Ports, busiest_link, links_bound_us
from overweave.sim.processor import Batch, RunningKernel, StreamingMultiprocessors, TileRun


def simulate(
    plan: Plan, machine: Machine, with_tiles: bool = False, author_tile_us: AuthorTile | None = None
) -> Timeline:
    """Return the Timeline of one warm call of `plan` on `machine`. with_tiles: spans of tiles, not of operations.
    author_tile_us: time of one tile of an author's kernel, every SM busy (sim/cost.py estimates it).

    Raises InputError if the machine has fewer GPUs than the plan has ranks, or no peer access and the plan addresses
    peers, ScheduleError if the plan cannot be run to its end: a queue without an engine, a kernel without a config, or
    operations that wait for ever.
    """
    check_machine(plan, machine)
    return _timeline(_Run(plan, machine, with_tiles, author_tile_us), with_arrows=True)


def total_us(plan: Plan, machine: Machine, author_tile_us: AuthorTile | None = None, limit_us: float = inf) -> float:
    """Return the time of one call: until the slowest rank has ended, or the busiest link has passed its bytes.

    Infinite, without a simulation, if bytes alone keep a link busy for longer than `limit_us`. Raises as `simulate`.
    """
    check_machine(plan, machine)
    busiest = busiest_link(plan, machine)
    if busiest[0] > limit_us:
        return inf
    timeline = _timeline(_Run(plan, machine, False, author_tile_us), with_arrows=False)
    return max(timeline.total_us, links_bound_us(busiest, timeline))


def _timeline(run: _Run, with_arrows: bool) -> Timeline:
    """Run to the end and return the Timeline; break the run's reference cycles, so that no garbage collection is due.

    MEASURED: the collection after a first call's choice took 0.1 to 0.2 of its 0.6 s (campaigns.choice_by_machine).
    """
    try:
        return run.timeline(with_arrows)
    finally:
        run.release_references()


def check_machine(plan: Plan, machine: Machine) -> None:
    """Raise InputError if the machine has too few GPUs, or lacks the peer access that the plan needs: between its GPUs,
    or between its hosts, which none has."""
    if plan.schedule.world_size > machine.gpus:
        found = f"{plan.schedule.world_size} ranks on {machine.gpus} GPUs"
        raise InputError(f"simulate {plan.name}", found, "Choose a machine with more GPUs or a smaller world size")
    cure = "Take a plan whose rows the library moves, such as sequential, or another machine"
    if not machine.peer_access and addresses_peers(plan.schedule):
        raise InputError(f"simulate {plan.name}", f"the GPUs of {machine.name} {NO_REACH}", cure)
    if across := crossing_operation(plan.schedule, machine.islands):
        raise InputError(f"simulate {plan.name}", f"hosts of {machine.name} {NO_REACH}: {across}", cure)


class _Node:
    """The state of a launch step in the run.

    queue_gate: opens when its queue is free. start_gate: when its signals have arrived, too. late_gate: when the late
    signals of its tiles have arrived; None without. launch_gate: launches the kernel that starts with it; None without.
    gates_after_start, gates_after_end: of other steps, that wait for this one.
    """

    __slots__ = (
        *(
            "begin_us",
            "end_us",
            "gates_after_end",
            "gates_after_start",
            "is_done",
            "kernel",
            "late_gate",
            "launch_gate",
        ),
        *("launches", "queue_free_us", "queue_gate", "runs", "start_gate", "step", "stored_us", "tiles"),
    )

    def __init__(self, run: _Run, step: LaunchStep) -> None:
        self.step = step
        self.queue_gate = Gate(partial(run.on_queue_free, self))
        self.start_gate = Gate(partial(run.on_ready, self))
        self.late_gate: Gate | None = None
        self.launch_gate: Gate | None = None
        self.queue_free_us = self.begin_us = self.end_us = 0.0
        self.is_done = False
        self.tiles = 0  # of a kernel launch, still to be finished
        self.stored_us = 0.0  # from the end of a tile until its stores to peers are complete
        self.launches: tuple[KernelCost, ...] = ()  # further kernels of the operation, one after the other
        self.runs: list[TileRun] = []
        self.kernel: RunningKernel | None = None  # of the launch that starts with this step
        self.gates_after_start: list[Gate] = []
        self.gates_after_end: list[Gate] = []

    def release_references(self) -> None:
        """Delete what refers back to the run: cycles that the garbage collector would have to find."""
        gates = ("queue_gate", "start_gate", "late_gate", "launch_gate", "gates_after_start", "gates_after_end")
        for name in (*gates, "runs", "kernel"):
            delattr(self, name)


class _Run:
    def __init__(self, plan: Plan, machine: Machine, with_tiles: bool, author_tile_us: AuthorTile | None) -> None:
        self._plan, self._machine, self._schedule = plan, machine, plan.schedule
        self._costs = Costs(plan, machine, author_tile_us)
        self._clock, self._signals, self._recorder = EventQueue(), SignalCounters(), Recorder(with_tiles)
        ranks = plan.schedule.world_size
        beside = machine.sharing.library_matmul.factor
        self._processors = [StreamingMultiprocessors(self._clock, machine.processor.sms, beside) for _ in range(ranks)]
        self._ports = Ports(self._clock, machine, self._on_load_change)
        there = {each.rank: self._processors[each.rank] for each in plan.schedule.operations}
        self._collectives = Collectives(self._clock, there, self._costs, self._ports)
        self._side_queues = queues_beside(plan)
        # An operation with a time of its own has all SMs: its kernel's tiles follow one another.
        self._tile_programs = 1 if callable(author_tile_us) else max(1, machine.processor.sms - plan.sms_beside)
        # Whether tiles are launched after the pushes on a side stream, which wait for nothing, have their SMs.
        pushes = {one.queue for one in plan.realization.engines if one.engine == COPY_KERNEL}
        self._follows_pushes = not pushes.isdisjoint(self._side_queues) and not plan.sms_for_pushes
        steps = launch_steps(plan)
        self._told_within = told_within(plan, steps)
        # Streams on which an author's kernels run: a kernel waits there, for all signals that are asked for together.
        authors = {one.queue for one in plan.realization.engines if one.engine == AUTHOR_KERNEL}
        self._authors = {name for queue in plan.schedule.queues if queue.name in authors for name in queue.after}
        self._nodes = [_Node(self, step) for step in steps]
        self._of_rank: list[list[_Node]] = [[] for _ in range(ranks)]
        for node in self._nodes:
            self._of_rank[node.step.operation.rank].append(node)
        launches = kernel_launches(plan, steps)
        for position, tiles in tile_counts(launches).items():
            self._nodes[position].tiles = tiles
        for launch in launches:
            self._prepare(launch)
        self._connect()

    def timeline(self, with_arrows: bool) -> Timeline:
        """Run all events; return the Timeline. Raises ScheduleError if a step never ends."""
        self._clock.run()
        stuck = [node.step.operation.name for node in self._nodes if not node.is_done]
        if stuck:
            shown = ", ".join(stuck[:5]) + (f" and {len(stuck) - 5} more" if len(stuck) > 5 else "")
            raise ScheduleError(f"simulate {self._plan.name}", f"waits for ever: {shown}", "See `overweave verify`")
        for rank in range(self._schedule.world_size):
            self._join(rank)
        return self._recorder.timeline(self._plan.name, self._schedule, with_arrows)

    def release_references(self) -> None:
        for node in self._nodes:
            node.release_references()
        self.__dict__.clear()

    # Before the run.

    def _connect(self) -> None:
        """Make every gate expect what the schedule says its step waits for."""
        latency = self._machine.latency
        head_us = latency.call.us
        if self._schedule.reuse == CREDITS and (self._schedule.pads or self._schedule.credits):
            head_us += latency.begin.us
            for rank in range(self._schedule.world_size):
                self._recorder.add_prologue(rank, self._stream(rank), latency.call.us, head_us)
        for node in self._nodes:
            step = node.step
            graph_us = latency.graph.us if step.engine == COPY_ENGINE else 0.0
            self._clock.at(head_us + graph_us, node.queue_gate.expect().arrive)
            for before in step.done:
                self._nodes[before].gates_after_end.append(node.queue_gate.expect())
            for before in step.started:
                self._nodes[before].gates_after_start.append(node.queue_gate.expect())
            node.start_gate.expect()
            for wait in step.operation.all_waits:
                is_late = step.engine in KERNELS and wait not in step.operation.waits
                for signal in range(*wait.signals):
                    key = (step.operation.rank, wait.pad, signal)
                    self._signals.wait(key, wait.count, self._late_gate(node) if is_late else node.start_gate)

    def _late_gate(self, node: _Node) -> Gate:
        """Return the gate of a node's late waits; create it at the first."""
        if node.late_gate is None:
            node.late_gate = Gate(partial(self.on_late_ready, node))
        return node.late_gate

    def _join(self, rank: int) -> None:
        """Record how long the caller's stream waits for the side streams at the end of the call."""
        side, own = [0.0], [0.0]
        for node in self._of_rank[rank]:
            (side if self._is_on_side_stream(node.step) else own).append(node.end_us)
        joined_us = max(side) + self._machine.latency.join.us
        if len(side) > 1 and joined_us > max(own):
            self._recorder.add_join(rank, self._stream(rank), max(own), joined_us)

    def _is_on_side_stream(self, step: LaunchStep) -> bool:
        return step.operation.queue in self._side_queues

    def _stream(self, rank: int) -> str:
        """Return the first queue of a rank that runs on the caller's stream."""
        steps = (node.step for node in self._of_rank[rank])
        return next((step.operation.queue for step in steps if not self._is_on_side_stream(step)), "begin")

    def _prepare(self, launch: KernelLaunch) -> None:
        """Create the kernel of a launch; it starts when the queue of its first operation is free."""
        runs = []
        for each in launch.runs:
            node = self._nodes[each.operation]
            operation = node.step.operation
            work = self._costs.tiles(node.step, each, node.tiles, launch.tiles)
            delay_us = self._machine.latency.observe.us if operation.waits else 0.0
            run = TileRun(each.tiles, work.tile_us, delay_us, partial(self._finish_batch, node))
            run.late_us, node.stored_us = work.late_us, work.stored_us
            run.is_late_ready = not (isinstance(operation, Compute | Apply) and operation.late_waits)
            node.runs.append(run)
            runs.append(run)
        first = self._nodes[launch.first]
        first.kernel = RunningKernel(runs, self._programs(first.step))
        first.launch_gate = Gate(partial(self.on_launch, first)).expect()
        for key, count in self._launch_signals(first.step):
            self._signals.wait(key, count, first.launch_gate)

    def _programs(self, step: LaunchStep) -> int:
        """Return the programs of the kernel that starts with a step."""
        realization, sms = self._plan.realization, self._machine.processor.sms
        if isinstance(step.operation, Reduce) and realization.reduction:
            return realization.reduction.programs
        if step.engine == COPY_KERNEL and realization.copy:
            return min(realization.copy.programs, sms)
        return self._tile_programs

    def _launch_signals(self, step: LaunchStep) -> list[tuple[SignalKey, int]]:
        """Return the signals that the launch of a kernel on a side stream waits for: those of this rank's own tiles.

        A reduction or a push is launched once the first own tiles that it reads are stored: earlier, its waiting blocks
        would take SMs from the tiles.
        """
        operation = step.operation
        if not isinstance(operation, Reduce | Put) or not self._is_on_side_stream(step):
            return []
        own = {
            (notify.pad, notify.signal)
            for node in self._of_rank[operation.rank]
            if isinstance(node.step.operation, Compute | Apply)
            for notify in node.step.operation.notifies
            if notify.rank == operation.rank
        }
        return [
            ((operation.rank, wait.pad, signal), wait.count)
            for wait in operation.waits
            for signal in range(*wait.signals)
            if (wait.pad, signal) in own
        ]

    # During the run: gates open.

    def on_queue_free(self, node: _Node) -> None:
        node.queue_free_us = self._clock.now
        if node.launch_gate is not None:
            node.launch_gate.arrive()
        node.start_gate.arrive()

    def on_launch(self, node: _Node) -> None:
        """Launch the node's kernel, after its stream's waits."""
        assert node.kernel is not None
        latency = self._machine.latency
        has_tiles = node.step.engine in (TILE_KERNEL, AUTHOR_KERNEL)
        waits = len(self._launch_signals(node.step)) + (has_tiles and self._follows_pushes)
        waited_us = latency.stream_wait.us * waits
        processor = self._processors[node.step.operation.rank]
        self._clock.after(waited_us + latency.kernel.us, partial(processor.launch, node.kernel))

    def on_ready(self, node: _Node) -> None:
        """Start a step whose queue is free and whose signals have arrived."""
        for gate in node.gates_after_start:
            gate.arrive()
        if node.step.engine in KERNELS:
            self._open_tiles(node)
            return
        self._recorder.add_wait(node.step.operation, node.queue_free_us, self._clock.now)
        if node.step.is_packed:
            self._run_packed(node)
            return
        latency = self._waited_us(node.step.operation)
        if isinstance(node.step.operation, Copy):
            latency += node.step.operation.delay_us
        self._clock.after(latency, partial(self._perform, node))

    def _waited_us(self, operation: Operation) -> float:
        """Return what a stream takes to see signals that are there: one after the other, by a kernel all of them."""
        keys = [(operation.rank, wait.pad, at) for wait in operation.waits for at in range(*wait.signals)]
        awaited, latency = len(keys) - sum(key in self._told_within for key in keys), self._machine.latency
        if operation.queue in self._authors:
            return latency.kernel.us + latency.observe.us if awaited else 0.0
        return latency.stream_wait.us * awaited

    def _open_tiles(self, node: _Node) -> None:
        for run in node.runs:
            self._processors[node.step.operation.rank].release(run)
        if not node.tiles:
            self._end(node, self._machine.latency.signal.us)

    def on_late_ready(self, node: _Node) -> None:
        """Release the tiles of a node: their late signals have arrived."""
        for run in node.runs:
            self._processors[node.step.operation.rank].release_late(run)

    def _perform(self, node: _Node) -> None:
        """Start an operation that a stream or a copy engine runs."""
        operation = node.step.operation
        if isinstance(operation, Collective):
            self._collectives.start(operation, partial(self._end_collective, node))
        elif isinstance(operation, Put | Get | Copy) and self._needs_no_sm(operation):
            node.begin_us = self._clock.now
            self._copy(node, list(self._costs.segments(operation)))
        else:
            self._launch(node, *self._costs.alone(operation))

    def _needs_no_sm(self, operation: Put | Get | Copy) -> bool:
        """Return whether a copy engine moves it."""
        return self._machine.local_copies.by == "dma" or moves_between_ranks(operation)

    def _run_packed(self, node: _Node) -> None:
        """Run an operation of a packed kernel: a push, or a sum or a copy that waits for the pushes of all ranks."""
        operation = node.step.operation
        # Only pushes signal other threads: the thread that adds a message reads it itself.
        signal_us = self._machine.latency.signal.us if isinstance(operation, Put) else 0.0
        took_us = self._costs.packed_us(operation, self._schedule.world_size - 1)
        node.begin_us = self._clock.now
        self._clock.after(took_us, partial(self._end_timed, node, signal_us))

    def _launch(self, node: _Node, *works: KernelCost) -> None:
        """Launch the kernels of one operation, one after the other."""
        work, node.launches = (works[0], works[1:]) if works else (KernelCost(0, 0.0), ())
        if not work.count:
            self._end(node, self._machine.latency.flag.us)
            return
        run = TileRun(work.count, work.tile_us, 0.0, partial(self._finish_batch, node))
        run.ready_us = self._clock.now
        node.tiles = work.count
        is_matmul = isinstance(node.step.operation, Compute)
        kernel = RunningKernel([run], self._machine.processor.sms, is_matmul)
        processor = self._processors[node.step.operation.rank]
        self._clock.after(self._machine.latency.kernel.us, partial(processor.launch, kernel))

    def _copy(self, node: _Node, remaining: list[Segment]) -> None:
        if remaining:
            self._ports.copy(remaining[0], partial(self._copy, node, remaining[1:]))
            return
        self._end_timed(node, self._machine.latency.flag.us)

    def _end_timed(self, node: _Node, signal_us: float) -> None:
        self._recorder.add_span(node.step.operation, node.step.kind, node.begin_us, self._clock.now)
        self._end(node, signal_us)

    def _end_collective(self, node: _Node, begin_us: float, met_us: float) -> None:
        self._recorder.add_wait(node.step.operation, begin_us, met_us)
        self._recorder.add_span(node.step.operation, node.step.kind, met_us, self._clock.now)
        self._end(node, self._machine.latency.flag.us)

    # During the run: things end.

    def _finish_batch(self, node: _Node, batch: Batch) -> None:
        """End a batch of tiles; notify for its tiles, and end the operation with the last one."""
        operation = node.step.operation
        done = len(batch.programs)
        node.tiles -= done
        self._recorder.add_batch(operation, node.step.kind, batch, self._clock.now)
        latency, is_by_kernel = self._machine.latency, node.step.engine in KERNELS
        is_tile_wise = is_by_kernel and (isinstance(operation, Compute | Apply) or operation.instances > 1)
        if is_tile_wise and operation.notifies:
            self._clock.after(node.stored_us + latency.signal.us, partial(self._notify, node, done))
        if not node.tiles and node.launches:
            self._launch(node, *node.launches)
        elif not node.tiles:
            self._recorder.end_tiles(operation, node.step.kind)
            signal_us = latency.signal.us if is_by_kernel else latency.flag.us
            self._clock.after(node.stored_us, partial(self._end, node, signal_us, not is_tile_wise))

    def _end(self, node: _Node, signal_us: float, notifies: bool = True) -> None:
        """End an operation. A stream continues once its flags are written, a kernel at once."""
        operation, delay = node.step.operation, 0.0
        for notify in operation.notifies:
            key = notify.rank, notify.pad, notify.signal
            if key not in self._told_within:
                delay = delay + signal_us if node.step.engine == COPY_ENGINE else signal_us
            if notifies:
                self._clock.after(delay, partial(self._signals.add, key, operation.instances))
        self._clock.after(0.0 if node.step.engine in KERNELS else delay, partial(self._complete, node))

    def _notify(self, node: _Node, amount: int) -> None:
        for notify in node.step.operation.notifies:
            self._signals.add((notify.rank, notify.pad, notify.signal), amount)

    def _complete(self, node: _Node) -> None:
        node.is_done = True
        node.end_us = self._clock.now
        for gate in node.gates_after_end:
            gate.arrive()

    def _on_load_change(self, rank: int, load: float) -> None:
        """Slow a rank's kernels by the load of its ports: copies share its memory bandwidth."""
        factor = self._machine.sharing.copy_engine.factor
        self._processors[rank].set_slowdown(1.0 + (factor - 1.0) * load)


# Recorder of a simulated run: spans per operation or per tile, and an arrow for each signal.


class Recorder:
    """Collects spans. with_tiles: one track per program and one span per tile instead of one span per operation."""

    def __init__(self, with_tiles: bool) -> None:
        self._with_tiles = with_tiles
        self._spans: list[TimelineSpan] = []
        self._first: dict[str, int] = {}  # operation -> index of its first span
        self._last: dict[str, int] = {}  # and of its last one
        self._tiles: dict[str, tuple[float, float, float]] = {}  # operation -> claim, begin and end of its tiles, us

    def add_prologue(self, rank: int, track: str, begin_us: float, end_us: float) -> None:
        self._spans.append(TimelineSpan(rank, track, "begin", BEGIN, begin_us, end_us))

    def add_join(self, rank: int, track: str, begin_us: float, end_us: float) -> None:
        self._spans.append(TimelineSpan(rank, track, "join", WAIT, begin_us, end_us))

    def add_wait(self, operation: Operation, begin_us: float, end_us: float) -> None:
        if end_us > begin_us:
            self._spans.append(TimelineSpan(operation.rank, operation.queue, operation.name, WAIT, begin_us, end_us))

    def add_span(self, operation: Operation, kind: SpanKind, begin_us: float, end_us: float) -> None:
        self._add(operation, TimelineSpan(operation.rank, operation.queue, operation.name, kind, begin_us, end_us))

    def add_batch(self, operation: Operation, kind: SpanKind, batch: Batch, end_us: float) -> None:
        """Add the tiles of a batch that has ended; without tiles, widen the operation's span to cover them."""
        if self._with_tiles:
            for position, program in enumerate(batch.programs):
                track, name = f"{operation.queue}.{program:03d}", f"{operation.name}.{batch.first + position}"
                if batch.begin_us > batch.claimed_us:
                    self._spans.append(
                        TimelineSpan(operation.rank, track, name, WAIT, batch.claimed_us, batch.begin_us)
                    )
                self._tile(operation, track, name, kind, batch, end_us)
            return
        claimed, begin, end = self._tiles.get(operation.name, (batch.claimed_us, batch.begin_us, end_us))
        self._tiles[operation.name] = min(claimed, batch.claimed_us), min(begin, batch.begin_us), max(end, end_us)

    def _tile(self, operation: Operation, track: str, name: str, kind: SpanKind, batch: Batch, end_us: float) -> None:
        """Add the span of a tile; of a tile that waited late: its product, its wait and the rest."""
        begin_us = batch.begin_us
        late_wait = batch.late_wait_us or (end_us, end_us)
        if late_wait[0] < late_wait[1]:
            self._add(operation, TimelineSpan(operation.rank, track, name, kind, begin_us, late_wait[0]))
            self._spans.append(TimelineSpan(operation.rank, track, name, WAIT, *late_wait))
            begin_us = late_wait[1]
        self._add(operation, TimelineSpan(operation.rank, track, name, kind, begin_us, end_us))

    def end_tiles(self, operation: Operation, kind: SpanKind) -> None:
        """Add the spans of an operation whose last tile has ended."""
        if operation.name in self._tiles:
            claimed, begin, end = self._tiles.pop(operation.name)
            self.add_wait(operation, claimed, begin)
            self.add_span(operation, kind, begin, end)

    def timeline(self, name: str, schedule: Schedule, with_arrows: bool) -> Timeline:
        """Return all spans. with_arrows: from each operation that signals to each that waits for it."""
        drawn = arrows(schedule, self._first, self._last) if with_arrows else ()
        return make_timeline(name, "simulated", schedule.world_size, self._spans, drawn)

    def _add(self, operation: Operation, span: TimelineSpan) -> None:
        self._first.setdefault(operation.name, len(self._spans))
        self._last[operation.name] = len(self._spans)
        self._spans.append(span)
