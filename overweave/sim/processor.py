"""One rank's SMs: kernels get free SMs in launch order, programs claim tiles in order, and copies slow them all.

Equal tiles that start together are one batch, so a wave costs one event however many SMs there are. Durations count on
a clock that runs slower while the rank's ports are busy; cuBLAS matmuls have a second clock, which also runs slower
while a collective runs. So a change of speed reschedules one event, not every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from overweave.sim.events import EventQueue

_SAME_US = 1e-6


class TileRun:
    """`count` equal tiles of one operation, adjacent in the order of claims.

    delay_us: of a tile's wait even if its signals are set. ready_us: when the operation's signals arrived, None until
    then. blocked: batches that wait for them. on_batch_end: called with each batch that ends. late_us: work of a tile
    after its late signals (`is_late_ready`); late_blocked: batches that wait for these, their products computed.
    on_all_claimed: called when all its tiles have programs.
    """

    __slots__ = (
        *("blocked", "claimed", "count", "delay_us", "is_late_ready", "late_blocked", "late_us", "on_all_claimed"),
        *("on_batch_end", "ready_us", "tile_us"),
    )

    def __init__(self, count: int, tile_us: float, delay_us: float, on_batch_end: Callable[[Batch], None]) -> None:
        self.on_batch_end = on_batch_end
        self.on_all_claimed: Callable[[], None] | None = None
        self.count = count
        self.tile_us = tile_us
        self.delay_us = delay_us
        self.claimed = 0
        self.ready_us: float | None = None
        self.blocked: list[Batch] = []
        self.late_us = 0.0
        self.is_late_ready = True
        self.late_blocked: list[Batch] = []


class Batch:
    """Tiles `[first, first + len(programs))` of a run, one per program, claimed at one time.

    late_wait_us: begin and end of the wait for late signals; equal if it took no time. None before it.
    """

    __slots__ = ("begin_us", "claimed_us", "first", "kernel", "late_wait_us", "programs", "run")

    def __init__(self, kernel: RunningKernel, run: TileRun, programs: list[int], claimed_us: float) -> None:
        self.kernel = kernel
        self.run = run
        self.first = run.claimed
        self.programs = programs
        self.claimed_us = claimed_us
        self.begin_us = claimed_us
        self.late_wait_us: tuple[float, float] | None = None


class RunningKernel:
    """A launched kernel. runs: in claim order. programs: SMs it may hold. is_library_matmul: collectives slow it."""

    def __init__(self, runs: list[TileRun], programs: int, is_library_matmul: bool = False) -> None:
        self.runs = deque(run for run in runs if run.count)
        self.programs = programs
        self.is_library_matmul = is_library_matmul
        self.resident = 0


class _Pace:
    """Batches that run at one speed, in a heap by their end. on_end: called with the batches that end together."""

    def __init__(self, clock: EventQueue, on_end: Callable[[list[Batch]], None]) -> None:
        self._clock, self._on_end = clock, on_end
        self._running: list[tuple[float, int, Batch]] = []
        self._batches = self._version = 0
        self._speed = 1.0
        self._work_us = self._updated_us = 0.0

    def set_speed(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._schedule()

    def run(self, batch: Batch, work_us: float, delay_us: float = 0.0) -> None:
        """Start a batch's work after a delay, which no slowdown stretches."""
        self._advance()
        self._batches += 1
        heappush(self._running, (self._work_us + delay_us * self._speed + work_us, self._batches, batch))
        self._schedule()

    def _advance(self) -> None:
        self._work_us += (self._clock.now - self._updated_us) * self._speed
        self._updated_us = self._clock.now

    def _schedule(self) -> None:
        self._version += 1
        if self._running:
            version = self._version
            self._clock.after((self._running[0][0] - self._work_us) / self._speed, lambda: self._on_completion(version))

    def _on_completion(self, version: int) -> None:
        """End the batches that are due, unless this event is stale: the speed or the heap has changed since."""
        if version != self._version:
            return
        self._advance()
        ended: list[Batch] = []
        while self._running and self._running[0][0] <= self._work_us + _SAME_US:
            ended.append(heappop(self._running)[2])
        self._on_end(ended)
        self._schedule()


