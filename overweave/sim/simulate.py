"""Runs any Plan on a described machine, event by event, to a Timeline.

Every operation starts when its queue's turn has come and its signals are there, as ir/schedule.py says; engines decide
what it then costs. Ranks enter the call together. Nothing here knows where a Plan came from.
"""

from __future__ import annotations

from functools import partial

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import Machine
from overweave.ir.launch.reach import NO_REACH, addresses_peers
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, KERNELS, TILE_KERNEL, Plan
from overweave.ir.schedule import CREDITS, Apply, Collective, Compute, Copy, Get, Put, Reduce
from overweave.ir.timeline.timeline import Timeline
from overweave.sim.collectives import Collectives
from overweave.sim.cost import Costs, KernelCost, Segment, moves_between_ranks
from overweave.sim.events import EventQueue, Gate, SignalCounters, SignalKey
from overweave.sim.link_floor import no_sooner_us
from overweave.sim.order import KernelLaunch, LaunchStep, launches_of, steps_of, tile_counts
from overweave.sim.ports import Ports
from overweave.sim.processor import Batch, RunningKernel, StreamingMultiprocessors, TileRun
from overweave.sim.record import Recorder


def simulate(plan: Plan, machine: Machine, with_tiles: bool = False, author_tile_us: float | None = None) -> Timeline:
    """The Timeline of one call of `plan`, warm, on `machine`. with_tiles: spans of tiles, not of operations.
    author_tile_us: what one tile of an author's kernel takes, every SM busy; nobody else knows (sim/author.py guesses).

    Raises InputError if the machine has fewer GPUs than the plan has ranks, or no peer access and the plan addresses
    peers, ScheduleError if the plan cannot be run to its end: a queue without an engine, a kernel without a config, or
    operations that wait for ever.
    """
    _check_machine(plan, machine)
    return _timeline(_Run(plan, machine, with_tiles, author_tile_us), with_arrows=True)


def total_us(plan: Plan, machine: Machine, author_tile_us: float | None = None) -> float:
    """Time of one call: until the slowest rank has done its last operation, and no sooner than the links allow.

    Raises as `simulate`.
    """
    _check_machine(plan, machine)
    return no_sooner_us(plan, machine, _timeline(_Run(plan, machine, False, author_tile_us), with_arrows=False))


def _timeline(run: _Run, with_arrows: bool) -> Timeline:
    """Of a run that is over then: what refers to each other in it is let go, and leaves nothing to be collected.

    MEASURED: the collection behind a first call's choice took 0.1 to 0.2 of its 0.6 s (campaigns.choice_by_machine).
    """
    try:
        return run.timeline(with_arrows)
    finally:
        run.let_go()


def _check_machine(plan: Plan, machine: Machine) -> None:
    if plan.schedule.world_size > machine.gpus:
        found = f"{plan.schedule.world_size} ranks on {machine.gpus} GPUs"
        raise InputError(f"simulate {plan.name}", found, "Choose a machine with more GPUs or a smaller world size")
    if not machine.peer_access and addresses_peers(plan.schedule):
        found = f"the GPUs of {machine.name} {NO_REACH}"
        cure = "Take a plan whose rows the library moves, such as sequential, or another machine"
        raise InputError(f"simulate {plan.name}", found, cure)


class _Node:
    """A step of the run. `turn` opens when its queue lets it go, `ready` when its signals are there too.

    late: opens when what its tiles wait for late is there, where they do. launch: lets its kernel go, where it has one.
    """

    __slots__ = (
        *(
            "begin_us",
            "end_us",
            "is_done",
            "kernel",
            "late",
            "launch",
            "launches",
            "ready",
            "runs",
            "step",
            "stored_us",
        ),
        *("tiles", "turn", "turn_us", "waits_for_end", "waits_for_start"),
    )

    def __init__(self, run: _Run, step: LaunchStep) -> None:
        self.step = step
        self.turn = Gate(partial(run.take_turn, self))
        self.ready = Gate(partial(run.start, self))
        self.late: Gate | None = None
        self.launch: Gate | None = None
        self.turn_us = self.begin_us = self.end_us = 0.0
        self.is_done = False
        self.tiles = 0  # of a kernel launch, still to be finished
        self.stored_us = 0.0  # of a tile that is stored at peers, behind its end
        self.launches: tuple[KernelCost, ...] = ()  # kernels of its own that follow the one that runs
        self.runs: list[TileRun] = []
        self.kernel: RunningKernel | None = None  # launched when it is this node's turn
        self.waits_for_start: list[Gate] = []
        self.waits_for_end: list[Gate] = []

    def let_go(self) -> None:
        """Of what refers to it."""
        for name in ("turn", "ready", "late", "launch", "runs", "kernel", "waits_for_start", "waits_for_end"):
            delattr(self, name)


