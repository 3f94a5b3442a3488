"""One rank's SMs: kernels get them as they fall free, programs claim tiles in order, and traffic slows them all.

Tiles that start together on equal terms are one batch, so a wave costs one event however wide the GPU is. Durations
count on clocks of their own, which run slower while the rank's ports are busy, and those of the library's matmuls while
a collective runs: a change of speed moves no batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from overweave.sim.events import EventQueue

_SAME_US = 1e-6


class TileRun:
    """`count` equal tiles of one operation, neighbours in the order of claims.

    delay_us: what a tile spends on its wait even if nothing is missing. ready_us: when the operation's signals were
    there, None until then. blocked: programs that wait for them. finished: hears of each batch that has ended.
    late_us: what a tile does after that, once what it waits for late is there (`is_late_open`); held: programs that
    wait for it, each with its tile computed. when_claimed: called when all its tiles have programs.
    """

    __slots__ = (
        *("blocked", "claimed", "count", "delay_us", "finished", "held", "is_late_open", "late_us", "ready_us"),
        *("tile_us", "when_claimed"),
    )

    def __init__(self, count: int, tile_us: float, delay_us: float, finished: Callable[[Batch], None]) -> None:
        self.finished = finished
        self.when_claimed: Callable[[], None] | None = None
        self.count = count
        self.tile_us = tile_us
        self.delay_us = delay_us
        self.claimed = 0
        self.ready_us: float | None = None
        self.blocked: list[Batch] = []
        self.late_us = 0.0
        self.is_late_open = True
        self.held: list[Batch] = []


class Batch:
    """Tiles `[first, first + len(programs))` of a run, one per program, claimed at one time.

    held_us: from when until when they waited for what they need late; the same time twice if they did not.
    """

    __slots__ = ("begin_us", "claimed_us", "first", "held_us", "kernel", "programs", "run")

    def __init__(self, kernel: RunningKernel, run: TileRun, programs: list[int], claimed_us: float) -> None:
        self.kernel = kernel
        self.run = run
        self.first = run.claimed
        self.programs = programs
        self.claimed_us = claimed_us
        self.begin_us = claimed_us
        self.held_us: tuple[float, float] | None = None


class RunningKernel:
    """A launch: its runs in claim order and how many SMs it may hold. is_library_matmul: collectives slow it."""

    def __init__(self, runs: list[TileRun], programs: int, is_library_matmul: bool = False) -> None:
        self.runs = deque(run for run in runs if run.count)
        self.programs = programs
        self.is_library_matmul = is_library_matmul
        self.resident = 0


class _Pace:
    """Batches whose work goes on at one speed, the next to end first; `ended` hears of each."""

    def __init__(self, clock: EventQueue, ended: Callable[[list[Batch]], None]) -> None:
        self._clock, self._ended = clock, ended
        self._running: list[tuple[float, int, Batch]] = []
        self._batches = self._version = 0
        self._speed = 1.0
        self._work_us = self._updated_us = 0.0

    def set_speed(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._schedule()

    def run(self, batch: Batch, work_us: float, delay_us: float = 0.0) -> None:
        """Work that begins now, behind a delay that no slowdown stretches."""
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
            self._clock.after((self._running[0][0] - self._work_us) / self._speed, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        over: list[Batch] = []
        while self._running and self._running[0][0] <= self._work_us + _SAME_US:
            over.append(heappop(self._running)[2])
        self._ended(over)
        self._schedule()


class StreamingMultiprocessors:
    """library_slowdown: of the library's matmuls while a collective runs on the rank."""

    def __init__(self, clock: EventQueue, sms: int, library_slowdown: float = 1.0) -> None:
        self._clock = clock
        self._free = list(range(sms))
        self._kernels: deque[RunningKernel] = deque()
        self._pace, self._library_pace = _Pace(clock, self._end), _Pace(clock, self._end)
        self._library_slowdown = library_slowdown
        self._slowdown, self._collectives = 1.0, 0

    def launch(self, kernel: RunningKernel) -> None:
        self._kernels.append(kernel)
        self._grant()

    def set_slowdown(self, factor: float) -> None:
        """From now on every tile takes `factor` times as long."""
        self._slowdown = factor
        self._pace.set_speed(1.0 / factor)
        self._set_library_speed()

    def count_collectives(self, more: int) -> None:
        """So many more of the library's collectives run on the rank, or, negative, fewer."""
        self._collectives += more
        self._set_library_speed()

    def _set_library_speed(self) -> None:
        beside = self._library_slowdown if self._collectives else 1.0
        self._library_pace.set_speed(1.0 / (self._slowdown * beside))

    def open(self, run: TileRun) -> None:
        """The run's signals are there: programs that wait for them begin."""
        run.ready_us = self._clock.now
        for batch in run.blocked:
            self._begin(batch)
        run.blocked.clear()

    def open_late(self, run: TileRun) -> None:
        """What the run waits for late is there: programs that were held go on."""
        run.is_late_open = True
        for batch in run.held:
            self._go_on(batch)
        run.held.clear()

    def _grant(self) -> None:
        """Free SMs go to the kernel that was launched first and still has tiles to claim."""
        while self._free and self._kernels:
            kernel = self._kernels[0]
            unclaimed = sum(run.count - run.claimed for run in kernel.runs)
            wanted = min(len(self._free), kernel.programs - kernel.resident, unclaimed)
            if wanted <= 0:
                self._kernels.popleft()
                continue
            programs, self._free = self._free[:wanted], self._free[wanted:]
            kernel.resident += wanted
            self._claim(kernel, programs)

    def _claim(self, kernel: RunningKernel, programs: list[int]) -> None:
        """Each program takes the next tile; those that find none leave."""
        while programs and kernel.runs:
            run = kernel.runs[0]
            taken = min(len(programs), run.count - run.claimed)
            batch = Batch(kernel, run, programs[:taken], self._clock.now)
            programs = programs[taken:]
            run.claimed += taken
            if run.claimed == run.count:
                kernel.runs.popleft()
            if run.ready_us is None:
                run.blocked.append(batch)
            else:
                self._begin(batch)
            if run.when_claimed is not None and run.claimed == run.count:
                run.when_claimed()
        if programs:
            kernel.resident -= len(programs)
            self._free += programs

    def _begin(self, batch: Batch) -> None:
        delay_us = batch.run.delay_us
        batch.begin_us = self._clock.now + delay_us
        self._pace_of(batch).run(batch, batch.run.tile_us, delay_us)

    def _pace_of(self, batch: Batch) -> _Pace:
        return self._library_pace if batch.kernel.is_library_matmul else self._pace

    def _hold(self, batch: Batch) -> None:
        """Its tiles are computed; what they add may not be there."""
        batch.held_us = (self._clock.now, self._clock.now)
        if batch.run.is_late_open:
            self._go_on(batch)
        else:
            batch.run.held.append(batch)

    def _go_on(self, batch: Batch) -> None:
        assert batch.held_us is not None, "it was held"
        batch.held_us = (batch.held_us[0], self._clock.now)
        self._pace_of(batch).run(batch, batch.run.late_us)

    def _end(self, over: list[Batch]) -> None:
        """The work of some batches is done: their programs take the next tiles, or leave."""
        for batch in over:
            if batch.run.late_us and batch.held_us is None:
                self._hold(batch)
                continue
            batch.run.finished(batch)
            self._claim(batch.kernel, batch.programs)
        self._grant()