class StreamingMultiprocessors:
    """The SMs of one rank. library_slowdown: factor on the time of cuBLAS matmuls while a collective runs."""

    def __init__(self, clock: EventQueue, sms: int, library_slowdown: float = 1.0) -> None:
        self._clock = clock
        self._free = list(range(sms))
        self._kernels: deque[RunningKernel] = deque()
        self._pace, self._library_pace = _Pace(clock, self._end_batches), _Pace(clock, self._end_batches)
        self._library_slowdown = library_slowdown
        self._slowdown, self._collectives = 1.0, 0

    def launch(self, kernel: RunningKernel) -> None:
        self._kernels.append(kernel)
        self._assign_sms()

    def set_slowdown(self, factor: float) -> None:
        """Stretch the time of every tile by `factor` from now on."""
        self._slowdown = factor
        self._pace.set_speed(1.0 / factor)
        self._set_library_speed()

    def count_collectives(self, more: int) -> None:
        """Add to the number of collectives that run on the rank; `more` may be negative."""
        self._collectives += more
        self._set_library_speed()

    def _set_library_speed(self) -> None:
        factor = self._library_slowdown if self._collectives else 1.0
        self._library_pace.set_speed(1.0 / (self._slowdown * factor))

    def release(self, run: TileRun) -> None:
        """Start the batches that wait for the run's signals, which have arrived."""
        run.ready_us = self._clock.now
        for batch in run.blocked:
            self._begin(batch)
        run.blocked.clear()

    def release_late(self, run: TileRun) -> None:
        """Resume the batches that wait for the run's late signals, which have arrived."""
        run.is_late_ready = True
        for batch in run.late_blocked:
            self._resume(batch)
        run.late_blocked.clear()

    def _assign_sms(self) -> None:
        """Give free SMs to the kernel that was launched first and still has unclaimed tiles."""
        while self._free and self._kernels:
            kernel = self._kernels[0]
            unclaimed = sum(run.count - run.claimed for run in kernel.runs)
            granted = min(len(self._free), kernel.programs - kernel.resident, unclaimed)
            if granted <= 0:
                self._kernels.popleft()
                continue
            programs, self._free = self._free[:granted], self._free[granted:]
            kernel.resident += granted
            self._claim(kernel, programs)

    def _claim(self, kernel: RunningKernel, programs: list[int]) -> None:
        """Let each program claim the next tile; programs without a tile free their SMs."""
        while programs and kernel.runs:
            run = kernel.runs[0]
            claimed = min(len(programs), run.count - run.claimed)
            batch = Batch(kernel, run, programs[:claimed], self._clock.now)
            programs = programs[claimed:]
            run.claimed += claimed
            if run.claimed == run.count:
                kernel.runs.popleft()
            if run.ready_us is None:
                run.blocked.append(batch)
            else:
                self._begin(batch)
            if run.on_all_claimed is not None and run.claimed == run.count:
                run.on_all_claimed()
        if programs:
            kernel.resident -= len(programs)
            self._free += programs

    def _begin(self, batch: Batch) -> None:
        delay_us = batch.run.delay_us
        batch.begin_us = self._clock.now + delay_us
        self._pace_of(batch).run(batch, batch.run.tile_us, delay_us)

    def _pace_of(self, batch: Batch) -> _Pace:
        return self._library_pace if batch.kernel.is_library_matmul else self._pace

    def _wait_late(self, batch: Batch) -> None:
        """Begin the late wait of a batch whose products are computed: its addends may not have arrived."""
        batch.late_wait_us = (self._clock.now, self._clock.now)
        if batch.run.is_late_ready:
            self._resume(batch)
        else:
            batch.run.late_blocked.append(batch)

    def _resume(self, batch: Batch) -> None:
        assert batch.late_wait_us is not None, "it waits late"
        batch.late_wait_us = (batch.late_wait_us[0], self._clock.now)
        self._pace_of(batch).run(batch, batch.run.late_us)

    def _end_batches(self, ended: list[Batch]) -> None:
        """End batches, or begin their late wait; their programs claim the next tiles."""
        for batch in ended:
            if batch.run.late_us and batch.late_wait_us is None:
                self._wait_late(batch)
                continue
            batch.run.on_batch_end(batch)
            self._claim(batch.kernel, batch.programs)
        self._assign_sms()