class _Run:
    def __init__(self, plan: Plan, machine: Machine, with_tiles: bool, author_tile_us: float | None) -> None:
        self._plan, self._machine, self._schedule = plan, machine, plan.schedule
        self._costs = Costs(plan, machine, author_tile_us)
        self._clock, self._signals, self._recorder = EventQueue(), SignalCounters(), Recorder(with_tiles)
        ranks = plan.schedule.world_size
        beside = machine.sharing.library_matmul.factor
        self._processors = [StreamingMultiprocessors(self._clock, machine.processor.sms, beside) for _ in range(ranks)]
        self._ports = Ports(self._clock, machine, self._hear_traffic)
        self._collectives = Collectives(
            self._clock, machine, self._processors, self._costs, plan.realization.library_sms
        )
        self._beside = queues_beside(plan)
        self._tile_programs = max(1, machine.processor.sms - plan.sms_beside)
        # Whether tiles are launched once pushes beside them, which wait for nothing, have their SMs.
        pushes = {one.queue for one in plan.realization.engines if one.engine == COPY_KERNEL}
        self._follows_pushes = not pushes.isdisjoint(self._beside) and not plan.sms_for_pushes
        steps = steps_of(plan)
        self._nodes = [_Node(self, step) for step in steps]
        self._of_rank: list[list[_Node]] = [[] for _ in range(ranks)]
        for node in self._nodes:
            self._of_rank[node.step.operation.rank].append(node)
        launches = launches_of(plan, steps)
        for position, tiles in tile_counts(launches).items():
            self._nodes[position].tiles = tiles
        for launch in launches:
            self._prepare(launch)
        self._connect()

    def timeline(self, with_arrows: bool) -> Timeline:
        self._clock.run()
        stuck = [node.step.operation.name for node in self._nodes if not node.is_done]
        if stuck:
            shown = ", ".join(stuck[:5]) + (f" and {len(stuck) - 5} more" if len(stuck) > 5 else "")
            raise ScheduleError(f"simulate {self._plan.name}", f"waits for ever: {shown}", "See `overweave verify`")
        for rank in range(self._schedule.world_size):
            self._join(rank)
        return self._recorder.timeline(self._plan.name, self._schedule, with_arrows)

    def let_go(self) -> None:
        for node in self._nodes:
            node.let_go()
        self.__dict__.clear()

    # Before the run.

    def _connect(self) -> None:
        """Lets every gate expect what the schedule says it waits for."""
        latency = self._machine.latency
        head_us = latency.call.us
        if self._schedule.reuse == CREDITS and (self._schedule.pads or self._schedule.credits):
            head_us += latency.begin.us
            for rank in range(self._schedule.world_size):
                self._recorder.begin(rank, self._stream(rank), latency.call.us, head_us)
        for node in self._nodes:
            step = node.step
            graph_us = latency.graph.us if step.engine == COPY_ENGINE else 0.0
            self._clock.at(head_us + graph_us, node.turn.expect().arrive)
            for before in step.done:
                self._nodes[before].waits_for_end.append(node.turn.expect())
            for before in step.started:
                self._nodes[before].waits_for_start.append(node.turn.expect())
            node.ready.expect()
            for wait in step.operation.all_waits:
                is_late = step.engine in KERNELS and wait not in step.operation.waits
                for signal in range(*wait.signals):
                    key = (step.operation.rank, wait.pad, signal)
                    self._signals.wait(key, wait.count, self._late(node) if is_late else node.ready)

    def _late(self, node: _Node) -> Gate:
        """The gate of a node whose tiles wait for something late."""
        if node.late is None:
            node.late = Gate(partial(self.add, node))
        return node.late

    def _join(self, rank: int) -> None:
        """The caller's stream goes on when what ran beside it is over."""
        beside, own = [0.0], [0.0]
        for node in self._of_rank[rank]:
            (beside if self._is_beside(node.step) else own).append(node.end_us)
        joined_us = max(beside) + self._machine.latency.join.us
        if len(beside) > 1 and joined_us > max(own):
            self._recorder.joined(rank, self._stream(rank), max(own), joined_us)

    def _is_beside(self, step: LaunchStep) -> bool:
        """Whether a step runs on a stream of its own."""
        return step.operation.queue in self._beside

    def _stream(self, rank: int) -> str:
        """The first queue of a rank that runs on the caller's stream."""
        steps = (node.step for node in self._of_rank[rank])
        return next((step.operation.queue for step in steps if not self._is_beside(step)), "begin")

    def _prepare(self, launch: KernelLaunch) -> None:
        """Makes the kernel of a launch; it starts when it is its first operation's turn."""
        runs = []
        for each in launch.runs:
            node = self._nodes[each.operation]
            operation = node.step.operation
            work = self._costs.tiles(node.step, each, node.tiles, launch.tiles)
            delay_us = self._machine.latency.observe.us if operation.waits else 0.0
            run = TileRun(each.tiles, work.tile_us, delay_us, partial(self._finish_batch, node))
            run.late_us, node.stored_us = work.late_us, work.stored_us
            run.is_late_open = not (isinstance(operation, Compute | Apply) and operation.late_waits)
            node.runs.append(run)
            runs.append(run)
        first = self._nodes[launch.first]
        first.kernel = RunningKernel(runs, self._programs(first.step))
        first.launch = Gate(partial(self.launch, first)).expect()
        for key, count in self._launch_signals(first.step):
            self._signals.wait(key, count, first.launch)

    def _programs(self, step: LaunchStep) -> int:
        """Of the kernel that starts with a step."""
        realization, sms = self._plan.realization, self._machine.processor.sms
        if isinstance(step.operation, Reduce) and realization.reduction:
            return realization.reduction.programs
        if step.engine == COPY_KERNEL and realization.copy:
            return min(realization.copy.programs, sms)
        return self._tile_programs

    def _launch_signals(self, step: LaunchStep) -> list[tuple[SignalKey, int]]:
        """What a kernel's launch waits for beside its turn. A reduction or a push that no kernel boundary precedes runs
        beside the tiles: it is launched when the first own ones it needs are stored, so as not to take an SM from them.
        """
        operation = step.operation
        if not isinstance(operation, Reduce | Put) or not self._is_beside(step):
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

    def take_turn(self, node: _Node) -> None:
        node.turn_us = self._clock.now
        if node.launch is not None:
            node.launch.arrive()
        node.ready.arrive()

    def launch(self, node: _Node) -> None:
        """The stream has come to the node's kernel."""
        assert node.kernel is not None
        latency = self._machine.latency
        has_tiles = node.step.engine in (TILE_KERNEL, AUTHOR_KERNEL)
        looks = len(self._launch_signals(node.step)) + (has_tiles and self._follows_pushes)
        waited_us = latency.stream_wait.us * looks
        processor = self._processors[node.step.operation.rank]
        self._clock.after(waited_us + latency.kernel.us, partial(processor.launch, node.kernel))

    def start(self, node: _Node) -> None:
        for gate in node.waits_for_start:
            gate.arrive()
        if node.step.engine in KERNELS:
            self._open_tiles(node)
            return
        self._recorder.waited(node.step.operation, node.turn_us, self._clock.now)
        if node.step.is_packed:
            self._run_packed(node)
            return
        # A stream looks at one signal after the other.
        signals = sum(wait.signals[1] - wait.signals[0] for wait in node.step.operation.waits)
        latency = self._machine.latency.stream_wait.us * signals
        if isinstance(node.step.operation, Copy):
            latency += node.step.operation.delay_us
        self._clock.after(latency, partial(self._perform, node))

    def _open_tiles(self, node: _Node) -> None:
        for run in node.runs:
            self._processors[node.step.operation.rank].open(run)
        if not node.tiles:
            self._end(node, self._machine.latency.signal.us)

    def add(self, node: _Node) -> None:
        """What the tiles of a node wait for late is there."""
        for run in node.runs:
            self._processors[node.step.operation.rank].open_late(run)

    def _perform(self, node: _Node) -> None:
        """Starts an operation that a stream or a copy engine runs."""
        operation = node.step.operation
        if isinstance(operation, Collective):
            self._collectives.start(operation, partial(self._leave, node))
        elif isinstance(operation, Put | Get | Copy) and self._needs_no_sm(operation):
            node.begin_us = self._clock.now
            self._copy(node, list(self._costs.segments(operation)))
        else:
            self._launch(node, *self._costs.alone(operation))

    def _needs_no_sm(self, operation: Put | Get | Copy) -> bool:
        """Whether copy engines move it."""
        return self._machine.local_copies.by == "dma" or moves_between_ranks(operation)

    def _run_packed(self, node: _Node) -> None:
        """A push, or what waits for the pushes of all ranks, of the kernel whose messages carry their flag."""
        operation = node.step.operation
        # A thread that has added knows it.
        signal_us = self._machine.latency.signal.us if isinstance(operation, Put) else 0.0
        took_us = self._costs.packed_us(operation, self._schedule.world_size - 1)
        node.begin_us = self._clock.now
        self._clock.after(took_us, partial(self._end_timed, node, signal_us))

    def _launch(self, node: _Node, *works: KernelCost) -> None:
        """Kernels of its own for one operation, one after the other."""
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

    def _copy(self, node: _Node, left: list[Segment]) -> None:
        if left:
            self._ports.copy(left[0], partial(self._copy, node, left[1:]))
            return
        self._end_timed(node, self._machine.latency.flag.us)

    def _end_timed(self, node: _Node, signal_us: float) -> None:
        self._recorder.ran(node.step.operation, node.step.kind, node.begin_us, self._clock.now)
        self._end(node, signal_us)

    def _leave(self, node: _Node, begin_us: float, met_us: float) -> None:
        self._recorder.waited(node.step.operation, begin_us, met_us)
        self._recorder.ran(node.step.operation, node.step.kind, met_us, self._clock.now)
        self._end(node, self._machine.latency.flag.us)

    # During the run: things end.

    def _finish_batch(self, node: _Node, batch: Batch) -> None:
        operation = node.step.operation
        done = len(batch.programs)
        node.tiles -= done
        self._recorder.tiles(operation, node.step.kind, batch, self._clock.now)
        latency, is_by_kernel = self._machine.latency, node.step.engine in KERNELS
        is_tile_wise = is_by_kernel and (isinstance(operation, Compute | Apply) or operation.instances > 1)
        if is_tile_wise and operation.notifies:
            self._clock.after(node.stored_us + latency.signal.us, partial(self._notify, node, done))
        if not node.tiles and node.launches:
            self._launch(node, *node.launches)
        elif not node.tiles:
            self._recorder.tiles_done(operation, node.step.kind)
            signal_us = latency.signal.us if is_by_kernel else latency.flag.us
            self._clock.after(node.stored_us, partial(self._end, node, signal_us, not is_tile_wise))

    def _end(self, node: _Node, signal_us: float, notifies: bool = True) -> None:
        """A stream goes on once its flags are written, a copy engine's one by one; a kernel goes on at once."""
        operation, delay = node.step.operation, 0.0
        for notify in operation.notifies:
            delay = delay + signal_us if node.step.engine == COPY_ENGINE else signal_us
            if notifies:
                key = notify.rank, notify.pad, notify.signal
                self._clock.after(delay, partial(self._signals.add, key, operation.instances))
        self._clock.after(0.0 if node.step.engine in KERNELS else delay, partial(self._complete, node))

    def _notify(self, node: _Node, amount: int) -> None:
        for notify in node.step.operation.notifies:
            self._signals.add((notify.rank, notify.pad, notify.signal), amount)

    def _complete(self, node: _Node) -> None:
        node.is_done = True
        node.end_us = self._clock.now
        for gate in node.waits_for_end:
            gate.arrive()

    def _hear_traffic(self, rank: int, load: float) -> None:
        """Copies beside kernels slow them."""
        factor = self._machine.sharing.copy_engine.factor
        self._processors[rank].set_slowdown(1.0 + (factor - 1.0) * load)
