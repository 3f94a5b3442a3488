"""Runs any Plan on a described machine, event by event, to a Timeline.

Every operation starts when its queue's turn has come and its signals are there, as ir/schedule.py says; engines decide
what it then costs. Ranks enter the call together. Nothing here knows where a Plan came from.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import Dtype
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, KERNELS, TILE_KERNEL, Plan
from overweave.ir.schedule import CREDITS, Apply, Clear, Collective, Compute, Copy, Get, Operation, Put, Reduce
from overweave.ir.timeline.timeline import Timeline
from overweave.sim import cost
from overweave.sim.collectives import Collectives
from overweave.sim.cost import Segment, Work
from overweave.sim.events import Clock, Gate, SignalKey, Signals
from overweave.sim.link_floor import no_sooner_us
from overweave.sim.order import Launch, Step, launches_of, steps_of, tile_counts
from overweave.sim.ports import Ports
from overweave.sim.processor import Batch, Kernel, Processor, TileRun
from overweave.sim.record import Recorder
from overweave.sim.shares import shared


def simulate(plan: Plan, machine: Machine, with_tiles: bool = False, author_tile_us: float | None = None) -> Timeline:
    """The Timeline of one call of `plan`, warm, on `machine`. with_tiles: spans of tiles, not of operations.
    author_tile_us: what one tile of an author's kernel takes, every SM busy; nobody else knows (sim/author.py guesses).

    Raises InputError if the machine has fewer GPUs than the plan has ranks, ScheduleError if the plan cannot be run to
    its end: a queue without an engine, a kernel without a config, or operations that wait for ever.
    """
    if plan.schedule.world_size > machine.gpus:
        found = f"{plan.schedule.world_size} ranks on {machine.gpus} GPUs"
        raise InputError(f"simulate {plan.name}", found, "Choose a machine with more GPUs or a smaller world size")
    return _Run(plan, machine, with_tiles, author_tile_us).timeline()


def total_us(plan: Plan, machine: Machine, author_tile_us: float | None = None) -> float:
    """Time of one call: until the slowest rank has done its last operation, and no sooner than the links allow."""
    return no_sooner_us(plan, machine.links, simulate(plan, machine, author_tile_us=author_tile_us))


class _Node:
    """A step of the run. `turn` opens when its queue lets it go, `ready` when its signals are there too."""

    def __init__(self, run: _Run, step: Step) -> None:
        self.step = step
        self.turn = Gate(partial(run.take_turn, self))
        self.ready = Gate(partial(run.start, self))
        self.late = Gate(partial(run.add, self))
        self.turn_us = self.begin_us = self.end_us = 0.0
        self.is_done = False
        self.tiles = 0  # of a kernel launch, still to be finished
        self.stored_us = 0.0  # of a tile that is stored at peers, behind its end
        self.launches: list[Work] = []  # kernels of its own that follow the one that runs
        self.runs: list[TileRun] = []
        self.kernel: Kernel | None = None  # launched when it is this node's turn
        self.launch = Gate(partial(run.launch, self))
        self.waits_for_start: list[Gate] = []
        self.waits_for_end: list[Gate] = []


class _Run:
    def __init__(self, plan: Plan, machine: Machine, with_tiles: bool, author_tile_us: float | None) -> None:
        self._author_tile_us = author_tile_us
        self._plan, self._machine, self._schedule = plan, machine, plan.schedule
        self._dtype = plan.realization.dtype
        self._dtypes = {buffer.name: buffer.dtype or self._dtype for buffer in plan.schedule.buffers}
        self._products = 2 if plan.problem.epilogue.gate else 1  # that each tile computes
        self._clock, self._signals, self._recorder = Clock(), Signals(), Recorder(with_tiles)
        ranks = plan.schedule.world_size
        self._processors = [Processor(self._clock, machine.processor.sms) for _ in range(ranks)]
        self._ports = Ports(self._clock, machine, ranks, self._hear_traffic)
        self._collectives = Collectives(self._clock, machine, self._processors)
        self._beside = queues_beside(plan)
        self._after = {queue.name: queue.after for queue in plan.schedule.queues}
        steps = steps_of(plan)
        self._nodes = [_Node(self, step) for step in steps]
        launches = launches_of(plan, steps)
        for position, tiles in tile_counts(launches).items():
            self._nodes[position].tiles = tiles
        for launch in launches:
            self._prepare(launch)
        self._connect()

    def timeline(self) -> Timeline:
        self._clock.run()
        stuck = [node.step.operation.name for node in self._nodes if not node.is_done]
        if stuck:
            shown = ", ".join(stuck[:5]) + (f" and {len(stuck) - 5} more" if len(stuck) > 5 else "")
            raise ScheduleError(f"simulate {self._plan.name}", f"waits for ever: {shown}", "See `overweave verify`")
        for rank in range(self._schedule.world_size):
            self._join(rank)
        return self._recorder.timeline(self._plan.name, self._schedule)

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
                    self._signals.wait(key, wait.count, node.late if is_late else node.ready)

    def _join(self, rank: int) -> None:
        """The caller's stream goes on when what ran beside it is over."""
        beside, own = [0.0], [0.0]
        for node in self._nodes:
            if node.step.operation.rank == rank:
                (beside if self._is_beside(node.step) else own).append(node.end_us)
        joined_us = max(beside) + self._machine.latency.join.us
        if len(beside) > 1 and joined_us > max(own):
            self._recorder.joined(rank, self._stream(rank), max(own), joined_us)

    def _is_beside(self, step: Step) -> bool:
        """Whether a step runs on a stream of its own."""
        return step.operation.queue in self._beside

    def _stream(self, rank: int) -> str:
        """The first queue of a rank that runs on the caller's stream."""
        own = [node.step for node in self._nodes if node.step.operation.rank == rank]
        return next((step.operation.queue for step in own if not self._is_beside(step)), "begin")

    def _prepare(self, launch: Launch) -> None:
        """Makes the kernel of a launch; it starts when it is its first operation's turn."""
        runs, machine, config = [], self._machine, self._plan.realization.matmul
        for position, tiles, width, depth in launch.runs:
            node = self._nodes[position]
            operation = node.step.operation
            work = shared(self._kernel_work(node, width, launch.tiles), operation, config, depth)
            delay = machine.latency.observe.us if operation.waits else 0.0
            run = TileRun(tiles, work.tile_us, delay, partial(self._finish_batch, node))
            if isinstance(operation, Compute):
                how = config, self._moved(operation), Work(node.tiles, run.tile_us)
                run.tile_us, run.late_us, node.stored_us = cost.parts_of_tile(machine, self._schedule, operation, how)
                run.is_late_open = not operation.late_waits
            elif isinstance(operation, Apply) and operation.late_waits:
                run.tile_us, run.late_us = cost.before_and_behind_last_part(operation, work.tile_us)
                run.is_late_open = False
            node.runs.append(run)
            runs.append(run)
        first = self._nodes[launch.first]
        first.kernel = Kernel(runs, self._programs(first.step))
        first.launch.expect()
        for key, count in self._launch_signals(first.step):
            self._signals.wait(key, count, first.launch)

    def _programs(self, step: Step) -> int:
        """Of the kernel that starts with a step."""
        realization, sms = self._plan.realization, self._machine.processor.sms
        if isinstance(step.operation, Reduce) and realization.reduction:
            return realization.reduction.programs
        if step.engine == COPY_KERNEL and realization.copy:
            return min(realization.copy.programs, sms)
        return max(1, sms - self._plan.sms_beside)

    def _follows_pushes(self, step: Step) -> bool:
        """Whether a step's kernel is launched once pushes beside it, which wait for nothing, have their SMs."""
        engines = self._plan.realization.engines
        are_beside = any(one.engine == COPY_KERNEL and not self._after.get(one.queue) for one in engines)
        return step.engine in (TILE_KERNEL, AUTHOR_KERNEL) and are_beside and not self._plan.sms_for_pushes

    def _launch_signals(self, step: Step) -> list[tuple[SignalKey, int]]:
        """What a kernel's launch waits for beside its turn. A reduction or a push that no kernel boundary precedes runs
        beside the tiles: it is launched when the first own ones it needs are stored, so as not to take an SM from them.
        """
        operation = step.operation
        if not isinstance(operation, Reduce | Put) or not self._is_beside(step):
            return []
        own = {
            (notify.pad, notify.signal)
            for tile in self._schedule.of_rank(operation.rank)
            if isinstance(tile, Compute | Apply)
            for notify in tile.notifies
            if notify.rank == tile.rank
        }
        return [
            ((operation.rank, wait.pad, signal), wait.count)
            for wait in operation.waits
            for signal in range(*wait.signals)
            if (wait.pad, signal) in own
        ]

    def _moved(self, operation: Operation) -> Dtype:
        """Of what an operation moves, adds or stores."""
        return self._dtypes[operation.writes[0].buffer] if operation.writes else self._dtype

    def _kernel_work(self, node: _Node, width: int, beside: int) -> Work:
        operation, config = node.step.operation, self._plan.realization.matmul
        if isinstance(operation, Reduce):
            return cost.reduce_work(self._machine, operation, self._moved(operation), (node.tiles, beside))
        copy, sms = self._plan.realization.copy, self._machine.processor.sms
        if isinstance(operation, Put) and node.step.engine == AUTHOR_KERNEL:
            return cost.push_work(self._machine, operation, sms, self._moved(operation), node.tiles)
        if isinstance(operation, Put | Copy) and copy is not None:
            return cost.push_work(self._machine, operation, min(copy.programs, sms), self._moved(operation), node.tiles)
        if isinstance(operation, Compute) and config is not None:
            config = replace(config, block_n=(width or config.block_n) * self._products)
            dtypes = self._dtype, self._dtypes[operation.out[0].buffer]
            whole = cost.as_multiplied(operation, self._products)
            return cost.kernel_work(self._machine, whole, config, dtypes, operation.tiles)
        if isinstance(operation, Apply) and self._author_tile_us is not None:
            return Work(node.tiles, self._author_tile_us)
        found = "no matmul config" if isinstance(operation, Compute) else f"a {type(operation).__name__}"
        cure = "Give the realization a config, the queue an engine, or an author's tile a time"
        raise ScheduleError(f"kernel of {operation.name}", found, cure)

    # During the run: gates open.

    def take_turn(self, node: _Node) -> None:
        node.turn_us = self._clock.now
        if node.kernel is not None:
            node.launch.arrive()
        node.ready.arrive()

    def launch(self, node: _Node) -> None:
        """The stream has come to the node's kernel."""
        assert node.kernel is not None
        latency = self._machine.latency
        looks = len(self._launch_signals(node.step)) + self._follows_pushes(node.step)
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
        match operation:
            case Collective():
                self._collectives.start(operation, self._moved(operation), partial(self._leave, node))
            case Compute():
                dtypes, how = (self._dtype, self._dtypes[operation.out[0].buffer]), self._plan.realization
                whole = cost.as_multiplied(operation, self._products)
                self._launch(node, cost.library_work(self._machine, whole, dtypes, how))
            case Reduce():
                self._launch(node, *cost.library_sum_works(self._machine, operation, self._moved(operation)))
            case Put() | Get() | Copy() if cost.moves_between_ranks(operation):
                node.begin_us = self._clock.now
                self._copy(node, list(cost.segments(self._machine, self._schedule, operation, self._moved(operation))))
            case Put() | Get() | Copy() | Clear():
                self._launch(node, cost.local_copy_work(self._machine, operation, self._moved(operation)))

    def _run_packed(self, node: _Node) -> None:
        """A push, or what waits for the pushes of all ranks, of the kernel whose messages carry their flag."""
        operation = node.step.operation
        assert isinstance(operation, Put | Reduce | Copy)
        # A thread that has added knows it.
        signal_us = self._machine.latency.signal.us if isinstance(operation, Put) else 0.0
        took = cost.packed_us(self._machine, operation, self._schedule.world_size - 1, self._moved(operation))
        node.begin_us = self._clock.now
        self._clock.after(took, partial(self._end_timed, node, signal_us))

    def _launch(self, node: _Node, *works: Work) -> None:
        """Kernels of its own for one operation, one after the other."""
        work, *node.launches = works or (Work(0, 0.0),)
        if not work.count:
            self._end(node, self._machine.latency.flag.us)
            return
        run = TileRun(work.count, work.tile_us, 0.0, partial(self._finish_batch, node))
        run.ready_us = self._clock.now
        node.tiles = work.count
        kernel = Kernel([run], self._machine.processor.sms)
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
        self._processors[rank].set_slowdown(1.0 + (factor - 1.0) * min(1.0, load))
